"""Probes of what a command is: its descriptors, identity and limits, and how to become more.

Deliberately absent: what the host's kernel says of the process, which the driver looks at.
"""

from sbxd.probes.probe import Layer, Probe

_EPERM = frozenset({"EPERM"})
_NONE = frozenset({"none"})
_OPEN = frozenset({"fifo", "null"})

DESCRIPTORS = Probe(
    id="descriptors",
    cases=("ESC-02", "ESC-04"),
    layer=Layer.DESCRIPTORS,
    source="""
control = os.open("/etc/passwd", os.O_RDONLY)
os.dup2(control, 900)
found = {}
for number in range(4096):
    try:
        status = os.fstat(number)
    except OSError:
        continue
    kind = "fifo" if stat.S_ISFIFO(status.st_mode) else (
        "null" if status.st_rdev == os.makedev(1, 3) else "other")
    found["own" if number == control else str(number)] = kind
known = {"0", "1", "2", "own", "900"}
answer({**{name: kind for name, kind in found.items() if name in known},
        "besides": listed(found.keys() - known)})
""",
    inside={"0": _OPEN, "1": _OPEN, "2": _OPEN, "besides": _NONE},
    controls={"own": "other", "900": "other"},
)

IDENTITY = Probe(
    id="identity",
    cases=(),
    layer=Layer.IDENTITY,
    source="""
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
names = ["Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
         "Seccomp"]
answer({
    **{name: " ".join(fields[name].split()) for name in names},
    "pids": str(len(fields["NSpid"].split())),
    "host name": os.uname()[1],
    "sethostname": attempt(socket.sethostname, "x"),
    "own pid": "ok" if int(fields["Pid"]) == os.getpid() else "ESRCH",
})
""",
    inside={
        **dict.fromkeys(("Uid", "Gid"), frozenset({"10001 10001 10001 10001"})),
        "Groups": frozenset({""}),
        **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), frozenset({"0" * 16})),
        "NoNewPrivs": frozenset({"1"}),
        "Seccomp": frozenset({"2"}),
        "pids": frozenset({"1"}),  # that of an outer namespace would be another
        "host name": frozenset({"sandbox"}),
        "sethostname": _EPERM,
    },
    controls={"own pid": "ok"},
)

OWNERS = Probe(
    id="owners",
    cases=("ESC-18",),
    layer=Layer.IDENTITY,
    source="""
import ctypes, subprocess
libc = ctypes.CDLL(None, use_errno=True)

def capset_to_nothing():
    header, empty = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, empty):
        raise OSError(ctypes.get_errno(), "capset")

place = "/workspace/owned"
open(place, "w").close()
answer({
    "chown to root": attempt(os.chown, place, 0, 0),
    "chown to oneself": attempt(os.chown, place, 10001, 10001),
    "setuid to root": attempt(os.setuid, 0),
    "setgid to root": attempt(os.setgid, 0),
    "setgroups": attempt(os.setgroups, [0]),
    "setuid to oneself": attempt(os.setuid, 10001),
    "setresgid to oneself": attempt(os.setresgid, 10001, 10001, 10001),
    "capset to nothing": attempt(capset_to_nothing),
    "a child as oneself": attempt(subprocess.run, ["/bin/true"], check=True, user=10001),
    "unlink": attempt(os.unlink, place),
})
""",
    inside=dict.fromkeys(
        ("chown to root", "setuid to root", "setgid to root", "setgroups"),
        _EPERM,
    ),
    controls={
        "chown to oneself": "ok",
        "setuid to oneself": "ok",
        "setresgid to oneself": "ok",
        "capset to nothing": "ok",
        "a child as oneself": "ok",
        "unlink": "ok",
    },
)

SET_UID = Probe(
    id="set-uid",
    cases=("ESC-18",),
    layer=Layer.IDENTITY,
    source="""
import shutil, subprocess
place = "/workspace/set-uid"
shutil.copy(os.path.realpath("/usr/bin/id"), place)
changed = attempt(os.chmod, place, 0o6755)
planted = []
for folder, _, files in os.walk("/usr"):
    for name in files:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) and mode & 0o6000:
            planted.append(path)
answer({
    "identity": subprocess.run([place], capture_output=True, text=True).stdout.strip(),
    "of the image": listed(planted),
    "chmod": changed,
    "the bit": "ok" if os.stat(place).st_mode & 0o6000 else "EPERM",
})
os.unlink(place)
""",
    inside={
        "identity": frozenset({"uid=10001(sandbox) gid=10001(sandbox) groups=10001(sandbox)"}),
        "of the image": _NONE,
    },
    controls={"chmod": "ok", "the bit": "ok"},
)

