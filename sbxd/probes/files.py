"""Probes of what is mounted: places, what can be written, /dev, /proc and /sys, links."""

from sbxd.probes.probe import Layer, Probe

_NONE = frozenset({"none"})
_ABSENT = frozenset({"ENOENT"})
_READ_ONLY = frozenset({"EACCES", "EROFS"})

_DEVICES = ("full", "null", "random", "urandom", "zero")
_MOUNTED = ("/", "/dev", "/dev/shm", "/proc", "/tmp", "/workspace")  # noqa: S108
_PLACES = " ".join(sorted((*_MOUNTED, *(f"/dev/{name}" for name in _DEVICES))))

MOUNTS = Probe(
    id="mounts",
    cases=(),
    layer=Layer.MOUNTS,
    source="""
places, kinds = [], {}
for line in open("/proc/self/mountinfo"):
    left, right = line.split(" - ")
    place, options = left.split()[4], left.split()[5].split(",")
    places.append(place)
    kinds[place] = (right.split()[0], options)
masks = {place for place in kinds if place.startswith("/proc/")}
answer({
    "hidden": listed(place for place in kinds if places.count(place) > 1),
    "masks besides tmpfs": listed(p for p in masks if kinds[p][0] != "tmpfs"),
    "places": listed(kinds.keys() - masks),
    "with setuid": listed(p for p in kinds if "nosuid" not in kinds[p][1]),
    "with devices": listed(
        p for p in kinds if not p.startswith("/dev") and "nodev" not in kinds[p][1]),
    "writable": listed(p for p in kinds if "rw" in kinds[p][1]),
    **{"kind of " + p: kinds[p][0] for p in ("/proc", "/tmp", "/dev/shm")},
    "statvfs": "ok" if os.statvfs("/").f_flag & os.ST_RDONLY
               and not os.statvfs("/workspace").f_flag & os.ST_RDONLY else "EROFS",
})
""",
    inside={
        "hidden": _NONE,
        "masks besides tmpfs": _NONE,
        "places": frozenset({_PLACES}),
        "with setuid": _NONE,
        "with devices": _NONE,
        "writable": frozenset({"/dev/shm /proc /tmp /workspace"}),  # noqa: S108
        "kind of /proc": frozenset({"proc"}),
        "kind of /tmp": frozenset({"tmpfs"}),
        "kind of /dev/shm": frozenset({"tmpfs"}),
    },
    controls={"statvfs": "ok"},
)

PROC = Probe(
    id="proc",
    cases=(),
    layer=Layer.MOUNTS,
    source="""
needed = {"cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version"}
readable = []
for name in os.listdir("/proc"):
    path = "/proc/" + name
    if name.isdigit() or name in ("self", "thread-self", "mounts", "net"):
        continue
    try:
        if os.path.isdir(path):
            found = os.listdir(path)
        else:
            with open(path, "rb") as file:
                found = file.read(1)
    except OSError:
        found = None
    if found:
        readable.append(name)
answer({
    "besides what programs need": listed(set(readable) - needed),
    "net": "ok" if "dev" in os.listdir("/proc/net") else "ENOENT",
    "meminfo": open("/proc/meminfo").read(8),
})
""",
    inside={"besides what programs need": _NONE},
    controls={"net": "ok", "meminfo": "MemTotal"},
)

_CLOSED = (
    "/", "/etc", "/usr/bin", "/root", "/home", "/var", "/run", "/dev", "/proc", "/sys",
    "/proc/self",
)  # fmt: skip
_OPEN = ("/workspace", "/tmp", "/dev/shm")  # noqa: S108

WRITES = Probe(
    id="writes",
    cases=(),
    layer=Layer.MOUNTS,
    source=f"PLACES = {(*_CLOSED, *_OPEN)!r}"
    + """
def create(folder):
    os.close(os.open(folder + "/probe", os.O_CREAT | os.O_WRONLY))
    os.unlink(folder + "/probe")

answer({
    **{place: attempt(create, place) for place in PLACES},
    "/etc/passwd": attempt(open, "/etc/passwd", "r+"),
    "interpreter": attempt(open, os.path.realpath(sys.executable), "r+b"),
})
""",
    inside={
        **dict.fromkeys(_CLOSED, frozenset({"EACCES", "ENOENT", "EPERM", "EROFS"})),
        "/etc/passwd": _READ_ONLY,
        "interpreter": _READ_ONLY,
    },
    controls=dict.fromkeys(_OPEN, "ok"),
)

