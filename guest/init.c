/*
 * Process 1 of a sandbox that has a kernel of its own: it starts commands, kills what is left of
 * them, proves that nothing is left, and reports. Its other end is the daemon, over one
 * SOCK_SEQPACKET socket on descriptor 3; the frames are those of sbxd/jail/frames.py.
 *
 * Invariants: one command at a time; for every RUN there is one FAILED, or one STARTED, one EXITED
 * and one QUIET, in this order. QUIET means that wait4 said ECHILD: every orphan becomes a child
 * of process 1, so without a child there is no process but this one. A frame that does not parse,
 * or that comes in the wrong state, ends process 1 and with it the sandbox's kernel.
 *
 * Freestanding: no library, no allocation, no state but what is below. It is started from a
 * descriptor, so it needs nothing of the image, not even a directory to lie in. It is position
 * independent and has a stack protector (hardening.h).
 *
 * The process of the next command is made ahead, while none runs: it has the workload's identity
 * and filter already, and waits for its streams. It shares this process's memory until its exec
 * (CLONE_VM), so no page table is copied, it reads the command where this process has parsed it, and
 * it tells of a failure there. No other process of its uid is alive in that time.
 *
 * On the host's kernel the same program is the process of one command (`command.h`).
 *
 * Deliberately absent: any judgement of why a command ended; any way for a command to speak to
 * this process (the channel is closed in every child before its program runs).
 */

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

enum { RUN = 2, STARTED = 4, FAILED = 5, EXITED = 6, READY = 7, KILL = 8, QUIET = 9, LIMIT = 10,
       FILTER = 11, PORT = 20, DOOR = 21 };
enum { CHANNEL = 3, WORKLOAD_ID = 10001, FRAME_MAX = 192 * 1024, HEAD = 5, CHILD_STACK = 65536 };

static const char WORKSPACE[] = "/workspace";

static unsigned char frame[FRAME_MAX + 1];
static char *strings[FRAME_MAX];
static char stack[CHILD_STACK] __attribute__((aligned(16)));
static uint64_t processes_max = 1;
static struct sock_filter filter[BPF_MAXINSNS];
static size_t filter_length; /* no command without a filter */

static struct {
    uint32_t number;
    int streams[3];
    char *directory, *path, **argv, **environment;
    /* Written by the child, read once it has ended. */
    const char *volatile failed_step;
    volatile int failed_errno;
} command;

static enum { IDLE, RUNNING, DRAINING } state;
static long main_process;
static long waiting;   /* the process made ahead, 0 for none */
static int waiting_fd; /* our end of its socket: the end of file says that it is the command, or dead */
static int pair[2];

/* --- the kernel ------------------------------------------------------------------------------ */

#if defined(__x86_64__)

__asm__(".globl _start\n_start: xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call begin\n ud2\n");

static long call(long number, long a, long b, long c, long d, long e)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}

/* The child runs `function` on a stack of its own and does not return from it. */
static long clone_with_stack(unsigned long flags, char *top, void (*function)(void))
{
    long result;
    register long r10 __asm__("r10") = 0;
    register long r8 __asm__("r8") = 0;
    __asm__ volatile("syscall\n test %%rax, %%rax\n jnz 1f\n xor %%ebp, %%ebp\n call *%%rbx\n ud2\n1:"
                     : "=a"(result)
                     : "0"((long)SYS_clone), "D"(flags), "S"(top), "d"(0L), "r"(r10), "r"(r8),
                       "b"(function)
                     : "rcx", "r11", "memory");
    return result;
}

#elif defined(__aarch64__)

__asm__(".globl _start\n_start: mov x29, #0\n mov x30, #0\n mov x0, sp\n bl begin\n brk #1\n");

static long call(long number, long a, long b, long c, long d, long e)
{
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    __asm__ volatile("svc #0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
                     : "memory");
    return x0;
}

static long clone_with_stack(unsigned long flags, char *top, void (*function)(void))
{
    register long x8 __asm__("x8") = SYS_clone;
    register long x0 __asm__("x0") = (long)flags;
    register long x1 __asm__("x1") = (long)top;
    register long x2 __asm__("x2") = 0;
    register long x3 __asm__("x3") = 0;
    register long x4 __asm__("x4") = 0;
    register void (*x19)(void) __asm__("x19") = function;
    __asm__ volatile("svc #0\n cbnz x0, 1f\n mov x29, #0\n blr x19\n brk #1\n1:"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x19)
                     : "memory", "x30");
    return x0;
}

#else
#error "no system calls for this machine"
#endif

