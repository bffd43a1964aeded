"""The one writer of a connection, with a budget for what waits to be written.

Invariants: a message enters the protocol's state and the queue in one step, so the order on the
wire is the order of the state; what waits never exceeds the budget by more than one frame; a peer
that takes nothing for `stall_seconds` is given up. Deliberately absent: what is sent.
"""

import os
from collections import deque
from collections.abc import Callable

import trio

from sbxd.service.unix import UnixStream
from sbxd.wire.connection import ServerConnection
from sbxd.wire.messages import Goodbye, Message

OUTGOING_BYTES_MAX = 512 * 1024


class PeerStalled(Exception):
    """The peer did not read for too long, or is gone. Nothing more can be sent."""


SendNow = Callable[[bytes], int]  # sends without waiting what there is room for; how much


def send_now_on(stream: trio.abc.Stream) -> SendNow:
    """Sends on a socket at once, so that a reply need not wait for the writer's turn; on another
    stream, nothing. What cannot be sent is the writer's, who finds out why."""

    if not isinstance(stream, UnixStream):
        return lambda frame: 0
    end = stream.end

    def send_now(frame: bytes) -> int:
        try:
            return os.write(end.fileno(), frame)
        except OSError:
            return 0

    return send_now


class Outgoing:
    """Queues frames for one stream."""

    def __init__(
        self,
        stream: trio.abc.SendStream,
        connection: ServerConnection,
        *,
        stall_seconds: float,
        bytes_max: int = OUTGOING_BYTES_MAX,
        send_now: SendNow = lambda frame: 0,
    ) -> None:
        self._stream = stream
        self._send_now = send_now
        self._connection = connection
        self._stall_seconds = stall_seconds
        self._bytes_max = bytes_max
        self._frames: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._finishing = False
        self._changed = trio.Event()
        self._space = trio.lowlevel.ParkingLot()

    @property
    def waiting_bytes(self) -> int:
        """How many bytes are queued."""
        return self._waiting_bytes

    async def wait_space(self) -> None:
        """Until something may be queued. The caller queues at once, before its next await."""
        await trio.lowlevel.checkpoint()
        while self._waiting_bytes >= self._bytes_max:
            await self._space.park()

    def queue(self, message: Message) -> None:
        """Enter a message and queue its frame, after `wait_space`.

        Raises: LocalProtocolError when the message is illegal now; nothing is then queued.
        """
        frame = self._connection.send(message)
        if not self._waiting_bytes:  # the writer has nothing in its hands either
            frame = frame[self._send_now(frame) :]
            if not frame:
                return
        self._frames.append(frame)
        self._waiting_bytes += len(frame)
        self._wake()

    async def send(self, message: Message) -> None:
        """Wait for space and queue."""
        await self.wait_space()
        self.queue(message)

    def finish(self, farewell: Goodbye | None) -> None:
        """Queue the last frame, if any; `run` returns once everything is written."""
        if farewell is not None:
            self.queue(farewell)
        self._finishing = True
        self._wake()

    async def run(self) -> None:
        """Write until `finish`.

        Raises: PeerStalled.

        Cancellation: a frame may be half written; the stream must then be closed.
        """
        while True:
            while self._frames:
                frame = self._frames.popleft()
                with trio.move_on_after(self._stall_seconds) as scope:
                    try:
                        await self._stream.send_all(frame)
                    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                        raise PeerStalled("the peer is gone") from error
                if scope.cancelled_caught:
                    raise PeerStalled("the peer does not read")
                self._waiting_bytes -= len(frame)
                self._space.unpark_all()
            if self._finishing:
                return
            self._changed = trio.Event()
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
