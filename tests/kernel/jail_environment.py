"""The daemon's part in the jail's tests: one environment built by `jail_host`, and its channels."""

import errno
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sbxd.jail import frames
from sbxd.jail.frames import Exited, Frame, Park, Parked, Ready, Run, RunFailed, Started

HOST = Path(__file__).with_name("jail_host.py")
WAIT_SECONDS = 30
SEARCH_PATH = b"/usr/local/bin:/usr/bin:/bin"
ENVIRONMENT = (b"PATH=" + SEARCH_PATH, b"HOME=/workspace", b"LANG=C.UTF-8")
BASE = 1_900_000_000
PERSONALITY = 135 if os.uname().machine == "x86_64" else 92


def filter_refusing(number: int, code: int = errno.EXDEV) -> bytes:
    """A seccomp program that allows all but one system call, which gets this errno."""
    return b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the number
            (0x15, 0, 1, number),
            (0x06, 0, 0, 0x0005_0000 | code),
            (0x06, 0, 0, 0x7FFF_0000),
        )
    )


SETTINGS: Mapping[str, Any] = {
    "base": BASE,
    "workspace_bytes": 16 << 20,
    "tmp_bytes": 4 << 20,
    "shm_bytes": 2 << 20,
    "rlimits": {
        "CORE": [0, 0],
        "NOFILE": [256, 256],
        "MEMLOCK": [65536, 65536],
        "MSGQUEUE": [0, 0],
        "RTPRIO": [0, 0],
        "NICE": [0, 0],
    },
    "seccomp_workload": filter_refusing(PERSONALITY, errno.EXDEV).hex(),
    "seccomp_init": filter_refusing(1023).hex(),
    "seccomp_steward": filter_refusing(PERSONALITY, errno.EXDEV).hex(),
    "apparmor_label": None,
    "landlock_version": 0,
    "proxy_port": None,
    "image": "read-only",
    "maps": "write",
    "cgroup_namespace": "box",
    "steward": "probe",
}


Numbered = Parked | Started | RunFailed | Exited


class Finished(NamedTuple):
    """One command that was let go: init's frames about it, and its output."""

    frames: list[Numbered]
    stdout: bytes
    stderr: bytes

    @property
    def status(self) -> int:
        """The exit code; negative for the signal that ended it."""
        last = self.frames[-1]
        assert isinstance(last, Exited), (last, self.stderr)
        return os.waitstatus_to_exitcode(last.wait_status)

    @property
    def failure(self) -> tuple[str, int]:
        (only,) = self.frames
        assert isinstance(only, RunFailed), (self.frames, self.stderr)
        return only.step, only.errno

    def finished_well(self) -> "Finished":
        assert self.status == 0, self.stderr.decode()
        return self

    def json(self) -> Any:
        return json.loads(self.finished_well().stdout)


