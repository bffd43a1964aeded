"""Probes of what environments share with the host: programs, control groups, pages of the image,
and who else is there: processes and sockets.

They say what the attempts answer; that nothing has changed is for the driver to see from another
environment or from the host.
"""

from sbxd.probes.probe import Layer, Probe

_REFUSED_WRITE = frozenset({"EACCES", "ENOENT", "EROFS", "ETXTBSY", "EPERM"})
_PROGRAMS = ("self", "1", "2", "parent", "child")
_WAYS = ("write", "truncate", "by descriptor")

PROGRAM_FILES = Probe(
    id="program-files",
    cases=("ESC-01",),
    layer=Layer.MOUNTS,
    source="""
import subprocess
child = subprocess.Popen(["sleep", "30"])
while "sleep" not in os.readlink(f"/proc/{child.pid}/exe"):
    os.sched_yield()
names = {"self": "self", "1": "1", "2": "2", "parent": os.getppid(), "child": child.pid}

def by_descriptor(path):
    one = os.open(path, os.O_PATH)
    os.write(os.open(f"/proc/self/fd/{one}", os.O_WRONLY), b"x")

found = {}
for name, pid in names.items():
    path = f"/proc/{pid}/exe"
    found[name + " write"] = attempt(os.open, path, os.O_WRONLY)
    found[name + " truncate"] = attempt(os.open, path, os.O_RDWR | os.O_TRUNC)
    found[name + " by descriptor"] = attempt(by_descriptor, path)
child.kill()
answer({**found, "read": attempt(os.open, "/proc/self/exe", os.O_RDONLY)})
""",
    inside={f"{name} {way}": _REFUSED_WRITE for name in _PROGRAMS for way in _WAYS},
    controls={"read": "ok"},
)

CONTROL_GROUPS = Probe(
    id="control-groups",
    cases=("ESC-06", "LIF-09"),
    layer=Layer.SECCOMP,
    source="""
import tempfile
place = tempfile.mkdtemp().encode()
kinds = ("cgroup", "cgroup2", "proc", "sysfs", "tmpfs")
found = {k: syscall(165, b"none", place, k.encode(), 0, None) for k in kinds}
names = ("release_agent", "notify_on_release", "cgroup.procs", "cgroup.kill")
there = [name for top, _, files in os.walk("/") if not top.startswith("/proc") for name in files
         if name in names]
found["files"] = "ok" if there else "ENOENT"
found["/sys/fs/cgroup"] = attempt(os.listdir, "/sys/fs/cgroup")
answer({**found, "/etc/passwd": attempt(open, "/etc/passwd")})
""",
    inside={
        **dict.fromkeys(("cgroup", "cgroup2", "proc", "sysfs", "tmpfs"), frozenset({"EPERM"})),
        "files": frozenset({"ENOENT"}),
        "/sys/fs/cgroup": frozenset({"ENOENT"}),
    },
    controls={"/etc/passwd": "ok"},
)

CANARY = "/usr/lib/os-release"
IMAGE_PAGES = Probe(
    id="image-pages",
    cases=("KRN-11",),
    layer=Layer.SECCOMP,
    source=f"CANARY = {CANARY!r}"
    + """
import mmap
one = os.open(CANARY, os.O_RDONLY)
read, write = os.pipe()
address = ctypes.c_void_p()
text = open(CANARY).read()
found = {
    "splice": syscall(275, one, 0, write, 0, 16, 0),
    "tee": syscall(276, read, write, 16, 0),
    "vmsplice": syscall(278, write, ctypes.byref(address), 0, 0),
    "open": attempt(os.open, CANARY, os.O_RDWR),
    "chmod": attempt(os.chmod, CANARY, 0o666),
    "shared mapping": attempt(mmap.mmap, one, 0, flags=mmap.MAP_SHARED, prot=3),
    "AF_ALG": syscall(41, 38, 5, 0),
    "AF_KEY": syscall(41, 15, 3, 2),
    "AF_RXRPC": syscall(41, 33, 2, 2),
}
# The way that was open in other kernels: pages of a file into a pipe, then a write to the pipe.
found["sendfile"] = attempt(os.sendfile, write, one, 0, 16)
os.write(write, b"OVERWRITTEN")
os.posix_fadvise(one, 0, 0, os.POSIX_FADV_DONTNEED)
found["unchanged"] = "ok" if open(CANARY).read() == text else "EIO"
answer(found)
""",
    inside={
        **dict.fromkeys(("splice", "tee", "vmsplice"), frozenset({"ENOSYS"})),
        **dict.fromkeys(("AF_ALG", "AF_KEY", "AF_RXRPC"), frozenset({"EAFNOSUPPORT"})),
        "open": frozenset({"EROFS", "EACCES"}),
        "chmod": frozenset({"EROFS", "EPERM"}),
        "shared mapping": frozenset({"EACCES"}),
    },
    controls={"sendfile": "ok", "unchanged": "ok"},
)