_NODES = (
    "fd:l full:c1.7 null:c1.3 random:c1.8 sbx-bridge:s shm:d stderr:l stdin:l stdout:l "
    "urandom:c1.9 zero:c1.5"
)
_NO_DEVICES = (
    "kmsg", "mem", "kvm", "net/tun", "fuse", "vhost-net", "userfaultfd", "loop0", "loop-control",
    "tty", "console", "ptmx", "pts/0", "sda", "vda", "ubda", "input/event0", "dri/card0",
)  # fmt: skip

DEVICES = Probe(
    id="devices",
    cases=("ESC-04", "ESC-15"),
    layer=Layer.MOUNTS,
    source=f"NAMES = {_NO_DEVICES!r}"
    + """
def node(name):
    status = os.lstat("/dev/" + name)
    if stat.S_ISCHR(status.st_mode):
        return f"{name}:c{os.major(status.st_rdev)}.{os.minor(status.st_rdev)}"
    return f"{name}:{stat.filemode(status.st_mode)[0]}"

made = {kind: attempt(os.mknod, "/tmp/made-" + kind, mode | 0o666, os.makedev(*number))
        for kind, mode, number in [("chr", stat.S_IFCHR, (1, 1)), ("blk", stat.S_IFBLK, (7, 0))]}
answer({
    "nodes": listed(map(node, os.listdir("/dev"))),
    **{"a " + kind: how for kind, how in made.items()},
    **{name: attempt(open, "/dev/" + name) for name in NAMES},
    "full": attempt(lambda: os.write(os.open("/dev/full", os.O_WRONLY), b"x")),
    "null": attempt(lambda: os.write(os.open("/dev/null", os.O_WRONLY), b"x")),
    "zero": open("/dev/zero", "rb").read(4).hex(),
    "urandom": str(len(open("/dev/urandom", "rb").read(32))),
    "a fifo": attempt(os.mkfifo, "/tmp/made-fifo"),
})
os.unlink("/tmp/made-fifo")
""",
    inside={
        "nodes": frozenset({_NODES}),
        "a chr": frozenset({"EPERM"}),
        "a blk": frozenset({"EPERM"}),
        **dict.fromkeys(_NO_DEVICES, _ABSENT),
    },
    controls={
        "full": "ENOSPC",
        "null": "ok",
        "zero": "00000000",
        "urandom": "32",
        "a fifo": "ok",
    },
)

_KNOBS = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sysrq-trigger",
    "/proc/sys/fs/binfmt_misc/register",
    "/sys/kernel/uevent_helper",
    "/proc/kcore",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/release_agent",
    "/proc/config.gz",
    "/proc/sys/user/max_user_namespaces",
    "/proc/kallsyms",
    "/proc/keys",
    "/proc/timer_list",
    "/sys/kernel/debug",
    "/sys/firmware",
    "/sys/class/net",
)

KNOBS = Probe(
    id="knobs",
    cases=("ESC-06", "ESC-10"),
    layer=Layer.MOUNTS,
    source=f"KNOBS = {_KNOBS!r}"
    + """
answer({
    "/sys": listed(os.listdir("/sys")),
    **{f"{name} {mode}": attempt(open, name, mode) for name in KNOBS for mode in ("r", "r+")},
    "/proc/self/status": attempt(open, "/proc/self/status"),
})
""",
    inside={
        "/sys": _NONE,
        **{
            f"{name} {mode}": frozenset({"EACCES", "EISDIR", "ENOENT", "EPERM", "EROFS"})
            for name in _KNOBS
            for mode in ("r", "r+")
        },
    },
    controls={"/proc/self/status": "ok"},
)

_TARGETS = ("/etc/passwd", "/usr/bin/env", "/proc/self/exe", "/dev/null")
# Leaves a file with two names, which no write by the service may reach.
LINKED = ("own", "second")
LINKS = Probe(
    id="links",
    cases=("FS-05",),
    layer=Layer.MOUNTS,
    source=f"TARGETS, LINKED = {_TARGETS!r}, {LINKED!r}"
    + """
one, two = ("/workspace/" + name for name in LINKED)
found = {target: attempt(os.link, target, "/workspace/link") for target in TARGETS}
open(one, "w").write("own")
answer({**found, "own": attempt(os.link, one, two)})
""",
    inside=dict.fromkeys(_TARGETS, frozenset({"EXDEV", "EPERM", "EROFS"})),
    controls={"own": "ok"},
)

PROBES = (MOUNTS, PROC, WRITES, DEVICES, KNOBS, LINKS)