/* The compiler may call these. */
void *memset(void *target, int value, size_t size)
{
    for (unsigned char *byte = target; size--; byte++)
        *byte = (unsigned char)value;
    return target;
}

void *memcpy(void *target, const void *source, size_t size)
{
    const unsigned char *from = source;
    for (unsigned char *to = target; size--; to++, from++)
        *to = *from;
    return target;
}

__attribute__((noreturn)) static void leave(int status)
{
    for (;;)
        call(SYS_exit_group, status, 0, 0, 0, 0);
}

#include "hardening.h"

static int report_fd; /* where the process of a command tells of a failure (command.h) */

/* The step that failed, a zero byte, and the errno in decimal digits. */
static void report(const char *step, long error)
{
    char out[128], digits[24];
    size_t size = 0, count = 0;
    while (*step && size < sizeof out - sizeof digits - 1)
        out[size++] = *step++;
    out[size++] = 0;
    do
        digits[count++] = (char)('0' + error % 10);
    while (error /= 10);
    while (count)
        out[size++] = digits[--count];
    call(SYS_write, report_fd, (long)out, (long)size, 0, 0);
}

/* Something is broken: the kernel of the sandbox ends with process 1. */
static void require(int condition, int status)
{
    if (condition)
        return;
    if (report_fd)
        report("command", EPROTO);
    leave(status);
}

#include "relay.h"

/* --- frames to the daemon -------------------------------------------------------------------- */

static size_t put_number(unsigned char *at, uint32_t number)
{
    for (int i = 0; i < 4; i++)
        at[i] = (unsigned char)(number >> (24 - 8 * i));
    return 4;
}

static void say(int verb, uint32_t number, const int32_t *value, const char *text)
{
    unsigned char out[128];
    size_t size = 0;
    out[size++] = (unsigned char)verb;
    size += put_number(out + size, number);
    if (value)
        size += put_number(out + size, (uint32_t)*value);
    while (text && *text && size < sizeof out - 1)
        out[size++] = (unsigned char)*text++;
    if (text)
        out[size++] = 0;
    long sent;
    do
        sent = call(SYS_write, CHANNEL, (long)out, (long)size, 0, 0);
    while (sent == -EINTR);
    require(sent == (long)size, 10);
}

/* --- the child ------------------------------------------------------------------------------- */

__attribute__((noreturn)) static void fail(const char *step, long error)
{
    if (report_fd)
        report(step, -error);
    command.failed_errno = (int)-error;
    command.failed_step = step;
    leave(127);
}

static void must(const char *step, long result)
{
    if (result < 0)
        fail(step, result);
}

static void limit(int resource, uint64_t soft, uint64_t hard)
{
    uint64_t pair[2] = {soft, hard};
    must("set_limits", call(SYS_prlimit64, 0, resource, (long)pair, 0, 0));
}

static int starts_with_workspace(const char *path)
{
    size_t i = 0;
    while (WORKSPACE[i] && path[i] == WORKSPACE[i])
        i++;
    return !WORKSPACE[i] && (!path[i] || path[i] == '/');
}

static long enter(const char *wanted)
{
    long result = call(SYS_chdir, (long)WORKSPACE, 0, 0, 0, 0);
    return result < 0 ? result : call(SYS_chdir, (long)wanted, 0, 0, 0, 0);
}

/* A command has closed the workspace to its owner: no other could start to open it again. */
static int open_the_workspace_again(void)
{
    static struct stat found;
    if (call(SYS_newfstatat, AT_FDCWD, (long)WORKSPACE, (long)&found, 0, 0) < 0 ||
        (found.st_mode & S_IRWXU) == S_IRWXU)
        return 0;
    long mode = (found.st_mode & 07777) | S_IRWXU;
    return call(SYS_fchmodat, AT_FDCWD, (long)WORKSPACE, mode, 0, 0) == 0;
}

static void enter_by_name(void)
{
    static const char step[] = "enter_the_working_directory";
    static char here[4096];
    const char *wanted = command.directory[0] ? command.directory : ".";
    if (wanted[0] == '/')
        fail(step, -EINVAL);
    long result = enter(wanted);
    if (result == -EACCES && open_the_workspace_again())
        result = enter(wanted);
    must(step, result);
    must(step, call(SYS_getcwd, (long)here, sizeof here, 0, 0, 0));
    if (!starts_with_workspace(here))
        fail(step, -EXDEV);
}

