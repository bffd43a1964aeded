"""One connection to the daemon, shared by many concurrent requests.

Invariants: frames are queued whole and written by one task, so no cancellation can leave half a
frame on the wire; what is queued or received is bounded by the credit and by the number of open
requests; a request that its caller has left is drained to its terminal reply. The connection is
never made anew: once it is lost, every call raises ExecutionUnavailable(UNREACHABLE), or
ServiceShuttingDown when the daemon said so.

Works under asyncio and trio. Deliberately absent: what requests mean.
"""

import socket
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

import anyio
from anyio.abc import ByteStream, SocketAttribute

from sbxd.client.checking import check_request
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    UnavailableCode,
    unavailable,
)
from sbxd.wire import messages as m
from sbxd.wire.bridge import cost_bytes
from sbxd.wire.connection import ClientConnection, Pause
from sbxd.wire.errors import LocalProtocolError, ProtocolError, printable
from sbxd.wire.legality import ALL_TERMINAL

RECEIVE_BYTES = 64 * 1024
CREDIT_BATCH_BYTES = m.INITIAL_CREDIT_BYTES // 4
FAREWELLS_NOT_AUTHORIZED = (m.GoodbyeCode.NOT_AUTHORIZED, m.GoodbyeCode.VERSION)

AnyRequestType = TypeVar("AnyRequestType", bound=m.Request)


class Call:
    """One request of a channel: its replies in order, and its credit.

    Exactly one task uses a call, and one more its bridge. Whoever stops before the terminal reply
    hands the call to `Channel.abandon`.
    """

    def __init__(self, channel: "Channel", request_id: int) -> None:
        self.request_id = request_id
        self._channel = channel
        self._inbox: deque[m.Message] = deque()
        self._changed = anyio.Event()
        self._unreturned_bytes = 0
        self._unreturned_bridge_bytes = 0
        self.abandoned: Callable[[m.Message], None] | None = None

    async def receive(self) -> m.Message:
        """The next reply; the last one is terminal.

        Raises: ExecutionUnavailable(UNREACHABLE) when the connection is lost first.

        Cancellation: no reply is lost; it can be received by a later call.
        """
        while not self._inbox:
            self._channel.raise_if_lost()
            await self._changed.wait()
        message = self._inbox.popleft()
        if isinstance(message, m.Output | m.Content):
            self._consumed(len(message.data))
        return message

    async def upload(self, data: AsyncIterable[bytes]) -> None:
        """Send the announced bytes as credit allows; returns early at a terminal reply.

        Raises: ExecutionUnavailable(UNREACHABLE); ValueError when `data` holds more or fewer
        bytes than were announced, and the last of them was then not sent.
        """
        left = self._channel.bytes_owed(self.request_id)
        last = b""
        async for piece in data:
            if len(piece) > left or (last and piece):
                raise ValueError("more bytes were given than announced")
            if left and not self._channel.is_uploading(self.request_id):
                return  # answered before the end of the upload
            left -= len(piece)
            if left:
                await self._send(piece)
            else:
                # Kept until `data` has ended: the daemon acts on the last byte.
                last = last or piece
        if left and self._channel.is_uploading(self.request_id):
            raise ValueError("fewer bytes were given than announced")
        await self._send(last)

    async def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            window = await self._wait_credit()
            if window is None:
                return
            size = min(window, m.CHUNK_BYTES_MAX, len(view))
            self._channel.post(m.Upload(request_id=self.request_id, data=bytes(view[:size])))
            view = view[size:]

    async def send_bridge(self, data: bytes) -> None:
        """Send one frame over the bridge as its credit allows; dropped once that is over.

        Raises: ExecutionUnavailable(UNREACHABLE).
        """
        while self._channel.is_bridge_open(self.request_id):
            if cost_bytes(data) <= self._channel.bridge_credit_bytes(self.request_id):
                self._channel.post(m.BridgeFrame(request_id=self.request_id, data=data))
                return
            await self._changed.wait()
            self._channel.raise_if_lost()

    def return_bridge_credit(self, size_bytes: int) -> None:
        """A frame of the bridge that cost so much has been dealt with."""
        self._unreturned_bridge_bytes += size_bytes
        if self._unreturned_bridge_bytes >= CREDIT_BATCH_BYTES:
            if self._channel.is_bridge_open(self.request_id):
                self._channel.post(
                    m.BridgeCredit(
                        request_id=self.request_id, size_bytes=self._unreturned_bridge_bytes
                    )
                )
            self._unreturned_bridge_bytes = 0

    def end_bridge(self) -> None:
        """Say that no more frames come from here."""
        if self._channel.is_bridge_open(self.request_id):
            self._channel.post(m.BridgeClose(request_id=self.request_id))

    def cancel(self) -> None:
        """Ask the daemon to end the request. Without effect when it is over, or asked already."""
        self._channel.post_cancel(self.request_id)

    def deliver(self, message: m.Message) -> None:
        """Take a reply from the channel's reader."""
        if self.abandoned is not None:
            if isinstance(message, m.Output | m.Content):
                self._consumed(len(message.data))
            elif type(message) in ALL_TERMINAL:
                self.abandoned(message)
            return
        if not isinstance(message, m.Credit | m.BridgeCredit):
            self._inbox.append(message)
        self.wake()

    def abandon(self, then: Callable[[m.Message], None]) -> None:
        """Drop what is and will be received; give the terminal reply to `then`."""
        self.abandoned = then
        while self._inbox:
            self.deliver(self._inbox.popleft())

    def wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _wait_credit(self) -> int | None:
        while True:
            self._channel.raise_if_lost()
            if any(type(message) in ALL_TERMINAL for message in self._inbox):
                return None
            window = self._channel.credit_bytes(self.request_id)
            if window:
                return window
            await self._changed.wait()

    def _consumed(self, size: int) -> None:
        self._unreturned_bytes += size
        if self._unreturned_bytes >= CREDIT_BATCH_BYTES:
            self._channel.post_credit(self.request_id, self._unreturned_bytes)
            self._unreturned_bytes = 0