# 0 would let the host's core handler run.
CORE_LIMIT = Probe(
    id="core-limit",
    cases=("ESC-10",),
    layer=Layer.RESOURCE_LIMITS,
    source="""
import resource
found = {"before": listed(resource.getrlimit(resource.RLIMIT_CORE))}
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
answer({
    **found,
    "after": listed(resource.getrlimit(resource.RLIMIT_CORE)),
    "another limit": attempt(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64)),
    "another limit is": listed(resource.getrlimit(resource.RLIMIT_NOFILE)),
})
""",
    inside={"before": frozenset({"1 1"}), "after": frozenset({"1 1"})},
    controls={"another limit": "ok", "another limit is": "64 64"},
)

EXHAUSTION = Probe(
    id="exhaustion",
    cases=("RES-09",),
    layer=Layer.RESOURCE_LIMITS,
    source="""
import resource

def until(make):
    made = []
    try:
        while len(made) < 100000:
            made.append(make())
        return "no bound"
    except OSError as error:
        return errno.errorcode[error.errno]
    finally:
        for each in made:
            os.close(each)

def in_flight():
    pair = socket.socketpair()
    pair[0].setblocking(False)
    socket.send_fds(pair[0], [b"x"], [0] * 253)
    pairs.append(pair)
    return os.open("/dev/null", os.O_RDONLY)


def timers():
    made = ctypes.c_int()
    for _ in range(100000):
        outcome = syscall(222, 0, None, ctypes.byref(made))
        if outcome != "ok":
            return outcome
    return "no bound"


def watcher():
    number = libc.inotify_init()
    if number < 0:
        raise OSError(ctypes.get_errno(), "inotify_init")
    return number


pairs = []
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
answer({
    "files": until(lambda: os.open("/dev/null", os.O_RDONLY)),
    "memory files": until(lambda: os.memfd_create("x")),
    "sockets": until(lambda: socket.socket().detach()),
    "directories": until(lambda: os.open("/", os.O_PATH)),
    "watchers": until(watcher),
    "descriptors in flight": until(in_flight),
    "timers": timers(),
    "queue": syscall(240, b"queue", 0o102, 0o600, 0),
    "limit": "bounded" if 0 < soft <= hard <= 1 << 20 else f"{soft} {hard}",
    "/etc/passwd": attempt(open, "/etc/passwd"),
})
""",
    inside={
        **dict.fromkeys(("files", "memory files", "sockets", "directories"), frozenset({"EMFILE"})),
        "watchers": frozenset({"EMFILE"}),
        "descriptors in flight": frozenset({"ETOOMANYREFS"}),
        "timers": frozenset({"EAGAIN"}),
        "queue": frozenset({"ENOSYS"}),  # POSIX queues are the kernel's memory
        "limit": frozenset({"bounded"}),
    },
    controls={"/etc/passwd": "ok"},
)

FLUSH = Probe(
    id="flush",
    cases=("RES-11",),
    layer=Layer.SECCOMP,
    source="""
import time
found = {"syncfs": syscall(306, os.open("/", os.O_RDONLY))}
if ONLY is None:
    begun = time.monotonic()
    for _ in range(2000):
        os.sync()
    took = time.monotonic() - begun
    found["2000 flushes"] = "at once" if took < 1 else f"{took} s"
    with open("/workspace/flushed", "w") as file:
        found["fsync"] = attempt(os.fsync, file.fileno())
    os.unlink("/workspace/flushed")
answer(found)
""",
    inside={"syncfs": frozenset({"ENOSYS"}), "2000 flushes": frozenset({"at once"})},
    controls={"fsync": "ok"},
    outside={"syncfs": "ok"},
)

PROBES = (DESCRIPTORS, IDENTITY, OWNERS, SET_UID, CORE_LIMIT, EXHAUSTION, FLUSH)
