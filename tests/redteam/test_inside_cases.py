"""Attempts on what an environment shares with others: the programs that run it, the pages of the
image, the kernel's tables. What is to stay unchanged is read again by the host or by a neighbour.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sbxd import launcher
from sbxd.port.errors import WorkspaceCode, WorkspaceError
from tests.redteam.live import PRELUDE, live

pytestmark = [pytest.mark.needs("daemon"), pytest.mark.gate("gate.sandbox.escape_denied")]


def digests_of_our_programs() -> list[str]:
    """Of the interpreter that the launcher, init and the steward are, and of the launcher."""
    programs = (Path(sys.executable).resolve(), Path(launcher.__file__).with_name("__main__.py"))
    return [hashlib.sha256(each.read_bytes()).hexdigest() for each in programs]


@pytest.mark.case("ESC-01")
async def test_no_program_that_runs_an_environment_can_be_written() -> None:
    """Through /proc/PID/exe, which names a file also where no path leads to it."""
    source = """
import subprocess
child = subprocess.Popen(["sleep", "30"])
while "sleep" not in os.readlink(f"/proc/{child.pid}/exe"):
    os.sched_yield()
found = {}
for pid in ("self", "1", "2", str(os.getppid()), str(child.pid)):
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC, os.O_PATH):
        try:
            one = os.open(f"/proc/{pid}/exe", flags)
            if flags == os.O_PATH:  # again, by way of the descriptor
                one = os.open(f"/proc/self/fd/{one}", os.O_WRONLY)
            how = "opened " + str(os.write(one, b"x"))
        except OSError as error:
            how = errno.errorcode[error.errno]
        found[f"{pid} {flags}"] = how
child.kill()
control = attempt(os.open, "/proc/self/exe", os.O_RDONLY)
answer([sorted(set(found.values())), control])
"""
    before = digests_of_our_programs()
    async with live() as environment:
        found, control = await environment.look(source)
    assert set(found) <= {"EACCES", "ENOENT", "EROFS", "ETXTBSY", "EPERM"}
    assert control == "ok"
    assert before == digests_of_our_programs()


@pytest.mark.case("ESC-06")
async def test_no_control_group_can_be_mounted_and_none_is_there() -> None:
    source = """
os.mkdir("here")
kinds = [b"cgroup", b"cgroup2", b"proc", b"sysfs", b"tmpfs"]
mounted = {k.decode(): syscall(165, b"none", b"/workspace/here", k, 0, b"memory") for k in kinds}
names = ("release_agent", "notify_on_release", "cgroup.procs", "cgroup.kill")
walked = [os.path.join(top, name) for top, _, files in os.walk("/") for name in files
          if name in names and not top.startswith("/proc")]