class Channel:
    """Multiplexes requests over one stream. Made by `sbxd.client.remote.connect`."""

    def __init__(self, stream: ByteStream, connection: ClientConnection) -> None:
        self._stream = stream
        self._connection = connection
        self._calls: dict[int, Call] = {}
        self._outgoing: deque[bytes] = deque()
        self._outgoing_changed = anyio.Event()
        self._is_writing = False
        self._send_now = _send_now_on(stream)
        self._slot_freed = anyio.Event()
        self._lost: tuple[UnavailableCode, str] | None = None
        self.welcome: m.Welcome | None = None

    async def greet(self, hello: m.Hello) -> m.Welcome:
        """Say Hello and wait for Welcome. Before `run`.

        Raises: ExecutionRejected(NOT_AUTHORIZED) or ExecutionUnavailable, as the daemon says.
        """
        try:
            # A daemon that refuses this peer says so and closes without reading: read what it
            # said, though the Hello could not be sent.
            with suppress(OSError, anyio.BrokenResourceError):
                await self._stream.send(self._connection.send(hello))
            while True:
                event = self._connection.next_event()
                if isinstance(event, m.Welcome):
                    self.welcome = event
                    return event
                if isinstance(event, m.Goodbye):
                    raise _refused(event)
                if event is Pause.CLOSED:
                    raise _unreachable("the daemon closed the connection before its greeting")
                self._connection.receive_data(await self._receive())
        except anyio.BrokenResourceError:
            # Closed with our Hello unread, which the kernel calls a reset.
            raise _unreachable("the daemon closed the connection before its greeting") from None
        except (OSError, ProtocolError) as error:
            raise _unreachable(f"the greeting failed: {_cause(error)}") from None

    async def run(self) -> None:
        """Read and write until the connection is lost. Raises nothing."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._write)
                await self._read()
                group.cancel_scope.cancel()
        finally:
            self._lose(UnavailableCode.UNREACHABLE, "the connection is closed")

    async def start(self, make: Callable[[int], m.Request]) -> Call:
        """Send a request as soon as fewer than the allowed number are open.

        Args:
            make: builds the request from its identifier.

        Raises: ExecutionUnavailable(UNREACHABLE); ExecutionRejected(PROTOCOL) for a request with a
        value that no daemon would accept.

        Cancellation: nothing was sent.
        """
        while True:
            self.raise_if_lost()
            if self._connection.open_requests < m.REQUESTS_IN_FLIGHT_MAX:
                return self.start_nowait(make)
            await self._slot_freed.wait()

    def start_nowait(self, make: Callable[[int], m.Request]) -> Call:
        """As `start`, for a caller that knows that there is room."""
        self.raise_if_lost()
        request_id = self._connection.fresh_request_id()
        request = make(request_id)
        check_request(request)
        try:
            frame = self._connection.send(request)
        except LocalProtocolError as error:
            raise ExecutionRejected(RejectedCode.PROTOCOL, printable(str(error))) from None
        call = Call(self, request_id)
        self._calls[request_id] = call
        self._queue(frame)
        return call

    def abandon(self, call: Call, *, then: Callable[[m.Message], None]) -> None:
        """Drain what is still to come for a call; `then` is given its terminal reply."""
        call.abandon(then)

    def raise_if_lost(self) -> None:
        """Raises: ExecutionUnavailable, ServiceShuttingDown once the connection is lost."""
        if self._lost is not None:
            raise unavailable(*self._lost)

    def is_uploading(self, request_id: int) -> bool:
        return self._connection.request_state(request_id) == "UPLOADING"

    def bytes_owed(self, request_id: int) -> int:
        return self._connection.bytes_owed(request_id)

    def credit_bytes(self, request_id: int) -> int:
        return self._connection.credit_bytes(request_id)

    def is_bridge_open(self, request_id: int) -> bool:
        """Whether frames, credit and the end of a request's bridge may be sent."""
        return (
            self._lost is None
            and self._connection.request_state(request_id) == "OPEN"
            and self._connection.bridge_state(request_id) in ("OPEN", "SERVER_DONE")
        )

    def bridge_credit_bytes(self, request_id: int) -> int:
        return self._connection.bridge_credit_bytes(request_id)

    def post(self, message: m.Message) -> None:
        """Queue a message whose legality the caller has checked."""
        self._queue(self._connection.send(message))

    def post_cancel(self, request_id: int) -> None:
        if self._lost is None and self._connection.request_state(request_id) in (
            "UPLOADING",
            "OPEN",
        ):
            self.post(m.Cancel(request_id=request_id))

    def post_credit(self, request_id: int, size: int) -> None:
        if self._lost is None and self._connection.request_state(request_id) != "DONE":
            self.post(m.Credit(request_id=request_id, size_bytes=size))

    def _queue(self, frame: bytes) -> None:
        if not self._outgoing and not self._is_writing:
            frame = frame[self._send_now(frame) :]
            if not frame:
                return
        self._outgoing.append(frame)
        self._outgoing_changed.set()

    async def _write(self) -> None:
        try:
            while True:
                while self._outgoing:
                    self._is_writing = True
                    await self._stream.send(self._outgoing.popleft())
                    self._is_writing = False
                self._outgoing_changed = anyio.Event()
                await self._outgoing_changed.wait()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            # The reader sees the end, after what the daemon has still said.
            return

    async def _read(self) -> None:
        try:
            while True:
                event = self._connection.next_event()
                if event is Pause.CLOSED:
                    self._lose(UnavailableCode.UNREACHABLE, "the daemon closed the connection")
                    return
                if isinstance(event, m.Goodbye):
                    self._lose(_farewell_code(event.code), f"the daemon closed: {event.reason}")
                    return
                if isinstance(event, Pause):
                    self._connection.receive_data(await self._receive())
                elif isinstance(event, m.Ping):
                    self.post(m.Pong(token=event.token))
                else:
                    self._deliver(event)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            self._lose(UnavailableCode.UNREACHABLE, f"the connection is lost: {_cause(error)}")
        except ProtocolError as error:
            self._lose(UnavailableCode.UNREACHABLE, f"the daemon broke the protocol: {error}")

    async def _receive(self) -> bytes:
        try:
            return await self._stream.receive(RECEIVE_BYTES)
        except anyio.EndOfStream:
            return b""

    def _deliver(self, message: m.Message) -> None:
        request_id: int | None = getattr(message, "request_id", None)
        if request_id is None:
            return
        if type(message) in ALL_TERMINAL:
            call = self._calls.pop(request_id)
            self._slot_freed.set()
            self._slot_freed = anyio.Event()
        else:
            call = self._calls[request_id]
        call.deliver(message)

    def _lose(self, code: UnavailableCode, detail: str) -> None:
        if self._lost is not None:
            return
        self._lost = (code, detail)
        self._slot_freed.set()
        for call in self._calls.values():
            call.wake()
        self._calls.clear()


