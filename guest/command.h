/*
 * The process of one command on the host's kernel, from where the interpreter has left it to its
 * program. `sbxd/jail/workload.py` makes it in the command's leaf and becomes this program before
 * any command is known; so what a command waits for is a few system calls, and the kernel has no
 * interpreter's memory to take back when the program begins.
 *
 * It is started as `sbx-command LABEL RULESET`: the AppArmor profile of commands, or nothing where
 * the kernel has none; "ruleset" where descriptor 5 is Landlock's, or nothing. On descriptor 3 it
 * tells of a failure, which ends it; on descriptor 4 it gets the filter of system calls, says that
 * it waits, and gets the command: a RUN and its streams.
 *
 * Invariants: while it waits it is uid 0 of the user namespace with SETUID and SETGID alone, and
 * not dumpable. The steps are those of sbxd/jail/workload.py, which says why; a step that fails ends
 * the process, and the program is never entered half-confined.
 */

#include <linux/capability.h>
#include <linux/openat2.h>

enum { REPORT_FD = 3, COMMAND_FD = 4, RULESET_FD = 5, CANARY_NUMBER = 0, PROC_MAGIC = 0x9fa0 };

static const char *label;      /* empty where the kernel has no AppArmor */
static int has_ruleset;
static int program_fd = -1;    /* of the launcher's own command */
static const char *now;        /* the step that is being taken */

struct step {
    const char *name;
    void (*take)(void);
};
#define STEP(name) {#name, name}

static long demand(long result)
{
    if (result < 0)
        fail(now, result);
    return result;
}

static size_t length_of(const char *text)
{
    size_t size = 0;
    while (text[size])
        size++;
    return size;
}

static int is_same(const char *one, const char *other)
{
    while (*one && *one == *other)
        one++, other++;
    return *one == *other;
}

/* One message from init, whole; the descriptors that come along are close-on-exec. */
static size_t take_message(void *room, size_t size, int *descriptors, size_t *count)
{
    union {
        struct cmsghdr head;
        unsigned char room[CMSG_SPACE(8 * sizeof(int))];
    } control;
    struct iovec vector = {room, size};
    struct msghdr message = {0};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    long received = demand(call(SYS_recvmsg, COMMAND_FD, (long)&message, MSG_CMSG_CLOEXEC, 0, 0));
    if (received == 0)
        fail(now, -EPIPE); /* init is gone */
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        fail(now, -EPROTO);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    *count = 0;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
        *count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        if (*count > 4)
            fail(now, -EPROTO);
        memcpy(descriptors, CMSG_DATA(head), *count * sizeof(int));
    }
    return (size_t)received;
}

/* Effective and permitted become `held`, inheritable and ambient empty; all is read back. */
static void keep_capabilities(uint32_t held)
{
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct wanted[2] = {{held, held, 0}, {0, 0, 0}}, found[2];
    demand(call(SYS_prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0));
    demand(call(SYS_capset, (long)&head, (long)wanted, 0, 0, 0));
    demand(call(SYS_capget, (long)&head, (long)found, 0, 0, 0));
    for (int i = 0; i < 2; i++)
        if (found[i].effective != wanted[i].effective ||
            found[i].permitted != wanted[i].permitted || found[i].inheritable != 0)
            fail(now, -EPERM);
}

/* --- before the command is known -------------------------------------------------------------- */

static void hide(void)
{
    demand(call(SYS_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0));
    demand(call(SYS_prctl, PR_SET_NAME, (long)"sbx-command", 0, 0, 0));
}

static void die_with_init(void)
{
    demand(call(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0));
    if (call(SYS_getppid, 0, 0, 0, 0, 0) != 1)
        fail(now, -ESRCH);
}

static void end_the_ambient_set(void)
{
    keep_capabilities(1U << CAP_SETUID | 1U << CAP_SETGID);
}