/* 0 when another place of the search path may be tried. */
static long try_program(const char *path)
{
    long result = call(SYS_execve, (long)path, (long)command.argv, (long)command.environment, 0, 0);
    if (result == -ENOENT || result == -ENOTDIR) {
        if (call(SYS_faccessat, AT_FDCWD, (long)path, 0, 0, 0) == 0)
            fail("interpreter", -ENOENT);
        return 0;
    }
    if (result != -EACCES)
        fail("execute", result);
    return result;
}

/* The next entry of the search path, checked; how long it is. */
static size_t take_an_entry(const char **place, char *entry)
{
    size_t size = 0;
    const char *c = *place;
    while (*c && *c != ':' && size < 4096)
        entry[size++] = *c++;
    entry[size] = 0;
    if (entry[0] != '/' || (*c && *c != ':') || starts_with_workspace(entry))
        fail("search_path", -EINVAL);
    for (size_t i = 0; i < size; i++) /* no detour by which it could lie in the workspace */
        if (entry[i] == '/' && (entry[i + 1] == '/' || entry[i + 1] == '.'))
            fail("search_path", -EINVAL);
    *place = *c ? c + 1 : NULL;
    return size;
}

static void execute(void)
{
    static char candidate[8192];
    const char *name = command.argv[0];
    long refused = 0;
    if (name[0] == '/') {
        refused = try_program(name);
        fail("execute", refused ? refused : -ENOENT);
    }
    if (!name[0] || (name[0] == '.' && (!name[1] || (name[1] == '.' && !name[2]))))
        fail("program_name", -EINVAL);
    for (const char *c = name; *c; c++)
        if (*c == '/')
            fail("program_name", -EINVAL);
    for (const char *place = command.path; place;) /* all of them, before one is tried */
        take_an_entry(&place, candidate);
    for (const char *place = command.path; place;) {
        size_t size = take_an_entry(&place, candidate);
        candidate[size++] = '/';
        for (const char *c = name; *c && size < sizeof candidate - 1; c++)
            candidate[size++] = *c;
        candidate[size] = 0;
        long result = try_program(candidate);
        if (result && !refused)
            refused = result;
    }
    fail("execute", refused ? refused : -ENOENT);
}

static void take_the_streams(int socket)
{
    union {
        struct cmsghdr head;
        unsigned char room[CMSG_SPACE(3 * sizeof(int))];
    } control;
    static int streams[3];
    char byte;
    struct iovec vector = {&byte, 1};
    struct msghdr message = {0};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    if (call(SYS_recvmsg, socket, (long)&message, MSG_CMSG_CLOEXEC, 0, 0) != 1 ||
        message.msg_controllen < CMSG_LEN(sizeof streams))
        fail("take_the_streams", -EPROTO);
    memcpy(streams, CMSG_DATA(&control.head), sizeof streams);
    for (int i = 0; i < 3; i++)
        must("take_the_streams", call(SYS_dup3, streams[i], i, 0, 0, 0));
}

