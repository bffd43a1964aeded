"""The daemon's end of process 1 of a sandbox with a kernel of its own.

It speaks the frames of an init on the host, and three more: the daemon asks it to kill, it says
when nothing is left, and it is told how many processes a command may have.

Invariants: as of `sbxd.mechanism.init_client`; a guest that says more than it was asked is broken,
so that a hostile one cannot keep the daemon busy with words; its word that nothing is left is
believed no longer than the guest's kernel lives, and whoever does not want to wait for it kills
that kernel.
"""

import socket
from collections.abc import Callable

import trio

from sbxd.jail import frames
from sbxd.mechanism.init_client import InitClient, Number
from sbxd.mechanism.protocol import SandboxLost

FRAMES_PER_COMMAND = 3  # STARTED, EXITED, QUIET


class GuestClient(InitClient):
    """One channel. Its methods may be awaited concurrently."""

    def __init__(self, sock: trio.socket.SocketType, on_lost: Callable[[], None]) -> None:
        super().__init__(sock, on_lost)
        self._quiet: dict[int, trio.Event] = {}
        self._was_quiet: set[int] = set()
        self._frames_left = 0

    def expect(self, number: int) -> Number:
        """Begin to listen to what the guest says of this number."""
        self._frames_left += FRAMES_PER_COMMAND
        return super().expect(number)

    async def limit(self, processes_max: int) -> None:
        """How many processes a command may have from now on. Raises SandboxLost."""
        await self._send(frames.Limit(processes_max), [])

    def kill_nowait(self, number: int) -> bool:
        """Ask for the end of every process; False when it cannot be asked now. Not asked is a guest
        that has told the exit: it kills the rest by itself, and says QUIET unasked."""
        if self.is_lost:
            return False
        state = self._numbers.get(number)
        if state is not None and state.wait_status is not None:
            return True
        try:
            raw = frames.encode(frames.Kill(number))
            sent = self._socket.fileno() >= 0 and _send_nowait(self._socket, raw)
        except OSError:
            return False
        return sent

    async def wait_quiet(self, number: int) -> None:
        """Until nothing is left of this command. Raises SandboxLost when the guest ended first."""
        await self._quiet.setdefault(number, trio.Event()).wait()
        if number not in self._was_quiet:
            raise SandboxLost("init", 0, "the sandbox ended")

    def forget(self, number: int) -> None:
        """Nobody asks for this number any more."""
        super().forget(number)
        self._quiet.pop(number, None)
        self._was_quiet.discard(number)

    def lose(self) -> None:
        """The guest is gone: wake everybody. Idempotent."""
        for event in self._quiet.values():
            event.set()
        super().lose()

    def _deliver(self, raw: bytes) -> bool:
        try:
            frame = frames.decode(raw)
        except frames.FrameError:
            return False
        self._frames_left -= 1
        if self._frames_left < 0:
            return False
        if not isinstance(frame, frames.Quiet):
            return super()._deliver(raw)
        if frame.number in self._numbers:
            self._was_quiet.add(frame.number)
            self._quiet.setdefault(frame.number, trio.Event()).set()
        return True


def _send_nowait(sock: trio.socket.SocketType, raw: bytes) -> bool:
    """One message, now or never."""
    flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
    borrowed = socket.socket(fileno=sock.fileno())
    try:
        return borrowed.send(raw, flags) == len(raw)
    except BlockingIOError:
        return False
    finally:
        borrowed.detach()