/* Written to the kernel and to nothing else: no link is followed on the way and no mount crossed. */
static void take_a_label_on_exec(void)
{
    static const char attribute[] = "/attr/apparmor/exec", verb[] = "exec ", mode[] = " (enforce)";
    static char path[64], word[256], found[256];
    static long file_system[64];
    struct open_how how = {O_RDWR | O_CLOEXEC, 0,
                           RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS |
                               RESOLVE_NO_XDEV};
    if (!label[0])
        return;
    size_t size = length_of(label), digits = 0, used = 0;
    if (size + sizeof verb + sizeof mode > sizeof word)
        fail(now, -EINVAL);
    long proc = demand(call(SYS_openat, AT_FDCWD, (long)"/proc",
                            O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0, 0));
    demand(call(SYS_fstatfs, proc, (long)file_system, 0, 0, 0));
    if (file_system[0] != PROC_MAGIC)
        fail(now, -EXDEV);
    char reversed[24];
    for (long pid = call(SYS_getpid, 0, 0, 0, 0, 0); pid > 0; pid /= 10)
        reversed[digits++] = (char)('0' + pid % 10);
    while (digits)
        path[used++] = reversed[--digits];
    memcpy(path + used, attribute, sizeof attribute);
    long file = demand(call(SYS_openat2, proc, (long)path, (long)&how, sizeof how, 0));
    memcpy(word, verb, sizeof verb - 1);
    memcpy(word + sizeof verb - 1, label, size);
    demand(call(SYS_write, file, (long)word, (long)(size + sizeof verb - 1), 0, 0));
    long read = demand(call(SYS_pread64, file, (long)found, sizeof found - 1, 0, 0));
    while (read > 0 && (found[read - 1] == 0 || found[read - 1] == '\n'))
        read--;
    found[read] = 0;
    memcpy(word, label, size);
    memcpy(word + size, mode, sizeof mode);
    if (!is_same(found, word))
        fail(now, -EPERM);
    call(SYS_close, file, 0, 0, 0, 0);
    call(SYS_close, proc, 0, 0, 0, 0);
}

static void take_the_filter(void)
{
    int descriptors[4];
    size_t count, size = take_message(filter, sizeof filter, descriptors, &count);
    if (count || size % sizeof filter[0])
        fail(now, -EPROTO);
    filter_length = size / sizeof filter[0];
}

static void wait_for_the_command(void)
{
    static const char parked[] = "parked";
    int descriptors[4] = {-1, -1, -1, -1};
    size_t count;
    demand(call(SYS_write, COMMAND_FD, (long)parked, sizeof parked - 1, 0, 0));
    size_t size = take_message(frame, FRAME_MAX, descriptors, &count);
    frame[size] = 0;
    if (size < HEAD || frame[0] != RUN)
        fail(now, -EPROTO);
    command.number = get_number(frame + 1);
    if (count != (command.number == CANARY_NUMBER ? 4 : 3))
        fail(now, -EPROTO);
    memcpy(command.streams, descriptors, sizeof command.streams);
    program_fd = descriptors[3];
    parse_run(size);
}

/* --- once it is known ------------------------------------------------------------------------- */

static void take_the_pipes(void)
{
    static struct stat found;
    for (int i = 0; i < 3; i++) {
        demand(call(SYS_fstat, command.streams[i], (long)&found, 0, 0, 0));
        int is_null = S_ISCHR(found.st_mode) && found.st_rdev == (1 << 8 | 3);
        if (!S_ISFIFO(found.st_mode) && !is_null)
            fail(now, -EINVAL);
        demand(call(SYS_dup3, command.streams[i], i, 0, 0, 0));
    }
}

static void become_the_workload(void)
{
    uint32_t id[3];
    demand(call(SYS_setgroups, 0, 0, 0, 0, 0));
    demand(call(SYS_setresgid, WORKLOAD_ID, WORKLOAD_ID, WORKLOAD_ID, 0, 0));
    demand(call(SYS_setresuid, WORKLOAD_ID, WORKLOAD_ID, WORKLOAD_ID, 0, 0));
    static const long questions[] = {SYS_getresuid, SYS_getresgid};
    for (int i = 0; i < 2; i++) {
        demand(call(questions[i], (long)&id[0], (long)&id[1], (long)&id[2], 0, 0));
        if (id[0] != WORKLOAD_ID || id[1] != WORKLOAD_ID || id[2] != WORKLOAD_ID)
            fail(now, -EPERM);
    }
    if (call(SYS_getgroups, 0, 0, 0, 0, 0) != 0)
        fail(now, -EPERM);
}

