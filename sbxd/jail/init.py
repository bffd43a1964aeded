"""Process 1 of an environment, once it is built: it makes commands, reaps, and reports.

Invariants: it is single-threaded and never blocks on anything but its poll; a child that does not
answer cannot delay another. It holds no descriptor of a command after RUN. For every number that
PARK named it sends exactly one of FAILED and EXITED, or the channel ends first. A frame that does
not parse, or comes with the wrong descriptors, or names a number out of order, ends init and with
it the environment: the daemon is the only sender, so such a frame means that something is broken.

STARTED means that the error pipe closed without a word: the exec happened, or a kill came first,
in which case EXITED says so.

Deliberately absent: any judgement of why a command ended.
"""

import errno
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from sbxd.jail import frames, syscalls
from sbxd.jail.handshake import DEADLINE_SECONDS, Gate
from sbxd.jail.workload import PARKED

CHILDREN_MAX = 16
_REPORT_BYTES_MAX = 256
_DESCRIPTORS_MAX = 8  # more than any frame carries, so that a surplus is seen and closed


class Broken(Exception):
    """The channel ended or broke the rules; init exits."""


class State(Enum):
    PARKING = auto()
    PARKED = auto()
    RELEASED = auto()


@dataclass
class Child:
    """One process made by PARK, until it is reaped."""

    number: int
    pid: int
    command: Gate
    error_fd: int
    state: State = State.PARKING
    failure: tuple[str, int] | None = None
    error_open: bool = True
    command_polled: bool = True


# Makes the process of a command in the leaf; answers its pid, our end of its command channel and
# the reading end of its error pipe.
Spawn = Callable[[int], tuple[int, Gate, int]]


class Init:
    """The server on one channel. It owns the channel and every child."""

    def __init__(self, channel: socket.socket, spawn: Spawn) -> None:
        self._channel = channel
        self._spawn = spawn
        self._children: dict[int, Child] = {}  # by pid
        self._last_number = -1
        self._lost: int | None = None  # parked, reported as failed, maybe with a RUN on its way
        self._poll = select.poll()

    def serve(self) -> None:
        """Serve until the channel ends or breaks the rules; raises Broken then."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        reaper = syscalls.signalfd([signal.SIGCHLD])
        self._poll.register(self._channel, select.POLLIN)
        self._poll.register(reaper, select.POLLIN)
        self._send(frames.Ready())
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            for child in list(self._children.values()):
                if child.error_open and child.error_fd in ready:
                    self._read_error(child)
                if child.command_polled and child.command.fileno() in ready:
                    self._read_parked(child)
            if reaper in ready:
                os.read(reaper, 4096)
                self._reap()
            if self._channel.fileno() in ready:
                self._receive()

    # frames ---------------------------------------------------------------------------------

    def _receive(self) -> None:
        raw, descriptors, flags, _ = socket.recv_fds(
            self._channel, frames.FRAME_BYTES_MAX, _DESCRIPTORS_MAX
        )
        try:
            if not raw:
                raise Broken("the channel ended")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Broken("a frame was cut")
            match frames.decode(raw):
                case frames.Park(number=number) if len(descriptors) == 1:
                    self._park(number, descriptors[0])
                case frames.Run(number=number) if len(descriptors) == frames.run_descriptors(
                    number
                ):
                    self._run(number, raw, tuple(descriptors))
                case _:
                    raise Broken("not a frame for init, or with the wrong descriptors")
        except frames.FrameError as problem:
            raise Broken(str(problem)) from problem
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _park(self, number: int, leaf_fd: int) -> None:
        if number <= self._last_number:
            raise Broken("numbers must rise")
        self._last_number = number
        self._lost = None
        waiting = any(child.state is not State.RELEASED for child in self._children.values())
        if waiting or len(self._children) >= CHILDREN_MAX:
            self._lost = number
            self._send(frames.RunFailed(number, errno.EBUSY, "park"))
            return
        try:
            pid, command, error_fd = self._spawn(leaf_fd)
        except OSError as problem:
            self._lost = number
            self._send(frames.RunFailed(number, problem.errno or 0, "park"))
            return
        self._children[pid] = Child(number, pid, command, error_fd)
        self._poll.register(command, select.POLLIN)
        self._poll.register(error_fd, select.POLLIN)

    def _run(self, number: int, raw: bytes, streams: tuple[int, ...]) -> None:
        for child in self._children.values():
            if child.number == number and child.state is not State.RELEASED:
                break
        else:
            if number != self._lost:
                raise Broken("RUN for a number that does not wait")
            self._lost = None
            return
        self._stop_polling_command(child)
        child.state = State.RELEASED
        try:
            child.command.send(raw, streams)
        except OSError as problem:  # it died meanwhile, or dies of the end of file
            child.failure = child.failure or ("release", problem.errno or 0)
            child.command.close()

    # children -------------------------------------------------------------------------------

    def _stop_polling_command(self, child: Child) -> None:
        if child.command_polled:
            self._poll.unregister(child.command)
            child.command_polled = False

    def _read_parked(self, child: Child) -> None:
        self._stop_polling_command(child)
        try:
            message, _ = child.command.receive()
        except OSError:
            return  # it died; the reaper finds it
        if message == PARKED:
            child.state = State.PARKED
            self._send(frames.Parked(child.number))

    def _read_error(self, child: Child) -> None:
        try:
            report = os.read(child.error_fd, _REPORT_BYTES_MAX)
        except BlockingIOError:  # only if a process of ours outlived its parent: then it is silent
            report = b""
        self._poll.unregister(child.error_fd)
        os.close(child.error_fd)
        child.error_open = False
        if report and child.failure is None:
            step, _, number = report.decode("ascii", "replace").partition("\0")
            child.failure = (step, int(number) if number.isdecimal() else 0)
        elif child.state is State.RELEASED and child.failure is None:
            self._send(frames.Started(child.number))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                self._bury(child, status)

    def _bury(self, child: Child, status: int) -> None:
        if child.error_open:
            self._read_error(child)
        self._stop_polling_command(child)
        child.command.close()
        if child.state is not State.RELEASED:
            self._lost = child.number
            child.failure = child.failure or ("park", errno.ESRCH)
        if child.failure is not None:
            step, number = child.failure
            self._send(frames.RunFailed(child.number, number, step))
        else:
            self._send(frames.Exited(child.number, status))

    def _send(self, frame: frames.Frame) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLOUT)
        if not poll.poll(DEADLINE_SECONDS * 1000):
            raise Broken("the daemon does not read")
        try:
            self._channel.send(frames.encode(frame), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError as problem:
            raise Broken(str(problem)) from problem
