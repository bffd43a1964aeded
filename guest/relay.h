/*
 * The doors of a sandbox that has a kernel of its own, and the process that serves one: it accepts
 * what commands connect to, and copies each connection to and from a socket of the daemon's.
 * Included once, by init.c, whose system calls it uses.
 *
 * A door is a socket that process 1 has bound before any command, so that no command can take its
 * place: the proxy's port on the guest's loopback, and the bridge in /dev. It listens from a DOOR
 * frame to the end of the command that follows, or of its failed start. With the frame come two
 * sockets. On the first the daemon offers one end of a socket pair at a time, and gets one byte
 * back when a connection has taken it: a relay without an offer accepts nothing, so the daemon's
 * bounds hold. On the second either side says the number of a connection (they count from 0)
 * before it ends its direction properly, since the end of file of a Unix socket may as well be the
 * death of whoever held it. The daemon says it once more when it is gone altogether, which this
 * kernel's sockets do not tell.
 *
 * Invariants: a relay has no capability, no file of the guest, an id that no command has, no other
 * descriptor than these, and no system call but those of relay_filter.h; nothing is accepted for a command but while it runs, since the
 * relay dies with it; an end of one direction is passed on; through the proxy's port, what broke
 * on one side is broken on the other (reset), never ended as if it were whole.
 *
 * Deliberately absent: looking at the bytes; receiving descriptors from a command (read(2) drops
 * them, within the guest).
 */

#include "relay_filter.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/un.h>

enum { PROXY_DOOR, BRIDGE_DOOR, DOORS };
/* A full queue drops what asks to connect, and this kernel asks again less often than Linux. */
enum { PROXY_PORT = 3128, WAITING_MAX = 1024, RELAY_ID = 10002 };
enum { RELAYED_MAX = 256, TURN_BYTES = 128 * 1024, TURNS = 8, EVENTS_MAX = 64 };
enum { GUEST, HOST };
enum { OFFERS = RELAYED_MAX * 2, KNOCKS, ENDS };

static const struct sockaddr_un BRIDGE = {AF_UNIX, "/dev/sbx-bridge"};

static struct {
    int listener; /* 0 when there is no such door */
    long relay;   /* the process that serves it, 0 for none */
} doors[DOORS];

static struct relayed {
    int fd[2];
    uint32_t number;
    unsigned char used, busy, is_told, is_gone, readable[2], ended[2];
    uint32_t held[2], passed[2]; /* what the other side did not take yet, by where it came from */
} relayed[RELAYED_MAX];
static unsigned char held_bytes[RELAYED_MAX][2][TURN_BYTES];
static unsigned char turn[TURN_BYTES];

static struct {
    int channel, ends, listener, events;
    int offer;                  /* the daemon's socket for the next connection, or -1 */
    uint32_t accepted;
    unsigned char is_strict;    /* TCP: a broken connection can be told from one that ended */
    unsigned char open, knocks; /* the channel is; somebody may wait to be accepted */
} own;

/* By words: the plain one goes by bytes. */
static void copy(unsigned char *to, const unsigned char *from, size_t size)
{
    struct __attribute__((packed, may_alias)) word {
        uint64_t value;
    };
    for (; size >= sizeof(struct word); size -= sizeof(struct word)) {
        *(struct word *)to = *(const struct word *)from;
        to += sizeof(struct word);
        from += sizeof(struct word);
    }
    while (size--)
        *to++ = *from++;
}

/* --- a relay: one connection ------------------------------------------------------------------ */

static void release(struct relayed *one)
{
    call(SYS_close, one->fd[GUEST], 0, 0, 0, 0);
    call(SYS_close, one->fd[HOST], 0, 0, 0, 0);
    memset(one, 0, sizeof *one);
}

static void break_off(struct relayed *one)
{
    int linger[2] = {1, 0};
    call(SYS_setsockopt, one->fd[GUEST], SOL_SOCKET, SO_LINGER, (long)linger, sizeof linger);
    release(one);
}

