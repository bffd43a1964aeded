"""AppArmor and Landlock as layers of their own: the same attack, with the layer and without it.

The filter of these environments allows everything and, where files are concerned, the image is
mounted writable with a directory that everybody may write to: nothing but the layer is in the way.
"""

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.launcher.kernel import hostpaths
from tests.kernel.jail_environment import Environment, environment, filter_refusing
from tests.lab.features import landlock_version

REPOSITORY = Path(__file__).parents[2]
LABEL = "sbxd-workload"
PERMISSIVE = filter_refusing(1023).hex()

# Each answers with 0 or an errno.
ATTACKS = """
import ctypes, json, os, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)

def attempt(call, *arguments):
    try:
        call(*arguments)
    except OSError as problem:
        return problem.errno
    return 0

def write(path, text, mode="wb"):
    with open(path, mode, buffering=0) as file:
        file.write(text)

def own_memory():
    place = ctypes.create_string_buffer(b"x")
    with open("/proc/self/mem", "r+b", buffering=0) as file:
        file.seek(ctypes.addressof(place))
        file.write(b"y")

def make_directory():
    os.mkdir("/elsewhere/directory")
    os.rmdir("/elsewhere/directory")

found = {
    "write beside the places for it": attempt(write, "/elsewhere/planted", b"x"),
    "make a directory there": attempt(make_directory),
    "a label of its own for the next program":
        attempt(write, "/proc/self/attr/apparmor/exec", b"exec sbxd-workload"),
    "the same by the thread": attempt(write, "/proc/thread-self/attr/exec", b"exec sbxd-workload"),
    "its own memory by proc": attempt(own_memory),
    "a datagram socket": attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM),
}
"""
USES = """
def executed_memory():
    code = os.memfd_create("program")
    with open("/usr/bin/true", "rb") as program:
        os.write(code, program.read())
    return subprocess.run([f"/proc/self/fd/{code}"], pass_fds=[code]).returncode

def a_pair():
    server = socket.socket(socket.AF_UNIX)
    server.bind("\\0abstract")
    server.listen()
    client = socket.socket(socket.AF_UNIX)
    client.connect("\\0abstract")

def loopback():
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).close()

def renamed():
    os.mkdir("one"), os.mkdir("two")
    write("one/a", b"x")
    os.rename("one/a", "two/b")
    os.link("two/b", "one/c")
    os.symlink("c", "one/d")
    os.truncate("two/b", 0)
    os.mkfifo("one/fifo")

def signalled():
    child = subprocess.Popen(["sleep", "60"])
    child.kill()
    return child.wait()

def traced():
    child = subprocess.Popen(["sleep", "60"])
    number = 101 if os.uname().machine == "x86_64" else 117
    if libc.syscall(number, 0x4206, child.pid, 0, 0):
        raise OSError(ctypes.get_errno(), "ptrace")
    child.kill()

found |= {
    "write in the workspace": attempt(write, "file", b"x"),
    "rename and link": attempt(renamed),
    "write in tmp": attempt(write, "/tmp/file", b"x"),
    "write in shm": attempt(write, "/dev/shm/file", b"x"),
    "write to null": attempt(write, "/dev/null", b"x", "r+b"),
    "read urandom": attempt(open, "/dev/urandom", "rb"),
    "name a thread": attempt(write, "/proc/self/comm", b"name"),
    "offer itself": attempt(write, "/proc/self/oom_score_adj", b"900"),
    "execute from memory": executed_memory(),
    "a stream over loopback": attempt(loopback),
    "an abstract socket of its own": attempt(a_pair),
    "signal its own child": signalled(),
    "trace its own child": attempt(traced),
}
"""
ANSWER = "print(json.dumps(found))"
GOOD = {"signal its own child": -9}

in_uml = pytest.mark.needs("root", "cgroup2", "apparmor")
with_landlock = pytest.mark.needs("root", "cgroup2", "landlock")
# What each layer stops in ATTACKS; what it does not name must succeed under it.
STOPPED_BY_APPARMOR = {
    "write beside the places for it",
    "make a directory there",
    "a label of its own for the next program",
    "the same by the thread",
    "its own memory by proc",
    "a datagram socket",
}
STOPPED_BY_LANDLOCK = {"write beside the places for it", "make a directory there"}


