"""Process 1 of a gVisor sandbox, on an ordinary kernel: its frames, its order, its proof.

It is the same program; what it asks of a kernel is what every Linux has.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sbxd.jail import frames
from sbxd.launcher.kernel import hostpaths

pytestmark = pytest.mark.needs("root", "cgroup2")

ALLOW_ALL = bytes.fromhex("060000000000ff7f")  # BPF_RET: SECCOMP_RET_ALLOW
SECONDS = 30
PATH = b"/usr/local/bin:/usr/bin:/bin"
WORKSPACE = Path("/workspace")


# A /dev and a loopback of its own, as a guest's kernel has them.
FURNISH = """
import fcntl, os, socket, struct
mount = ctypes.CDLL(None, use_errno=True).mount
assert mount(b"none", b"/", None, 1 << 18 | 1 << 14, None) == 0
assert mount(b"none", b"/dev", b"tmpfs", 0, b"mode=755") == 0
assert mount(b"none", b"/proc", b"proc", 0, None) == 0
os.mknod("/dev/null", 0o20666, os.makedev(1, 3))
os.chmod("/dev/null", 0o666)
with socket.socket() as end:
    fcntl.ioctl(end, 0x8914, struct.pack("16sh22x", b"lo", 0x49))  # SIOCSIFFLAGS: up, running
