/*
 * The system calls of a relay (relay.h) once it serves: these, with whatever arguments. Any other
 * ends the relay, and with it process 1 and the sandbox.
 *
 * Each is here for one place of relay.h:
 *   read, write                  what is copied, the ends, the byte for a taken offer
 *   epoll_pwait, epoll_ctl       the wait, and a new connection in it
 *   accept4, recvmsg             a connection of a command, and the daemon's socket for it
 *   fcntl, setsockopt            that socket does not block; no delay, and a reset
 *   shutdown, close              ends
 *   exit_group                   the door is closed and nothing is left
 *
 * Nothing in here uses more than the kernel's headers: a test compiles it by itself.
 */

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define RELAY_ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define RELAY_ARCHITECTURE AUDIT_ARCH_AARCH64
#endif

#define RELAY_LOADS(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RELAY_MAY(number) \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (number), 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

/* The numbers of x32 have a bit that no number here has. */
static struct sock_filter relay_filter[] = {
    RELAY_LOADS(arch),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, RELAY_ARCHITECTURE, 1, 0),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    RELAY_LOADS(nr),
    RELAY_MAY(SYS_read),
    RELAY_MAY(SYS_write),
    RELAY_MAY(SYS_epoll_pwait),
    RELAY_MAY(SYS_epoll_ctl),
    RELAY_MAY(SYS_accept4),
    RELAY_MAY(SYS_recvmsg),
    RELAY_MAY(SYS_fcntl),
    RELAY_MAY(SYS_setsockopt),
    RELAY_MAY(SYS_shutdown),
    RELAY_MAY(SYS_close),
    RELAY_MAY(SYS_exit_group),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
};

static const struct sock_fprog relay_program = {sizeof relay_filter / sizeof *relay_filter,
                                                relay_filter};