/* What the daemon has said was said before the end of file that it is about. */
static void listen_to_the_ends(void)
{
    uint32_t number;
    while (call(SYS_read, own.ends, (long)&number, sizeof number, 0, 0) == sizeof number)
        for (int i = 0; i < RELAYED_MAX; i++)
            if (relayed[i].used && relayed[i].number == number) {
                relayed[i].busy = 1;
                relayed[i].is_gone = relayed[i].is_told;
                relayed[i].is_told = 1;
            }
}

static int is_proper(struct relayed *one, int from)
{
    if (!own.is_strict)
        return 1;
    if (from == GUEST)
        return call(SYS_write, own.ends, (long)&one->number, sizeof one->number, 0, 0) > 0;
    listen_to_the_ends();
    return one->is_told;
}

static void pass_end(struct relayed *one, int from)
{
    one->ended[from] = 1;
    if (!is_proper(one, from))
        break_off(one);
    else if (one->ended[!from])
        release(one);
    else
        call(SYS_shutdown, one->fd[!from], SHUT_WR, 0, 0, 0);
}

/* One turn of one direction; whether another may follow at once. */
static int pass(struct relayed *one, int from)
{
    unsigned char *held = held_bytes[one - relayed][from];
    uint32_t left = one->held[from] - one->passed[from];
    if (left) {
        long sent = call(SYS_write, one->fd[!from], (long)(held + one->passed[from]), left, 0, 0);
        if (sent > 0)
            one->passed[from] += (uint32_t)sent;
        else if (sent != -EAGAIN && sent != -EINTR)
            break_off(one);
        return sent > 0 || sent == -EINTR;
    }
    if (one->ended[from] || !one->readable[from])
        return 0;
    long size = call(SYS_read, one->fd[from], (long)turn, TURN_BYTES, 0, 0);
    if (size == -EAGAIN) {
        one->readable[from] = 0;
        return 0;
    }
    if (size == 0)
        pass_end(one, from);
    else if (size < 0 && size != -EINTR)
        break_off(one);
    if (size <= 0)
        return size == -EINTR;
    long sent = call(SYS_write, one->fd[!from], (long)turn, size, 0, 0);
    if (sent == -EAGAIN || sent == -EINTR)
        sent = 0;
    if (sent < 0) {
        break_off(one);
        return 0;
    }
    one->held[from] = (uint32_t)(size - sent);
    one->passed[from] = 0;
    copy(held, turn + sent, (size_t)(size - sent));
    return 1;
}

static void serve(struct relayed *one)
{
    one->busy = 0;
    for (int from = GUEST; from <= HOST; from++)
        for (int i = 0; one->used && pass(one, from); i++)
            if (i == TURNS) {
                one->busy = 1;
                break;
            }
    /* The daemon has said all and is gone: nobody would read what the program may say still. */
    if (one->used && one->is_gone && one->ended[HOST] && one->held[HOST] == one->passed[HOST])
        release(one);
}

/* --- a relay: all connections ----------------------------------------------------------------- */

static void watch(int fd, uint32_t what, uint64_t name)
{
    struct epoll_event event = {what, {.u64 = name}};
    require(call(SYS_epoll_ctl, own.events, EPOLL_CTL_ADD, fd, (long)&event, 0) == 0, 31);
}

/* Neither waits: what does not come at once comes with an event. */
static void make_non_blocking(int fd)
{
    long flags = call(SYS_fcntl, fd, F_GETFL, 0, 0, 0);
    require(flags >= 0 && call(SYS_fcntl, fd, F_SETFL, flags | O_NONBLOCK, 0, 0) == 0, 32);
}

