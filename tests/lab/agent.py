"""Runs inside a lane: starts commands that arrive on one stream and sends back what they print.

Usage: agent.py unix:PATH | tty:DEVICE | port:DEVICE. Each command lives in a cgroup of its own
below this service's (which is delegated), so that the end of a command is the end of everything
it started.

Invariants: single-threaded; no command's output is held back for another's; the exit status is
that of the command itself; nothing of a command outlives its EXIT frame (what must, is started
with systemd-run).
"""

import fcntl
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import termios
import time
import tty
from pathlib import Path

try:
    from .channel import Decoder, Frame, Kind
except ImportError:  # run as a file by the lane's own interpreter
    from channel import Decoder, Frame, Kind  # type: ignore[import-not-found,no-redef]

_CHUNK = 65536
_DRAIN_SECONDS = 2.0


class Command:
    """One running command and the descriptors it is read and written through."""

    def __init__(self, number: int, request: dict[str, object], group: Path) -> None:
        self.number = number
        self.group = group
        self.terminal = -1
        self.exited_at: float | None = None
        group.mkdir()
        procs = os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        argv = [str(word) for word in _list(request["argv"])]
        environment = {str(k): str(v) for k, v in _dict(request["environment"]).items()}
        try:
            if request["terminal"]:
                self._start_on_terminal(argv, str(request["directory"]), environment, procs)
            else:
                self._start_on_pipes(argv, str(request["directory"]), environment, procs)
        except BaseException:
            group.rmdir()
            raise
        finally:
            os.close(procs)
        self.pidfd = os.pidfd_open(self.process.pid)

    def _start_on_pipes(
        self, argv: list[str], directory: str, environment: dict[str, str], procs: int
    ) -> None:
        self.process = subprocess.Popen(
            argv,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=lambda: os.write(procs, b"0"),
        )
        assert self.process.stdout
        assert self.process.stderr
        self.outputs = {
            self.process.stdout.fileno(): Kind.STDOUT,
            self.process.stderr.fileno(): Kind.STDERR,
        }

    def _start_on_terminal(
        self, argv: list[str], directory: str, environment: dict[str, str], procs: int
    ) -> None:
        self.terminal, slave = os.openpty()

        def prepare() -> None:
            os.write(procs, b"0")
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            argv,
            cwd=directory,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=prepare,
        )
        os.close(slave)
        self.outputs = {self.terminal: Kind.STDOUT}

    def type(self, data: bytes) -> None:
        """Hand on what a person typed."""
        if self.terminal >= 0:
            os.write(self.terminal, data)

    def resize(self, rows: int, columns: int) -> None:
        if self.terminal >= 0:
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def kill_all(self) -> None:
        (self.group / "cgroup.kill").write_text("1")

    def close(self) -> None:
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()
        if self.terminal >= 0:
            os.close(self.terminal)
        os.close(self.pidfd)
        # A killed process leaves its cgroup only when it is reaped.
        for _ in range(500):
            try:
                remove_groups(self.group)
                return
            except OSError:
                time.sleep(0.01)


class Agent:
    """The loop: one stream to the keeper, any number of commands."""

    def __init__(self, stream: int, base: Path) -> None:
        self.stream = stream
        self.base = base
        self.selector = selectors.DefaultSelector()
        self.decoder = Decoder()
        self.commands: dict[int, Command] = {}

    def send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        data = memoryview(Frame(kind, number, payload).encode())
        while data:
            data = data[os.write(self.stream, data) :]

    def serve(self) -> None:
        self.selector.register(self.stream, selectors.EVENT_READ, None)
        self.send(Kind.HELLO, 0)
        while True:
            late = [c for c in self.commands.values() if c.exited_at is not None]
            for key, _ in self.selector.select(0.1 if late else None):
                if key.data is None:
                    data = os.read(self.stream, _CHUNK)
                    if not data:
                        return
                    for frame in self.decoder.feed(data):
                        self.handle(frame)
                    continue
                command = key.data
                if key.fd == command.pidfd:
                    self.selector.unregister(key.fd)
                    command.exited_at = time.monotonic()
                    command.process.wait()
                    command.kill_all()  # what it left would hold its pipes open
                elif key.fd in command.outputs:
                    self.forward(command, key.fd)
            for command in list(self.commands.values()):
                if command.exited_at is not None and (
                    not command.outputs or time.monotonic() > command.exited_at + _DRAIN_SECONDS
                ):
                    self.finish(command)

    def forward(self, command: Command, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK)
        except OSError:  # a terminal whose last user is gone
            data = b""
        if data:
            self.send(command.outputs[fd], command.number, data)
        else:
            self.selector.unregister(fd)
            del command.outputs[fd]

    def finish(self, command: Command) -> None:
        for fd in list(command.outputs):
            self.selector.unregister(fd)
        del self.commands[command.number]
        status = command.process.returncode
        command.close()
        status = 128 - status if status < 0 else status
        self.send(Kind.EXIT, command.number, json.dumps({"status": status}).encode())

    def handle(self, frame: Frame) -> None:
        command = self.commands.get(frame.command)
        match frame.kind:
            case Kind.RUN:
                self.start(frame)
            case Kind.STDIN if command:
                command.type(frame.payload)
            case Kind.RESIZE if command:
                size = json.loads(frame.payload)
                command.resize(int(size["rows"]), int(size["columns"]))
            case Kind.KILL if command:
                command.kill_all()
            case _:
                pass  # for a command that has just ended

    def start(self, frame: Frame) -> None:
        try:
            request = json.loads(frame.payload)
            command = Command(frame.command, request, self.base / f"command-{frame.command}")
        except (OSError, ValueError, KeyError) as error:
            self.send(Kind.REFUSED, frame.command, json.dumps({"reason": str(error)}).encode())
            return
        self.commands[frame.command] = command
        for fd in (command.pidfd, *command.outputs):
            self.selector.register(fd, selectors.EVENT_READ, command)


def remove_groups(top: Path) -> None:
    """Remove a cgroup and those below it; OSError while one has processes."""
    for folder, _, _ in os.walk(top, topdown=False):
        os.rmdir(folder)


def own_group() -> Path:
    """This service's cgroup, out of which the agent has moved into a leaf of its own."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    unified = next(line[3:] for line in lines if line.startswith("0::"))
    base = Path("/sys/fs/cgroup") / unified.lstrip("/")
    leaf = base / "agent"
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text("0")
    return base


def open_stream(address: str) -> int:
    """Connect to the keeper: a Unix socket, a serial line set to pass every byte, or a port."""
    scheme, _, path = address.partition(":")
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        return connection.detach()
    fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    if scheme == "tty":
        tty.setraw(fd)
    return fd


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError("a list was expected")
    return value


def _dict(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise ValueError("an object was expected")
    return value


if __name__ == "__main__":
    Agent(open_stream(sys.argv[1]), own_group()).serve()