@pytest.fixture(scope="module")
def labelled() -> Iterator[Environment]:
    with environment(apparmor_label=LABEL, image="writable", seccomp_workload=PERMISSIVE) as one:
        yield one


@pytest.fixture(scope="module")
def landlocked() -> Iterator[Environment]:
    with environment(
        landlock_version=landlock_version(), image="writable", seccomp_workload=PERMISSIVE
    ) as one:
        yield one


@pytest.fixture(scope="module")
def bare() -> Iterator[Environment]:
    """The negative control: neither layer."""
    with environment(image="writable", seccomp_workload=PERMISSIVE) as one:
        yield one


@in_uml
def test_the_label_is_what_a_command_and_the_host_read(labelled: Environment) -> None:
    source = """
        import subprocess, sys
        print(open("/proc/self/attr/apparmor/current").read().strip(), flush=True)
        subprocess.run(["cat", "/proc/self/attr/apparmor/current"])
        sys.stdout.flush()
        sys.stdin.read()
    """
    running = labelled.release(labelled.park(), labelled.python, "-c", _flat(source))
    assert running.finish().stdout.decode().split("\n")[:2] == [f"{LABEL} (enforce)"] * 2
    waiting = labelled.release(labelled.park(), "sh", "-c", "echo up; exec sleep 60")
    assert waiting.read() == b"up\n"
    (pid,) = labelled.pids(waiting.number)
    with open(f"/proc/{pid}/attr/apparmor/current") as file:
        assert file.read().strip() == f"{LABEL} (enforce)"
    labelled.kill(waiting.number)
    waiting.finish()


@in_uml
def test_without_a_label_in_the_plan_there_is_none(bare: Environment) -> None:
    done = bare.run("cat", "/proc/self/attr/apparmor/current")
    assert LABEL.encode() not in done.stdout


@in_uml
def test_apparmor_stops_what_nothing_else_does_here(labelled: Environment) -> None:
    found = labelled.script(ATTACKS + ANSWER).json()
    assert {name for name, code in found.items() if code == errno.EACCES} == STOPPED_BY_APPARMOR
    assert set(found) == STOPPED_BY_APPARMOR


@in_uml
def test_control_without_apparmor_all_of_it_succeeds(bare: Environment) -> None:
    found = bare.script(ATTACKS + ANSWER).json()
    assert found == dict.fromkeys(STOPPED_BY_APPARMOR, 0)


@pytest.mark.also("qemu")
@in_uml
def test_apparmor_is_in_the_way_of_nothing_that_programs_do(labelled: Environment) -> None:
    found = labelled.script("import json\n" + _uses() + ANSWER).json()
    assert {name: code for name, code in found.items() if code != GOOD.get(name, 0)} == {}


@in_uml
def test_a_profile_that_is_not_loaded_stops_the_command_before_it_is_one() -> None:
    with environment(apparmor_label="sbxd-no-such-profile") as built:
        descriptor = built.leaf()
        built.number += 1
        from sbxd.jail.frames import Park, RunFailed

        built.send(Park(built.number), descriptor)
        failed = built.receive_about(built.number)
        assert isinstance(failed, RunFailed)
        assert (failed.step, failed.errno) == ("take_a_label_on_exec", errno.ENOENT)


# As init's child would: its parent is process 1.
LABELLED = """
import fcntl, os, socket, subprocess, sys
program, is_false = sys.argv[1], sys.argv[2] == "false"
if is_false:
    subprocess.run(["mount", "-t", "tmpfs", "none", "/proc"], check=True)
    for pid in range(1, 32):
        os.makedirs(f"/proc/{pid}/attr/apparmor")
        open(f"/proc/{pid}/attr/apparmor/exec", "w").close()
reading, writing = os.pipe()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
pid = os.fork()
if pid == 0:
    held = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (writing, theirs.fileno())]
    for target, descriptor in zip((3, 4), held):
        os.dup2(descriptor, target)
    os.execv(program, ["sbx-command", "sbxd-no-such-profile", ""])
os.close(writing)
print(*os.read(reading, 100).decode().split("\\0"))
os.waitpid(pid, 0)
if is_false:
    print(*{open(f"/proc/{pid}/attr/apparmor/exec").read() for pid in range(1, 32)})
"""