static void drop_capabilities(void)
{
    keep_capabilities(0);
    long result = call(SYS_setuid, 0, 0, 0, 0, 0);
    if (result != -EPERM)
        fail(now, result < 0 ? result : -EPERM);
}

static long enter_beneath(const char *wanted)
{
    struct open_how how = {O_PATH | O_DIRECTORY | O_CLOEXEC, 0,
                           RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV};
    long root = call(SYS_openat, AT_FDCWD, (long)WORKSPACE,
                     O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0, 0);
    if (root < 0)
        return root;
    long place = call(SYS_openat2, root, (long)wanted, (long)&how, sizeof how, 0);
    return place < 0 ? place : call(SYS_fchdir, place, 0, 0, 0, 0);
}

static void enter_the_working_directory(void)
{
    static char here[4096];
    const char *wanted = command.directory[0] ? command.directory : ".";
    if (wanted[0] == '/')
        fail(now, -EINVAL);
    long result = enter_beneath(wanted);
    if ((result == -EACCES || result == -EPERM) && open_the_workspace_again())
        result = enter_beneath(wanted);
    demand(result);
    demand(call(SYS_getcwd, (long)here, sizeof here, 0, 0, 0));
    if (!starts_with_workspace(here))
        fail(now, -EXDEV);
}

static void close_descriptors(void)
{
    const int kept[] = {has_ruleset ? RULESET_FD : -1, program_fd};
    long first = REPORT_FD + 1;
    for (int i = 0; i < 2; i++)
        if (kept[i] >= first) {
            if (kept[i] > first)
                demand(call(SYS_close_range, first, kept[i] - 1, 0, 0, 0));
            first = kept[i] + 1;
        }
    demand(call(SYS_close_range, first, 0xffffffff, 0, 0, 0));
    demand(call(SYS_close_range, REPORT_FD, 0xffffffff, CLOSE_RANGE_CLOEXEC, 0, 0));
}

static void forbid_new_privileges(void)
{
    demand(call(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
}

static void confine_files(void)
{
    if (has_ruleset)
        demand(call(SYS_landlock_restrict_self, RULESET_FD, 0, 0, 0, 0));
}

static void confine_system_calls(void)
{
    struct sock_fprog program = {(unsigned short)filter_length, filter};
    demand(call(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, (long)&program, 0, 0));
}

static void become_the_program(void)
{
    if (program_fd >= 0)
        fail("execute", call(SYS_execveat, program_fd, (long)"", (long)command.argv,
                             (long)command.environment, AT_EMPTY_PATH));
    execute();
}

static const struct step STEPS[] = {
    STEP(hide),
    STEP(die_with_init),
    STEP(end_the_ambient_set),
    STEP(take_a_label_on_exec),
    STEP(take_the_filter),
    STEP(wait_for_the_command),
    STEP(take_the_pipes),
    STEP(become_the_workload),
    STEP(drop_capabilities),
    STEP(die_with_init),
    STEP(enter_the_working_directory),
    STEP(close_descriptors),
    STEP(forbid_new_privileges),
    STEP(confine_files),
    STEP(confine_system_calls),
    STEP(become_the_program),
};

__attribute__((noreturn)) static void be_a_command(long argc, char **argv)
{
    report_fd = REPORT_FD;
    now = "command";
    require(argc == 3, 30);
    label = argv[1];
    has_ruleset = is_same(argv[2], "ruleset");
    require(has_ruleset || !argv[2][0], 31);
    for (size_t i = 0; i < sizeof STEPS / sizeof STEPS[0]; i++) {
        now = STEPS[i].name;
        STEPS[i].take();
    }
    leave(127);
}