class LaunchFailed(Exception):
    """`launch` raised; carries what the host reported."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report)
        self.report = report


class Environment:
    """A built environment; every wait on it is bounded."""

    def __init__(
        self,
        control: socket.socket,
        init: socket.socket,
        steward: socket.socket,
    ) -> None:
        self.control, self.init, self.steward_channel = control, init, steward
        for end in (control, init, steward):
            end.settimeout(WAIT_SECONDS)
        raw, descriptors, _, _ = socket.recv_fds(control, 65536, 3)
        self.facts: dict[str, Any] = json.loads(raw)
        if not descriptors:
            raise LaunchFailed(self.facts)
        self.pidfds = descriptors[:2]
        self.bridge = socket.socket(fileno=descriptors[2])
        self.bridge.settimeout(WAIT_SECONDS)
        self.number = 0
        self.backlog: list[Numbered] = []
        self.python = os.path.realpath(shutil.which("python3", path="/usr/bin") or "")

    def receive(self) -> Frame:
        raw = self.init.recv(frames.FRAME_BYTES_MAX)
        assert raw, "init is gone"
        return frames.decode(raw)

    def receive_about(self, number: int) -> Numbered:
        """The next frame about this number; others are kept for who asks for them."""
        for frame in self.backlog:
            if frame.number == number:
                self.backlog.remove(frame)
                return frame
        while True:
            frame_now = self.receive()
            assert isinstance(frame_now, Numbered), frame_now
            if frame_now.number == number:
                return frame_now
            self.backlog.append(frame_now)

    def send(self, frame: Frame, *descriptors: int) -> None:
        socket.send_fds(self.init, [frames.encode(frame)], descriptors)

    def leaf(self) -> int:
        self.control.send(b"leaf")
        _, (descriptor,), _, _ = socket.recv_fds(self.control, 64, 1)
        return descriptor

    def write_box(self, name: str, text: str) -> str:
        """Write a file below the box; answers the number of characters or the failure."""
        self.control.send(f"write {name} {text}".encode())
        return self.control.recv(4096).decode()

    def read_box(self, name: str) -> str:
        """A file below the box."""
        self.control.send(f"read {name}".encode())
        return self.control.recv(4096).decode()

    def pids(self, number: int) -> list[int]:
        """The processes of a leaf, as the host numbers them."""
        return [int(word) for word in self.read_box(f"exec-{number}/cgroup.procs").split()]

    def kill(self, number: int) -> None:
        """Kill a leaf."""
        assert self.write_box(f"exec-{number}/cgroup.kill", "1") == "1"

    def park(self) -> int:
        """Park one process and wait for it; answers its number."""
        self.number += 1
        descriptor = self.leaf()
        self.send(Park(self.number), descriptor)
        os.close(descriptor)
        answer = self.receive_about(self.number)
        assert answer == Parked(self.number), answer
        return self.number

    def release(self, number: int, *argv: str | bytes, **more: Any) -> "Running":
        """Hand a command to the parked process."""
        return Running(self, number, tuple(os.fsencode(word) for word in argv), **more)

    def run(self, *argv: str | bytes, **more: Any) -> Finished:
        """Park, run, and wait for the end."""
        return self.release(self.park(), *argv, **more).finish()

    def script(self, source: str, **more: Any) -> Finished:
        """Run a Python program."""
        return self.run(self.python, "-c", textwrap.dedent(source), **more)

    def steward(self, source: str) -> Any:
        """Run a program inside the steward; answers its `answer`."""
        self.steward_channel.send(textwrap.dedent(source).encode())
        return json.loads(self.steward_channel.recv(65536))

    def procfs(self, process: str, name: str) -> str:
        """A file of init's or the steward's, as the host sees it."""
        return Path(f"/proc/{self.facts[process]}/{name}").read_text()

    def status(self, process: str) -> dict[str, str]:
        """/proc/PID/status of init or the steward."""
        lines = self.procfs(process, "status").splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def init_ended(self, seconds: float = WAIT_SECONDS) -> bool:
        """Whether init ends within this time."""
        return _readable(self.pidfds[0], seconds)

    def steward_ended(self, seconds: float = WAIT_SECONDS) -> bool:
        """Whether the steward ends within this time."""
        return _readable(self.pidfds[1], seconds)


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Running:
    """A command that was released."""

    def __init__(
        self,
        environment: Environment,
        number: int,
        argv: tuple[bytes, ...],
        *,
        cwd: bytes = b".",
        env: tuple[bytes, ...] = ENVIRONMENT,
        search_path: bytes = SEARCH_PATH,
        stdin: bytes = b"",
    ) -> None:
        self.environment, self.number = environment, number
        reading, writing = os.pipe()
        os.write(writing, stdin)
        os.close(writing)
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        os.fchmod(reading, 0o644)  # so that /dev/stdin and its like can be opened by name
        os.fchmod(out, 0o622)
        os.fchmod(err, 0o622)
        environment.send(Run(number, cwd, argv, env, search_path), reading, out, err)
        for descriptor in (reading, out, err):
            os.close(descriptor)

    def finish(self) -> Finished:
        """Init's frames about it up to the last, and all output."""
        seen: list[Numbered] = []
        while not (seen and isinstance(seen[-1], Exited | RunFailed)):
            seen.append(self.environment.receive_about(self.number))
        if isinstance(seen[-1], Exited):
            # A RUN that follows its PARK at once may overtake the word that the process waits.
            first = next(frame for frame in seen if not isinstance(frame, Parked))
            assert first == Started(self.number)
        return Finished(seen, self._drain(self.out), self._drain(self.err))

    def read(self, size: int = 65536) -> bytes:
        """What stdout has next; waits for it."""
        poll = select.poll()
        poll.register(self.out, select.POLLIN)
        assert poll.poll(WAIT_SECONDS * 1000), "no output came"
        return os.read(self.out, size)

    @staticmethod
    def _drain(descriptor: int) -> bytes:
        whole = b""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while poll.poll(WAIT_SECONDS * 1000):
            piece = os.read(descriptor, 65536)
            whole += piece
            if not piece:
                os.close(descriptor)
                return whole
        raise AssertionError("the pipe stays open")


@contextmanager
def environment(**changes: Any) -> Iterator[Environment]:
    """Build an environment and remove it. Raises LaunchFailed."""
    settings = {**SETTINGS, **changes}
    packets, stream = socket.SOCK_SEQPACKET, socket.SOCK_STREAM
    kinds = (packets, packets, stream if settings["steward"] == "server" else packets)
    pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in kinds]
    theirs = [theirs.fileno() for _, theirs in pairs]
    # The host must find its descriptors at 3, 4 and 5, and its parent's death must end it.
    process = subprocess.Popen(
        [
            sys.executable,
            "-X",
            "faulthandler",
            "-c",
            _LIFT,
            str(HOST),
            json.dumps(settings),
            *map(str, theirs),
        ],
        pass_fds=theirs,
    )
    for _, end in pairs:
        end.close()
    ours = [end for end, _ in pairs]
    built: Environment | None = None
    try:
        built = Environment(*ours)
        assert built.receive() == Ready()
        yield built
    finally:
        if built is not None:
            ours[0].send(b"end")
        for end in ours:
            end.close()
        if built is not None:
            built.bridge.close()
        for pidfd in built.pidfds if built else ():
            os.close(pidfd)
        try:
            process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise
        assert process.returncode == 0


_LIFT = """
import os, sys
script, settings, *numbers = sys.argv[1:]
high = [os.dup(int(number)) for number in numbers]
for target, descriptor in enumerate([os.dup2(d, 100 + i) for i, d in enumerate(high)], 3):
    os.dup2(descriptor, target, inheritable=True)
os.closerange(6, 200)
os.execv(sys.executable, [sys.executable, script, settings])
"""