/* The order is that of sbxd/jail/workload.py, as far as this kernel has the same things. */
static void become_the_command(void)
{
    uint64_t none = 0;
    int socket = 3;
    must("keep_its_descriptors", call(SYS_dup3, pair[1], socket, O_CLOEXEC, 0, 0));
    must("keep_its_descriptors", call(SYS_close_range, socket + 1, 0x7fffffff, 0, 0, 0));
    must("leave_the_session", call(SYS_setsid, 0, 0, 0, 0, 0));
    call(SYS_umask, 022, 0, 0, 0, 0);
    limit(RLIMIT_CORE, 0, 0);
    limit(RLIMIT_NOFILE, 1024, 4096);
    must("become_the_workload", call(SYS_setgroups, 0, 0, 0, 0, 0));
    must("become_the_workload", call(SYS_setresgid, WORKLOAD_ID, WORKLOAD_ID, WORKLOAD_ID, 0, 0));
    must("become_the_workload", call(SYS_setresuid, WORKLOAD_ID, WORKLOAD_ID, WORKLOAD_ID, 0, 0));
    if (call(SYS_setresuid, 0, 0, 0, 0, 0) != -EPERM)
        fail("drop_capabilities", -EPERM);
    must("forbid_new_privileges", call(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    struct sock_fprog program = {(unsigned short)filter_length, filter};
    must("reset_signals", call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&none, 0, sizeof none, 0));
    must("confine_system_calls",
         call(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, (long)&program, 0, 0));
    take_the_streams(socket);
    /* The Sentry counts a process for the uid that it was made by: this one for no workload. */
    limit(RLIMIT_NPROC, processes_max - 1, processes_max - 1);
    enter_by_name();
    must("close_descriptors", call(SYS_close_range, socket + 1, 0x7fffffff, 0, 0, 0));
    execute();
}

static long make_ahead(void);

/* --- commands -------------------------------------------------------------------------------- */

static void close_streams(void)
{
    for (int i = 0; i < 3; i++)
        call(SYS_close, command.streams[i], 0, 0, 0, 0);
}

/* Kill everything but this process, and reap it, until the kernel says that there is nothing. */
static void drain(void)
{
    for (;;) {
        int status;
        call(SYS_kill, -1, SIGKILL, 0, 0, 0);
        long pid = call(SYS_wait4, -1, (long)&status, 1 /* WNOHANG */, 0, 0);
        if (pid == -ECHILD)
            break;
        if (pid > 0 && pid == main_process && state == RUNNING) {
            say(EXITED, command.number, &status, NULL);
            state = DRAINING;
        }
        if (pid == 0) { /* SIGCHLD is blocked; one that came meanwhile ends the wait at once */
            uint64_t set = 1ULL << (SIGCHLD - 1);
            int64_t pause[2] = {0, 2000000};
            call(SYS_rt_sigtimedwait, (long)&set, 0, (long)pause, sizeof set, 0);
        }
    }
    require(state == DRAINING, 11);
    state = IDLE;
    close_the_doors();
    say(QUIET, command.number, NULL, NULL);
    make_ahead();
}

/* Make the process of the next command; where that fails, RUN tries again and tells. */
static long make_ahead(void)
{
    long error = call(SYS_socketpair, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, (long)pair, 0);
    if (error < 0)
        return error;
    command.failed_step = NULL;
    long pid = clone_with_stack(CLONE_VM | SIGCHLD, stack + sizeof stack, become_the_command);
    call(SYS_close, pair[1], 0, 0, 0, 0);
    if (pid < 0) {
        call(SYS_close, pair[0], 0, 0, 0, 0);
        return pid;
    }
    waiting = pid;
    waiting_fd = pair[0];
    return 0;
}

static void hand_over_the_streams(void)
{
    union {
        struct cmsghdr head;
        unsigned char room[CMSG_SPACE(sizeof command.streams)];
    } control = {0};
    char byte = 0;
    struct iovec vector = {&byte, 1};
    struct msghdr message = {0};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    control.head.cmsg_len = CMSG_LEN(sizeof command.streams);
    control.head.cmsg_level = SOL_SOCKET;
    control.head.cmsg_type = SCM_RIGHTS;
    memcpy(CMSG_DATA(&control.head), command.streams, sizeof command.streams);
    /* A process that is gone has left its reason, and the end of file comes at once. */
    call(SYS_sendmsg, waiting_fd, (long)&message, MSG_NOSIGNAL, 0, 0);
    while (call(SYS_read, waiting_fd, (long)&byte, 1, 0, 0) == -EINTR)
        ;
}

static void run(void)
{
    long error = waiting ? 0 : make_ahead();
    const char *step = error < 0 ? "clone" : NULL;
    if (!step) {
        hand_over_the_streams();
        call(SYS_close, waiting_fd, 0, 0, 0, 0);
        step = command.failed_step;
        error = -command.failed_errno;
    }
    close_streams();
    long pid = waiting;
    waiting = 0;
    if (step) {
        int32_t number = (int32_t)-error;
        while (pid && call(SYS_wait4, pid, 0, 0, 0, 0) == -EINTR)
            ;
        close_the_doors();
        say(FAILED, command.number, &number, step);
        make_ahead();
        return;
    }
    main_process = pid;
    state = RUNNING;
    say(STARTED, command.number, NULL, NULL);
}

/* An orphan, or the main process: then the rest of its tree follows it. */
static void reap(void)
{
    for (;;) {
        int status;
        long pid = call(SYS_wait4, -1, (long)&status, 1 /* WNOHANG */, 0, 0);
        if (pid <= 0)
            return;
        if (pid == waiting) {
            call(SYS_close, waiting_fd, 0, 0, 0, 0);
            waiting = 0;
        }
        if (relay_ended(pid, status))
            continue;
        if (state == RUNNING && pid == main_process) {
            say(EXITED, command.number, &status, NULL);
            state = DRAINING;
            drain();
            return;
        }
    }
}

/* --- frames from the daemon ------------------------------------------------------------------ */

static uint32_t get_number(const unsigned char *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* Splits the rest of a RUN: argc, envc, directory, path, argc and envc strings. */
static void parse_run(size_t size)
{
    require(size >= HEAD + 4 && frame[size - 1] == 0, 12);
    size_t argc = (size_t)frame[HEAD] << 8 | frame[HEAD + 1];
    size_t envc = (size_t)frame[HEAD + 2] << 8 | frame[HEAD + 3];
    size_t wanted = argc + envc + 2, found = 0;
    char *at = (char *)frame + HEAD + 4, *end = (char *)frame + size;
    require(argc >= 1, 13);
    /* Each list ends with NULL: directory, path, argv..., NULL, environment..., NULL. */
    size_t slot = 0;
    while (at < end) {
        require(found < wanted && slot < FRAME_MAX - 2, 14);
        strings[slot++] = at;
        if (++found == argc + 2)
            strings[slot++] = NULL;
        while (*at)
            at++;
        at++;
    }
    require(found == wanted, 15);
    strings[slot] = NULL;
    command.directory = strings[0];
    command.path = strings[1];
    command.argv = strings + 2;
    command.environment = strings + 3 + argc;
}

static void receive(void)
{
    union {
        struct cmsghdr head;
        unsigned char room[CMSG_SPACE(8 * sizeof(int))];
    } control;
    struct iovec vector = {frame, FRAME_MAX};
    struct msghdr message = {0};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    long size = call(SYS_recvmsg, CHANNEL, (long)&message, MSG_CMSG_CLOEXEC, 0, 0);
    if (size == -EINTR)
        return;
    require(size >= HEAD && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)), 0);
    size_t descriptors = 0;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS)
        descriptors = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    uint32_t number = get_number(frame + 1);
    frame[size] = 0;
    switch (frame[0]) {
    case RUN:
        require(state == IDLE && descriptors == 3, 16);
        memcpy(command.streams, CMSG_DATA(head), sizeof command.streams);
        command.number = number;
        parse_run((size_t)size);
        run();
        return;
    case KILL: /* one for a command that has ended meanwhile has nothing to do */
        require(size == HEAD && descriptors == 0, 17);
        if (state == RUNNING && number == command.number)
            drain();
        return;
    case LIMIT:
        require(size == HEAD && descriptors == 0 && number > 0, 18);
        processes_max = number;
        return;
    case FILTER: {
        size_t room = (size_t)size - HEAD;
        require(number == 0 && descriptors == 0 && filter_length == 0, 24);
        require(room > 0 && room <= sizeof filter && room % sizeof filter[0] == 0, 25);
        memcpy(filter, frame + HEAD, room);
        filter_length = room / sizeof filter[0];
        make_ahead();
        return;
    }
    case PORT: /* 1: bind it; 0: give it up */
        require(state == IDLE && descriptors == 0 && size == HEAD && number <= 1, 26);
        require(number != !!doors[PROXY_DOOR].listener, 27);
        if (number) {
            bind_the_port();
        } else {
            call(SYS_close, doors[PROXY_DOOR].listener, 0, 0, 0, 0);
            doors[PROXY_DOOR].listener = 0;
        }
        return;
    case DOOR:
        require(state == IDLE && descriptors == 2 && size == HEAD, 28);
        int channels[2];
        memcpy(channels, CMSG_DATA(head), sizeof channels);
        open_the_door(number, channels);
        return;
    default:
        leave(19);
    }
}