PROCESSES = Probe(
    id="processes",
    cases=("ESC-09",),
    layer=Layer.PID_NAMESPACE,
    source="""
import subprocess
child = subprocess.Popen(["sleep", "30"])
while not open(f"/proc/{child.pid}/cmdline").read().startswith("sleep"):
    os.sched_yield()  # its exec is not complete
seen = {pid: open("/proc/" + pid + "/cmdline").read().split("\\0")[0]
        for pid in os.listdir("/proc") if pid.isdigit()}
reached = set()
for pid in range(1, 5000):
    for name in ("root", "cwd", "exe"):
        if attempt(os.readlink, f"/proc/{pid}/{name}") == "ok":
            reached.add(str(pid))
    for name in ("environ", "maps", "mem", "cmdline"):
        if attempt(open, f"/proc/{pid}/{name}") == "ok":
            reached.add(str(pid))
own = {str(os.getpid()), str(child.pid)}
child.kill()
answer({
    "others seen": listed(seen.keys() - own),
    "others reached": listed(reached - own),
    "a signal to 1": attempt(os.kill, 1, 0),
    "a signal to none": attempt(os.kill, 2 ** 20, 0),
    "the child": seen.get(str(child.pid)),
    "own reached": "ok" if reached >= own else "ESRCH",
})
""",
    inside={
        "others seen": frozenset({"none"}),
        "others reached": frozenset({"none"}),
        "a signal to 1": frozenset({"EPERM"}),
        "a signal to none": frozenset({"ESRCH"}),
    },
    controls={"the child": "sleep", "own reached": "ok"},
)

_SERVICES = (
    "/run/sbxd/worker.sock",
    "/run/sbxd/admin.sock",
    "/run/sbxd/launcher.sock",
    "/run/dbus/system_bus_socket",
    "/var/run/dbus/system_bus_socket",
    "/run/systemd/private",
    "/run/systemd/notify",
    "/run/systemd/journal/socket",
    "/run/systemd/journal/stdout",
    "/run/systemd/journal/dev-log",
    "/dev/log",
    "/run/docker.sock",
    "/var/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/run/podman/podman.sock",
    "/run/user/0/bus",
)
_ABSTRACT = ("/org/freedesktop/systemd1/notify", "/containerd-shim/x.sock", "sbxd", "/tmp/dbus-x")  # noqa: S108

SERVICE_SOCKETS = Probe(
    id="service-sockets",
    cases=("ESC-17",),
    layer=Layer.MOUNTS,
    source=f"PATHS = {_SERVICES!r}"
    + """
found = {path: attempt(connect, socket.AF_UNIX, path) for path in PATHS}
found["/run/sbxd"] = attempt(os.stat, "/run/sbxd")
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind("/workspace/probe.sock")
    listening.listen()
    found["own"] = attempt(connect, socket.AF_UNIX, "/workspace/probe.sock")
os.unlink("/workspace/probe.sock")
answer(found)
""",
    inside=dict.fromkeys((*_SERVICES, "/run/sbxd"), frozenset({"ENOENT"})),
    controls={"own": "ok"},
)

ABSTRACT_SOCKETS = Probe(
    id="abstract-sockets",
    cases=("ESC-11",),
    layer=Layer.NETWORK_NAMESPACE,
    source=f"NAMES = {_ABSTRACT!r}"
    + """
found = {name: attempt(connect, socket.AF_UNIX, "\\0" + name) for name in NAMES}
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind("\\0control")
    listening.listen()
    found["own"] = attempt(connect, socket.AF_UNIX, "\\0control")
    table = [line.split()[7:] for line in open("/proc/net/unix").read().splitlines()[1:]]
answer({**found, "listed": listed({name[0] for name in table if name} - {"@control"}),
        "own listed": "ok" if ["@control"] in table else "ENOENT"})
""",
    inside={
        **dict.fromkeys(_ABSTRACT, frozenset({"ECONNREFUSED"})),
        # Its own, which has a place in /dev.
        "listed": frozenset({"sbx-bridge", "/dev/sbx-bridge"}),
    },
    controls={"own": "ok", "own listed": "ok"},
)

PROBES = (
    PROGRAM_FILES,
    CONTROL_GROUPS,
    IMAGE_PAGES,
    PROCESSES,
    SERVICE_SOCKETS,
    ABSTRACT_SOCKETS,
)