def told_of_a_label(proc: str) -> str:
    """What a command's process says of a label that no kernel has, and what was written."""
    unshare = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc")
    command = [*unshare, sys.executable, "-c", LABELLED, hostpaths.guest_init(), proc]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.needs("root", "systemd")
@pytest.mark.case("ESC-05")
def test_a_label_is_never_written_to_a_false_proc() -> None:
    assert told_of_a_label("false") == f"take_a_label_on_exec {errno.EXDEV}\n\n"


@pytest.mark.needs("root", "systemd")
def test_the_true_proc_is_told_of_the_label_so_the_false_one_is_told_apart() -> None:
    assert told_of_a_label("true") == f"take_a_label_on_exec {errno.ENOENT}\n"


@pytest.mark.also("qemu")
@with_landlock
def test_landlock_stops_what_nothing_else_does_here(landlocked: Environment) -> None:
    found = landlocked.script(ATTACKS + ANSWER).json()
    stopped = {name for name, code in found.items() if code == errno.EACCES}
    assert stopped >= STOPPED_BY_LANDLOCK


@with_landlock
def test_control_without_landlock_all_of_it_succeeds(bare: Environment) -> None:
    found = bare.script(ATTACKS + ANSWER).json()
    assert {name: found[name] for name in STOPPED_BY_LANDLOCK} == dict.fromkeys(
        STOPPED_BY_LANDLOCK, 0
    )


@pytest.mark.also("qemu")
@with_landlock
def test_landlock_is_in_the_way_of_nothing_that_programs_do(landlocked: Environment) -> None:
    found = landlocked.script("import json\n" + _uses() + ANSWER).json()
    assert {name: code for name, code in found.items() if code != GOOD.get(name, 0)} == {}


REACH = """
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
other = int(sys.argv[1])

def attempt(call, *arguments):
    try:
        call(*arguments)
    except OSError as problem:
        return problem.errno
    return 0

def trace():
    number = 101 if os.uname().machine == "x86_64" else 117
    if libc.syscall(number, 0x4206, other, 0, 0):
        raise OSError(ctypes.get_errno(), "ptrace")
    libc.syscall(number, 17, other, 0, 0)

print(json.dumps([
    attempt(socket.socket(socket.AF_UNIX).connect, "\\0of-another"),
    attempt(trace),
    attempt(os.kill, other, 0),
]))
"""
HELD = """
import os, socket, time
server = socket.socket(socket.AF_UNIX)
server.bind("\\0of-another")
server.listen()
print(os.getpid(), flush=True)
time.sleep(60)
"""


def reached(built: Environment) -> list[int]:
    """What a command can do to another one that runs beside it: connect, trace, signal."""
    victim = built.release(built.park(), built.python, "-c", HELD)
    pid = victim.read().decode().strip()
    answers: list[int] = built.run(built.python, "-c", REACH, pid).json()
    built.kill(victim.number)
    victim.finish()
    return answers


@with_landlock
def test_landlock_keeps_a_command_from_another_beside_it(landlocked: Environment) -> None:
    assert landlock_version() >= 6, "the lane's kernel scopes signals and abstract sockets"
    assert reached(landlocked) == [errno.EPERM] * 3


@with_landlock
def test_control_without_landlock_it_reaches_the_other(bare: Environment) -> None:
    assert reached(bare) == [0, 0, 0]


def _uses() -> str:
    return ATTACKS.partition("found = {")[0] + "found = {}\n" + USES


def _flat(source: str) -> str:
    return "\n".join(line.removeprefix("        ") for line in source.splitlines())