#include "command.h"

/* `start`: where the kernel has put the number of arguments, and the arguments. */
__attribute__((noreturn, noinline)) static void work(long *start)
{
    if (start[0] > 0 && is_same((char *)start[1], "sbx-command"))
        be_a_command(start[0], (char **)(start + 1));
    uint64_t set = 1ULL << (SIGCHLD - 1);
    require(call(SYS_rt_sigprocmask, SIG_BLOCK, (long)&set, 0, sizeof set, 0) == 0, 20);
    require(call(SYS_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0) == 0, 21);
    call(SYS_prctl, PR_SET_NAME, (long)"sbx-init", 0, 0, 0);
    long signals = call(SYS_signalfd4, -1, (long)&set, sizeof set, O_CLOEXEC | O_NONBLOCK, 0);
    require(signals >= 0, 22);
    bind_the_bridge();
    say(READY, 0, NULL, NULL);
    struct pollfd wait[2] = {{CHANNEL, POLLIN, 0}, {(int)signals, POLLIN, 0}};
    for (;;) {
        long ready = call(SYS_ppoll, (long)wait, 2, 0, 0, 0);
        require(ready > 0 || ready == -EINTR, 23);
        if (wait[1].revents) {
            unsigned char told[128 * 4];
            call(SYS_read, signals, (long)told, sizeof told, 0, 0);
            reap();
        }
        if (wait[0].revents)
            receive();
    }
}

__attribute__((noreturn, used, no_stack_protector)) void begin(long *start)
{
    harden(start);
    work(start);
}