answer([mounted, walked, attempt(os.listdir, "/sys/fs/cgroup"), os.path.exists("/etc/passwd")])
"""
    async with live() as environment:
        mounted, walked, listed, control = await environment.look(source)
    assert set(mounted.values()) == {"EPERM"}
    assert (walked, listed, control) == ([], "ENOENT", True)


PAGES = """
canary = "/usr/lib/os-release"
one = os.open(canary, os.O_RDONLY)
read, write = os.pipe()
size = os.fstat(one).st_size
import mmap
view = mmap.mmap(one, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
address = ctypes.c_void_p()
found = {
    "splice": syscall(275, one, 0, write, 0, 16, 0),
    "tee": syscall(276, read, write, 16, 0),
    "vmsplice": syscall(278, write, ctypes.byref(address), 0, 0),
    "open": attempt(os.open, canary, os.O_RDWR),
    "chmod": attempt(os.chmod, canary, 0o666),
    "mem": attempt(open, "/proc/self/mem", "r+b", 0),
    "shared": attempt(mmap.mmap, one, 0, flags=mmap.MAP_SHARED, prot=3),
    "alg": syscall(41, 38, 5, 0),
    "key": syscall(41, 15, 3, 2),
    "rxrpc": syscall(41, 33, 2, 2),
}
# The way that was open in other kernels: pages of a file into a pipe, then a write to the pipe.
os.sendfile(write, one, 0, 16)
os.write(write, b"OVERWRITTEN")
os.posix_fadvise(one, 0, 0, os.POSIX_FADV_DONTNEED)
libc.madvise(ctypes.c_void_p(0), 0, 4)
answer([found, open(canary).read()])
"""


@pytest.mark.case("KRN-11")
async def test_a_page_of_the_image_is_the_same_for_the_next_environment() -> None:
    async with live() as environment, live() as neighbour:
        original = (await neighbour.run("cat", "/usr/lib/os-release")).stdout.decode()
        found, seen = await environment.look(PAGES)
        after = (await neighbour.run("cat", "/usr/lib/os-release")).stdout.decode()
    assert "Debian" in original, "the control: the canary is read"
    assert seen == after == original
    refusals = {"splice": "ENOSYS", "tee": "ENOSYS", "vmsplice": "ENOSYS", "shared": "EACCES"}
    assert {name: found[name] for name in refusals} == refusals
    assert {found[name] for name in ("alg", "key", "rxrpc")} == {"EAFNOSUPPORT"}
    assert found["open"] in ("EROFS", "EACCES")
    assert found["chmod"] in ("EROFS", "EPERM")


@pytest.mark.case("FS-05")
async def test_a_file_of_the_image_cannot_be_linked_into_the_workspace() -> None:
    source = """
targets = ["/etc/passwd", "/usr/bin/env", "/proc/self/exe", "/dev/null"]
found = [attempt(os.link, target, "/workspace/link") for target in targets]
open("/workspace/own", "w").write("own")
answer([found, attempt(os.link, "/workspace/own", "/workspace/second")])
"""
    async with live() as environment:
        found, control = await environment.look(source)
        with pytest.raises(WorkspaceError) as refused:
            await environment.workspace.write("second", b"new")
        own = await environment.run("cat", "own", "second")
    assert set(found) <= {"EXDEV", "EPERM", "EROFS"}
    assert control == "ok"
    assert refused.value.code is WorkspaceCode.HARD_LINKED
    assert own.stdout == b"ownown", "a write by the service reached the other name of the file"


EXHAUST = """
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

found = {
    "files": until(lambda: os.open("/dev/null", os.O_RDONLY)),
    "memory files": until(lambda: os.memfd_create("x")),
    "sockets": until(lambda: socket.socket().detach()),
    "directories": until(lambda: os.open("/", os.O_PATH)),
}
queue = syscall(240, b"queue", 0o102, 0o600, 0)
answer([found, queue, attempt(open, "/etc/passwd"), resource.getrlimit(resource.RLIMIT_NOFILE)])
"""


@pytest.mark.case("RES-09")
async def test_descriptors_run_out_inside_and_nowhere_else() -> None:
    async with live() as environment, live() as neighbour:
        found, queue, control, (soft, hard) = await environment.look(EXHAUST)
        beside = await neighbour.run("cat", "/etc/passwd")
    assert set(found.values()) == {"EMFILE"}, found
    assert queue == "ENOSYS", "POSIX queues are the kernel's memory"
    assert control == "ok"
    assert soft <= hard <= 1 << 20
    assert beside.exit_code == 0


@pytest.mark.case("RES-11")
async def test_a_flush_of_everything_returns_at_once_and_flushes_nothing() -> None:
    """The control: outside, the same call waits for the file system under it."""
    source = """
import time
begun = time.monotonic()
for _ in range(2000):
    os.sync()
answer([time.monotonic() - begun, syscall(306, 1)])
"""
    async with live() as environment:
        seconds, syncfs = await environment.look(source)
    assert seconds < 1
    assert syncfs == "ENOSYS"
    assert outside("answer(syscall(306, os.open('/', 0)))") == "ok"


def outside(source: str) -> object:
    """What the program answers in the lane itself, as root."""
    command = [sys.executable, "-c", PRELUDE + source]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)
