/* Prints the number of each system call that a relay's filter lets pass: each is tried, with
 * arguments that mean nothing, by a child that has the filter. The first line is a control: what a
 * child without it makes of a call that is not among them. */

#include "relay_filter.h"

#include <errno.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NUMBERS = 512, X32 = 0x40000000 };
enum { MADE = 100, BROKEN, UNKNOWN };

/* Linux has two calls of its own trampolines on x86-64, uretprobe and uprobe, that no filter sees
 * and that do nothing for whoever makes them from elsewhere. */
static int is_of_a_trampoline(long number)
{
#if defined(__x86_64__)
    return number == 335 || number == 336;
#else
    return (void)number, 0;
#endif
}

/* Whether the call is made. A kernel without such a call may say so, or end the process in a way of
 * its own, before it asks the filter. */
static int is_made(long number, int is_filtered)
{
    pid_t pid = fork();
    if (pid == 0) {
        if (is_filtered && (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
                            syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &relay_program)))
            _exit(BROKEN);
        _exit(syscall(number, -1, 0, 0, 0, 0, 0) == -1 && errno == ENOSYS ? UNKNOWN : MADE);
    }
    int status;
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return -1;
    if (!WIFEXITED(status))
        return 0;
    if (WEXITSTATUS(status) == BROKEN)
        return -1;
    return WEXITSTATUS(status) == (number == SYS_exit_group ? 255 : MADE);
}

int main(void)
{
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    printf("%d\n", is_made(SYS_getpid, 0));
    fflush(stdout);
    for (long base = 0; base <= X32; base += X32)
        for (long number = base; number < base + NUMBERS; number++) {
            int found = is_of_a_trampoline(number) ? 0 : is_made(number, 1);
            if (found)
                printf("%ld\n", found < 0 ? -1 : number);
            fflush(stdout);
        }
    return 0;
}
