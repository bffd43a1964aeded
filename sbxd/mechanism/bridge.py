"""The bridge's socket of one `namespaces` environment, from the daemon's side.

The socket was bound by init, in the environment's own /dev, so it is reached from there alone; the
daemon listens on the descriptor that came with the slot. Closing the descriptor, of which no other
copy exists, is what makes the kernel refuse.

A program may send descriptors along (SCM_RIGHTS). None is ever installed here, but the kernel
closes them in whoever receives, or closes, what they came with; and the close of a lingering TCP
socket takes as long as its owner has set it to. So whatever may do that, which is every receive and
every close of a socket that a program could write to, happens in threads: a few for each door, and
no new door is opened once too many old ones are stuck. (Where the kernel has SO_PASSRIGHTS, from
6.16 on, init has turned it off, and the sender is refused.)

Invariants: the event loop neither receives from nor closes a connection; what a hostile program
can block is its own door.
"""

import errno
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import trio

from sbxd.mechanism.protocol import BridgeStreamBroken, MechanismError

CHUNK_BYTES = 64 * 1024
RECEIVERS_MAX = 4  # threads of one door that receive at a time; one more closes
STUCK_DOORS_MAX = 32
# What accept(2) says of a connection that is gone already.
_AGAIN = (errno.ECONNABORTED, errno.EPROTO)


class Door(Protocol):
    """What is counted of a door."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def is_done(self) -> bool:
        """Whether no thread of it is left."""
        ...


DoorT = TypeVar("DoorT", bound=Door)


class BridgeDoors:
    """All doors of one daemon, as far as their threads are not done."""

    def __init__(self, *, stuck_max: int = STUCK_DOORS_MAX) -> None:
        self._stuck_max = stuck_max
        self._doors: list[Door] = []

    def open(self, descriptor: int, *, waiting_max: int) -> "SocketBridgeDoor":
        """Listen on a bound socket, which the door then owns. Raises MechanismError: EBUSY when
        too many closed doors are not done."""
        return self.add(lambda: SocketBridgeDoor(descriptor, waiting_max=waiting_max))

    def add(self, make: Callable[[], DoorT]) -> DoorT:
        """Make a door. Raises MechanismError: as `open`."""
        self._doors = [door for door in self._doors if not (door.is_closed and door.is_done)]
        if sum(door.is_closed for door in self._doors) >= self._stuck_max:
            raise MechanismError("open the bridge", errno.EBUSY)
        door = make()
        self._doors.append(door)
        return door


class Closer:
    """Closes sockets one after the other, in a thread."""

    def __init__(self) -> None:
        self._waiting: deque[socket.socket] = deque()
        self._token = trio.lowlevel.current_trio_token()
        self.is_busy = False
        self.idle = trio.Event()

    def close(self, end: socket.socket) -> None:
        trio.lowlevel.notify_closing(end)
        self._waiting.append(end)
        self._start()

    def _start(self) -> None:
        if self._waiting and not self.is_busy:
            self.is_busy = True
            if self.idle.is_set():
                self.idle = trio.Event()
            trio.lowlevel.start_thread_soon(self._close_all, self._in_thread_done)

    def _close_all(self) -> None:
        while self._waiting:
            self._waiting.popleft().close()

    def _in_thread_done(self, _outcome: Any) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._done)

    def _done(self) -> None:
        self.is_busy = False
        self._start()
        if not self.is_busy:
            self.idle.set()


class SocketBridgeStream:
    """Implements sbxd.mechanism.protocol.BridgeStream."""

    def __init__(self, end: socket.socket, receivers: trio.CapacityLimiter, closer: Closer) -> None:
        end.setblocking(False)
        self._end = end
        self._receivers = receivers
        self._closer = closer
        self._closed = False

    async def receive(self) -> bytes:
        """Next bytes; b"" at the end."""
        receive = partial(self._end.recv, CHUNK_BYTES)
        while not self._closed:
            try:
                await trio.lowlevel.wait_readable(self._end)
                return await trio.to_thread.run_sync(
                    receive, abandon_on_cancel=True, limiter=self._receivers
                )
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                return b""
        return b""

    async def send(self, data: bytes) -> None:
        """All of it. Raises BridgeStreamBroken."""
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        while view:
            if self._closed:
                raise BridgeStreamBroken
            try:
                view = view[self._end.send(view, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_writable(self._end)
            except OSError:
                raise BridgeStreamBroken from None

    def end(self) -> None:
        """The end of our direction."""
        if not self._closed:
            with suppress(OSError):  # it is gone: there is nobody to tell
                self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End both directions."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)
            self._closer.close(self._end)


class SocketBridgeDoor:
    """Implements sbxd.mechanism.protocol.BridgeDoor. Made by BridgeDoors."""

    def __init__(self, descriptor: int, *, waiting_max: int) -> None:
        listener = socket.socket(fileno=descriptor)
        try:
            listener.listen(waiting_max)
        except OSError as problem:
            listener.detach()
            raise MechanismError("listen on the bridge", problem.errno or 0) from None
        listener.setblocking(False)
        self._listener = listener
        self._receivers = trio.CapacityLimiter(RECEIVERS_MAX)
        self._closer = Closer()
        self.is_closed = False

    @property
    def is_done(self) -> bool:
        """Whether no thread of it is left."""
        return not self._closer.is_busy and self._receivers.borrowed_tokens == 0

    async def wait_closed(self) -> None:
        """Until what was closed here is closed in the kernel too."""
        if self._closer.is_busy:
            await self._closer.idle.wait()

    async def accept(self) -> SocketBridgeStream:
        """The next connection. Raises MechanismError."""
        await trio.lowlevel.checkpoint()
        while not self.is_closed:
            try:
                end, _ = self._listener.accept()
                return SocketBridgeStream(end, self._receivers, self._closer)
            except BlockingIOError:
                with suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_readable(self._listener)
            except OSError as problem:
                if problem.errno not in _AGAIN:
                    raise MechanismError("accept on the bridge", problem.errno or 0) from None
        raise MechanismError("accept on the bridge", errno.EBADF)

    def close(self) -> None:
        """Nobody listens any more: refused at once, though the descriptor may live on a while."""
        if not self.is_closed:
            self.is_closed = True
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._closer.close(self._listener)