"""


class Guest:
    """Process 1 of a new pid namespace, and the channel to it."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(SECONDS)
        with theirs:
            moved = f"os.dup2({theirs.fileno()}, 3); os.execv({hostpaths.guest_init()!r}, ['init'])"
            self.process = subprocess.Popen(
                [
                    "unshare",
                    "--pid",
                    "--net",
                    "--mount",
                    "--fork",
                    "--kill-child",
                    sys.executable,
                    "-c",
                    f"import ctypes{FURNISH}{moved}",
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def send(self, frame: frames.Frame, descriptors: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.channel, [frames.encode(frame)], list(descriptors))

    def receive(self) -> frames.Frame | None:
        raw = self.channel.recv(frames.FRAME_BYTES_MAX)
        return frames.decode(raw) if raw else None

    def run(self, number: int, *argv: str, directory: bytes = b".") -> int:
        """Send a RUN; the reading end of the command's output."""
        reader, writer = os.pipe()
        with open("/dev/null", "rb") as null:
            words = tuple(word.encode() for word in argv)
            run = frames.Run(number, directory, words, (b"A=b",), PATH)
            self.send(run, (null.fileno(), writer, writer))
        os.close(writer)
        return reader

    def output_of(self, number: int, script: str) -> str:
        """Run a shell script to its end."""
        reader = self.run(number, "sh", "-c", script)
        assert self.receive() == frames.Started(number)
        with open(reader) as file:
            text = file.read()
        assert isinstance(self.receive(), frames.Exited)
        assert self.receive() == frames.Quiet(number)
        return text


@pytest.fixture
def guest() -> Iterator[Guest]:
    with ExitStack() as held:
        if not WORKSPACE.exists():
            WORKSPACE.mkdir()
            held.callback(WORKSPACE.rmdir)
        one = Guest()
        held.callback(one.channel.close)
        held.callback(one.process.wait)
        held.callback(one.process.kill)
        assert one.receive() == frames.Ready()
        one.send(frames.Filter(ALLOW_ALL))
        one.send(frames.Limit(64))
        yield one


def test_a_command_is_started_ends_and_leaves_nothing_in_this_order(guest: Guest) -> None:
    os.close(guest.run(1, "sh", "-c", "exit 3"))
    assert guest.receive() == frames.Started(1)
    assert guest.receive() == frames.Exited(1, 3 << 8)
    assert guest.receive() == frames.Quiet(1)


def test_a_signal_of_its_own_is_in_the_wait_status(guest: Guest) -> None:
    os.close(guest.run(1, "sh", "-c", "kill -TERM $$"))
    assert guest.receive() == frames.Started(1)
    assert guest.receive() == frames.Exited(1, 15)


def test_what_escaped_its_session_and_its_parent_is_killed_with_the_command(guest: Guest) -> None:
    script = "setsid sleep 100 & (sleep 200 &) ; (setsid sh -c 'sleep 300 & sleep 300' &) ; exit 0"
    reader = guest.run(1, "sh", "-c", script)
    assert guest.receive() == frames.Started(1)
    assert guest.receive() == frames.Exited(1, 0)
    assert guest.receive() == frames.Quiet(1)
    with open(reader, "rb") as file:
        assert file.read() == b""  # the end of file: nobody holds the pipe any more


# However long it takes until the kill comes: at the limit of processes it goes on as soon as one
# has ended.
FORKING = """
import os, time
while True:
    try:
        if os.fork() == 0:
            os.write(1, b".")
            time.sleep(0.05)
            os._exit(0)
    except BlockingIOError:
        os.wait()
"""


def test_a_kill_ends_the_whole_tree_also_while_it_forks(guest: Guest) -> None:
    reader = guest.run(1, sys.executable, "-c", FORKING)
    assert guest.receive() == frames.Started(1)
    assert os.read(reader, 1)
    guest.send(frames.Kill(1))
    assert guest.receive() == frames.Exited(1, 9)
    assert guest.receive() == frames.Quiet(1)
    with open(reader, "rb") as file:
        file.read()
    assert guest.output_of(2, "echo on") == "on\n"


def test_a_kill_for_a_command_that_has_ended_touches_nothing(guest: Guest) -> None:
    assert guest.output_of(1, "true") == ""
    guest.send(frames.Kill(1))
    assert guest.output_of(2, "echo on") == "on\n"


def test_a_command_is_the_workload_without_any_power(guest: Guest) -> None:
    text = guest.output_of(
        1, "id -u; id -g; id -G; umask; env; cat /proc/self/status; ls /proc/self/fd"
    )
    lines = text.splitlines()
    assert lines[:4] == ["10001", "10001", "10001", "0022"]
    assert [line for line in lines if line.startswith(("A=", "PATH="))] == ["A=b"]
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert lines[-4:] == ["0", "1", "2", "3"]  # the last is the directory that ls reads


def test_the_process_limit_is_the_last_that_was_told(guest: Guest) -> None:
    guest.send(frames.Limit(7))
    assert guest.output_of(1, "ulimit -p") == "6\n"  # besides the command's own
    guest.send(frames.Limit(9))
    assert guest.output_of(2, "ulimit -p") == "8\n"


@pytest.mark.parametrize(
    ("program", "directory", "failure"),
    [
        ("/nonexistent", b".", frames.RunFailed(1, 2, "execute")),
        ("nonexistent", b".", frames.RunFailed(1, 2, "execute")),
        ("/etc/passwd", b".", frames.RunFailed(1, 13, "execute")),
        ("", b".", frames.RunFailed(1, 22, "program_name")),
        ("bin/true", b".", frames.RunFailed(1, 22, "program_name")),
        ("true", b"missing", frames.RunFailed(1, 2, "enter_the_working_directory")),
        ("true", b"/tmp", frames.RunFailed(1, 22, "enter_the_working_directory")),
        ("true", b"../etc", frames.RunFailed(1, 18, "enter_the_working_directory")),
    ],
)
def test_what_cannot_be_started_is_refused_by_its_step(
    guest: Guest, program: str, directory: bytes, failure: frames.RunFailed
) -> None:
    os.close(guest.run(1, program, directory=directory))
    assert guest.receive() == failure
    assert guest.output_of(2, "echo on") == "on\n"


def test_a_script_without_its_interpreter_is_told_apart(guest: Guest) -> None:
    script = WORKSPACE / "script"
    script.write_text("#!/nonexistent/sh\n")
    script.chmod(0o755)
    try:
        os.close(guest.run(1, str(script)))
        assert guest.receive() == frames.RunFailed(1, 2, "interpreter")
    finally:
        script.unlink()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\0\0\0\1",
        b"\2\0\0\0\1",
        b"\2\0\0\0\1\0\0\0\0",
        b"\2\0\0\0\1\0\1\0\0.\0",
        b"\2\0\0\0\1\0\1\0\0.\0/\0true",
        b"\x08\0\0\0\1x",
        b"\x0a\0\0\0\0",
        b"\x0b\0\0\0\0",
        b"\x0b\0\0\0\0" + ALLOW_ALL,  # a second filter
        b"\x14\0\0\0\2",
        b"\x14\0\0\0\0",  # a port given up that was never bound
        b"\x14\0\0\0\1x",
        b"\x15\0\0\0\1",  # a door without its sockets
    ],
)
def test_a_frame_that_is_none_ends_process_1(guest: Guest, raw: bytes) -> None:
    if raw:
        guest.channel.send(raw)
    else:
        guest.channel.shutdown(socket.SHUT_WR)
    guest.process.wait(SECONDS)
    assert guest.receive() is None


def test_a_command_without_three_descriptors_ends_process_1(guest: Guest) -> None:
    guest.send(frames.Run(1, b".", (b"true",), (), PATH))
    guest.process.wait(SECONDS)


def test_no_command_runs_before_a_filter_was_given() -> None:
    one = Guest()
    try:
        assert one.receive() == frames.Ready()
        one.send(frames.Limit(64))
        os.close(one.run(1, "true"))
        failed = one.receive()
        assert isinstance(failed, frames.RunFailed)
        assert failed.step in ("confine_system_calls", "enter_the_working_directory")
    finally:
        one.process.kill()
        one.process.wait()
        one.channel.close()