class chunks_of(AsyncIterator[bytes]):
    """Bytes at hand, as the stream that an upload takes: no generator, which somebody would have
    to close when the upload ends early."""

    def __init__(self, data: bytes) -> None:
        self._left = [data] if data else []

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


def _send_now_on(stream: ByteStream) -> Callable[[bytes], int]:
    """Sends on a Unix socket at once what there is room for, so that a request need not wait for
    the writer's turn. What cannot be sent, and other streams, are the writer's."""
    try:
        raw = stream.extra(SocketAttribute.raw_socket)  # noqa: S610  (not Django's)
    except anyio.TypedAttributeLookupError:
        return lambda frame: 0
    if not isinstance(raw, socket.socket) or raw.family != socket.AF_UNIX:
        return lambda frame: 0

    def send_now(frame: bytes) -> int:
        try:
            return raw.send(frame)
        except OSError:
            return 0

    return send_now


def _farewell_code(code: m.GoodbyeCode) -> UnavailableCode:
    if code is m.GoodbyeCode.SHUTTING_DOWN:
        return UnavailableCode.SHUTTING_DOWN
    if code is m.GoodbyeCode.CAPACITY:
        return UnavailableCode.CAPACITY
    return UnavailableCode.UNREACHABLE


def _refused(farewell: m.Goodbye) -> PortError:
    if farewell.code in FAREWELLS_NOT_AUTHORIZED:
        return ExecutionRejected(RejectedCode.NOT_AUTHORIZED, farewell.reason)
    return unavailable(_farewell_code(farewell.code), farewell.reason)


def _unreachable(detail: str) -> ExecutionUnavailable:
    return ExecutionUnavailable(UnavailableCode.UNREACHABLE, detail)


def _cause(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ProtocolError):
        return error.detail
    return type(error).__name__
