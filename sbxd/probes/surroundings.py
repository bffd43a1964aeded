"""Probes of what environments share with the host: programs, control groups, pages of the image.

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
    cases=("ESC-06",),
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

PROBES = (PROGRAM_FILES, CONTROL_GROUPS, IMAGE_PAGES)