static void take_the_offer(void)
{
    union {
        struct cmsghdr head;
        unsigned char room[CMSG_SPACE(sizeof(int))];
    } control;
    char byte;
    struct iovec vector = {&byte, 1};
    struct msghdr message = {0};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    long size = call(SYS_recvmsg, own.channel, (long)&message, MSG_CMSG_CLOEXEC, 0, 0);
    if (size == -EINTR)
        return;
    if (size <= 0) { /* the door is closed; who is through it already stays */
        call(SYS_shutdown, own.listener, SHUT_RDWR, 0, 0, 0);
        call(SYS_close, own.listener, 0, 0, 0, 0);
        call(SYS_close, own.channel, 0, 0, 0, 0);
        own.open = 0;
        return;
    }
    require(own.offer < 0 && message.msg_controllen >= CMSG_LEN(sizeof(int)), 33);
    memcpy(&own.offer, CMSG_DATA(&control.head), sizeof own.offer);
}

static void let_in(void)
{
    struct relayed *one = NULL;
    for (int i = 0; i < RELAYED_MAX && !one; i++)
        if (!relayed[i].used)
            one = relayed + i;
    if (!one || !own.open || own.offer < 0 || !own.knocks)
        return;
    long guest = call(SYS_accept4, own.listener, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (guest == -EAGAIN || guest == -EINVAL) /* the second: it listens no more */
        own.knocks = 0;
    if (guest < 0)
        return;
    int yes = 1;
    char byte = 0;
    call(SYS_setsockopt, guest, IPPROTO_TCP, TCP_NODELAY, (long)&yes, sizeof yes);
    make_non_blocking(own.offer);
    one->fd[GUEST] = (int)guest;
    one->fd[HOST] = own.offer;
    one->number = own.accepted++;
    one->used = 1;
    own.offer = -1;
    uint64_t name = (uint64_t)(one - relayed) * 2;
    for (int side = GUEST; side <= HOST; side++)
        watch(one->fd[side], EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, name + (uint64_t)side);
    call(SYS_write, own.channel, (long)&byte, 1, 0, 0);
}

static void heed(const struct epoll_event *event)
{
    uint64_t name = event->data.u64;
    if (name == OFFERS) {
        take_the_offer();
    } else if (name == KNOCKS) {
        own.knocks = 1;
    } else if (name == ENDS) {
        listen_to_the_ends();
    } else if (relayed[name / 2].used) {
        struct relayed *one = relayed + name / 2;
        one->busy = 1;
        if (event->events & ~(uint32_t)EPOLLOUT)
            one->readable[name % 2] = 1;
    }
}

__attribute__((noreturn)) static void relay(uint32_t which, const int channels[2], int listener)
{
    uint64_t all = ~0ULL;
    require(call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, 0, sizeof all, 0) == 0, 34);
    int wanted[3] = {channels[0], channels[1], listener};
    for (int i = 0; i < 3; i++)
        wanted[i] = (int)call(SYS_fcntl, wanted[i], F_DUPFD, 10, 0, 0);
    for (int i = 0; i < 3; i++)
        require(call(SYS_dup3, wanted[i], 3 + i, O_CLOEXEC, 0, 0) == 3 + i, 35);
    require(call(SYS_close_range, 6, 0x7fffffff, 0, 0, 0) == 0, 37);
    uint64_t files[2] = {RELAYED_MAX * 2 + 64, RELAYED_MAX * 2 + 64};
    require(call(SYS_prlimit64, 0, RLIMIT_NOFILE, (long)files, 0, 0) == 0, 37);
    require(call(SYS_setgroups, 0, 0, 0, 0, 0) == 0, 38);
    require(call(SYS_setresgid, RELAY_ID, RELAY_ID, RELAY_ID, 0, 0) == 0, 38);
    require(call(SYS_setresuid, RELAY_ID, RELAY_ID, RELAY_ID, 0, 0) == 0, 38);
    require(call(SYS_setresuid, 0, 0, 0, 0, 0) == -EPERM, 38);
    require(call(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, 39);
    require(call(SYS_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0) == 0, 39);
    call(SYS_prctl, PR_SET_NAME, (long)"sbx-relay", 0, 0, 0);
    own.channel = 3;
    own.ends = 4;
    own.listener = 5;
    own.is_strict = which == PROXY_DOOR;
    own.offer = -1;
    own.open = 1;
    own.events = (int)call(SYS_epoll_create1, EPOLL_CLOEXEC, 0, 0, 0, 0);
    make_non_blocking(own.ends);
    make_non_blocking(own.listener);
    watch(own.channel, EPOLLIN, OFFERS);
    watch(own.ends, EPOLLIN | EPOLLET, ENDS);
    watch(own.listener, EPOLLIN | EPOLLET, KNOCKS);
    require(call(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, (long)&relay_program, 0, 0) == 0, 48);
    for (;;) {
        struct epoll_event events[EVENTS_MAX];
        int is_busy = 0, is_used = 0;
        let_in();
        for (struct relayed *one = relayed; one < relayed + RELAYED_MAX; one++) {
            if (one->used && one->busy)
                serve(one);
            is_used |= one->used;
            is_busy |= one->busy;
        }
        if (!own.open && !is_used)
            leave(0);
        long wait = is_busy || (own.open && own.offer >= 0 && own.knocks) ? 0 : -1;
        long count = call(SYS_epoll_pwait, own.events, (long)events, EVENTS_MAX, wait, 0);
        require(count >= 0 || count == -EINTR, 40);
        for (long i = 0; i < count; i++)
            heed(events + i);
    }
}

/* --- process 1: the doors --------------------------------------------------------------------- */

static void bind_the_bridge(void)
{
    long fd = call(SYS_socket, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, 0, 0);
    long mask = call(SYS_umask, 0555, 0, 0, 0, 0); /* it can be written to: connected to */
    require(fd > 0 && call(SYS_bind, fd, (long)&BRIDGE, sizeof BRIDGE, 0, 0) == 0, 41);
    call(SYS_umask, mask, 0, 0, 0, 0);
    doors[BRIDGE_DOOR].listener = (int)fd;
}

static void bind_the_port(void)
{
    struct sockaddr_in address = {AF_INET, __builtin_bswap16(PROXY_PORT), {0}, {0}};
    address.sin_addr.s_addr = __builtin_bswap32(INADDR_LOOPBACK);
    long fd = call(SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0, 0, 0);
    require(fd > 0 && call(SYS_bind, fd, (long)&address, sizeof address, 0, 0) == 0, 42);
    doors[PROXY_DOOR].listener = (int)fd;
}

static void open_the_door(uint32_t which, const int channels[2])
{
    require(which < DOORS && doors[which].listener > 0 && doors[which].relay == 0, 43);
    int listener = doors[which].listener;
    require(call(SYS_listen, listener, WAITING_MAX, 0, 0, 0) == 0, 44);
    long pid = call(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (pid == 0)
        relay(which, channels, listener);
    require(pid > 0, 45);
    call(SYS_close, channels[0], 0, 0, 0, 0);
    call(SYS_close, channels[1], 0, 0, 0, 0);
    doors[which].relay = pid;
    /* The relay closes it when the daemon does; this kernel knows no shutdown of such a listener. */
    if (which == BRIDGE_DOOR)
        call(SYS_close, listener, 0, 0, 0, 0);
}

/* Whether this was a relay. It ends by itself once its door is closed, and else is broken. */
static int relay_ended(long pid, int status)
{
    for (int i = 0; i < DOORS; i++)
        if (pid > 0 && pid == doors[i].relay) {
            require(status == 0, 46);
            return 1;
        }
    return 0;
}

/* No command is alive, or can be: nobody is there to take the place of what is bound anew. */
static void close_the_doors(void)
{
    for (int i = 0; i < DOORS; i++) {
        if (!doors[i].relay)
            continue;
        call(SYS_kill, doors[i].relay, SIGKILL, 0, 0, 0);
        while (call(SYS_wait4, doors[i].relay, 0, 0, 0, 0) == -EINTR)
            ;
        doors[i].relay = 0;
        if (i == BRIDGE_DOOR) {
            require(call(SYS_unlinkat, AT_FDCWD, (long)BRIDGE.sun_path, 0, 0, 0) == 0, 47);
            bind_the_bridge();
        } else {
            call(SYS_shutdown, doors[i].listener, SHUT_RDWR, 0, 0, 0);
        }
    }
}
