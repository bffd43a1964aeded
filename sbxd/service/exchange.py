"""One request in flight: what its handler may receive and send before the terminal reply.

Invariants: output and content are sent only within the client's credit; credit for an upload goes
back only when the handler has taken the bytes; a handler cannot send a terminal reply (it returns
one, and the session sends it), so there cannot be two.
"""

from collections import deque
from collections.abc import AsyncIterator, Sequence

import msgspec
import trio

from sbxd.port.command import FileChange
from sbxd.service.bridge import BridgeExchange
from sbxd.service.outgoing import Outgoing
from sbxd.wire.connection import ServerConnection
from sbxd.wire.errors import LocalProtocolError
from sbxd.wire.messages import (
    CHUNK_BYTES_MAX,
    INITIAL_CREDIT_BYTES,
    Content,
    Credit,
    Entries,
    Output,
    OutputStream,
    WireChange,
)

CREDIT_BATCH_BYTES = INITIAL_CREDIT_BYTES // 4
ENTRIES_FRAME_BYTES = 64 * 1024
ENTRIES_PER_FRAME = 1024


class Exchange:
    """The handler's side of one request."""

    def __init__(self, request_id: int, connection: ServerConnection, outgoing: Outgoing) -> None:
        self.request_id = request_id
        self.cancelled = trio.Event()
        self.scope = trio.CancelScope()
        self.bridge = BridgeExchange(request_id, connection, outgoing)
        self._connection = connection
        self._outgoing = outgoing
        self._uploaded: deque[bytes] = deque()
        self._arrived = trio.Event()
        self._credited = trio.Event()
        self._unreturned_bytes = 0
        self._handler_cancels = False

    # --- for the session's reader -------------------------------------------------------------

    def cancel(self) -> None:
        """The client asked for the end of this request."""
        self.cancelled.set()
        if not self._handler_cancels:
            self.scope.cancel()

    def take_upload(self, data: bytes) -> None:
        """A piece has arrived; what is kept here is bounded by the credit."""
        self._uploaded.append(data)
        self._arrived.set()
        self._arrived = trio.Event()

    def take_credit(self) -> None:
        """The client has returned credit."""
        self._credited.set()
        self._credited = trio.Event()

    # --- for the handler ----------------------------------------------------------------------

    def end_by_event(self) -> trio.Event:
        """From now on a cancel sets the returned event instead of cancelling the handler."""
        self._handler_cancels = True
        return self.cancelled

    def upload(self) -> AsyncIterator[bytes]:
        """The announced bytes, in pieces, exactly as many as were announced."""
        return _Upload(self)

    async def send_output(self, stream: OutputStream, data: bytes) -> None:
        """Send a command's output. Blocks without credit."""
        while data:
            size = await self._wait_credit(len(data))
            self._outgoing.queue(
                Output(request_id=self.request_id, stream=stream, data=data[:size])
            )
            data = data[size:]

    async def send_content(self, data: bytes) -> None:
        """Send a piece of a file. Blocks without credit."""
        while data:
            size = await self._wait_credit(len(data))
            self._outgoing.queue(Content(request_id=self.request_id, data=data[:size]))
            data = data[size:]

    async def send_entries(self, entries: Sequence[FileChange]) -> None:
        """Send entries, in frames of bounded size. Blocks while there is no space for one."""
        batch: list[WireChange] = []
        size = 0
        for each in entries:
            entry = WireChange(
                path=each.path.encode("utf-8", "surrogateescape"),
                change=each.change,
                size_bytes=each.size_bytes,
                sha256=each.sha256,
            )
            length = len(msgspec.msgpack.encode(entry))
            if batch and (size + length > ENTRIES_FRAME_BYTES or len(batch) == ENTRIES_PER_FRAME):
                await self._send_batch(batch)
                batch, size = [], 0
            batch.append(entry)
            size += length
        if batch:
            await self._send_batch(batch)

    async def _send_batch(self, batch: Sequence[WireChange]) -> None:
        await self._outgoing.send(Entries(request_id=self.request_id, entries=tuple(batch)))

    async def _wait_credit(self, wanted: int) -> int:
        while True:
            await self._outgoing.wait_space()
            credit = self._connection.credit_bytes(self.request_id)
            if credit:
                return min(credit, wanted, CHUNK_BYTES_MAX)
            if not self._connection.bytes_owed(self.request_id):
                raise LocalProtocolError("a handler sends more than was asked for")
            await self._credited.wait()

    async def next_upload(self) -> bytes | None:
        """The next piece of the upload; None once every announced byte was taken. After a cancel
        the rest never comes and this waits to be cancelled."""
        await self._return_credit()
        while not self._uploaded:
            if not self._connection.bytes_awaited(self.request_id):
                return None
            await self._arrived.wait()
        piece = self._uploaded.popleft()
        self._unreturned_bytes += len(piece)
        return piece

    async def _return_credit(self) -> None:
        if self._unreturned_bytes < CREDIT_BATCH_BYTES:
            return
        await self._outgoing.wait_space()
        self._outgoing.queue(Credit(request_id=self.request_id, size_bytes=self._unreturned_bytes))
        self._unreturned_bytes = 0


class _Upload:
    """Iterates an upload (no generator: nothing to finalise)."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece = await self._exchange.next_upload()
        if piece is None:
            raise StopAsyncIteration
        return piece
