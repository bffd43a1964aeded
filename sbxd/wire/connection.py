"""The protocol without I/O: bytes in, events out; messages in, bytes out.

Use: `receive_data(piece)`, then `next_event()` until it returns NEED_DATA or CLOSED;
`send(message)` returns the bytes to write. What is legal is the table of `sbxd.wire.legality`.

Invariants: a server decodes nothing but one Hello of at most HELLO_BYTES_MAX until it has sent
Welcome; what has arrived behind the Hello waits undecoded. Nothing that a peer sends raises
anything but RemoteProtocolError; after one, every further `next_event` raises it again and only a
farewell can be sent. A refused `send` raises LocalProtocolError and changes nothing. Deliberately
absent: sockets, clocks, tasks, credentials.
"""

from enum import Enum
from typing import Final, Generic, TypeVar

import msgspec

from sbxd.wire import messages as m
from sbxd.wire.bridge import BridgeState, Party
from sbxd.wire.errors import LocalProtocolError, RemoteProtocolError
from sbxd.wire.framing import FrameDecoder, encode_frame
from sbxd.wire.legality import (
    ConnectionState,
    Disposition,
    IllegalMessage,
    Ledger,
    RequestState,
    Role,
    Sender,
)
from sbxd.wire.strict import StrictDecoder

HELLO_BYTES_MAX = 4096

Received = TypeVar("Received", bound=m.Message)
Sent = TypeVar("Sent", bound=m.Message)


class Pause(Enum):
    """Events that are no message. NEED_DATA: feed more. CLOSED: the peer ended the stream."""

    NEED_DATA = "NEED_DATA"
    CLOSED = "CLOSED"


NEED_DATA: Final = Pause.NEED_DATA
CLOSED: Final = Pause.CLOSED

WorkerMessage = m.WorkerRequest | m.Upload | m.Cancel | m.Credit | m.BridgeMessage | m.Ping | m.Pong
AdminMessage = WorkerMessage | m.AdminRequest
GreetingReply = m.Welcome | m.Goodbye


class _Connection(Generic[Received, Sent]):
    _us: Sender
    _them: Sender

    def __init__(
        self, *, role: Role, first_frame_bytes_max: int, frame_bytes_max: int, requests_max: int
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._frame_bytes_max = frame_bytes_max
        self._frames = FrameDecoder(frame_bytes_max=first_frame_bytes_max)
        self._ledger = Ledger(role=role, requests_max=requests_max)
        self._frame_bytes = 0
        self._ended = False
        self._failure: RemoteProtocolError | None = None

    @property
    def state(self) -> ConnectionState:
        return self._ledger.state

    @property
    def role(self) -> Role:
        return self._ledger.role

    @property
    def has_ended(self) -> bool:
        """Whether the peer's stream has ended."""
        return self._ended

    @property
    def open_requests(self) -> int:
        """How many requests have no terminal reply yet."""
        return len(self._ledger.requests)

    @property
    def is_ping_unanswered(self) -> bool:
        """Whether the peer owes us a Pong; another Ping would be illegal."""
        return self._ledger.is_ping_unanswered(self._us)

    @property
    def frame_bytes(self) -> int:
        """How long the frame of the last event was."""
        return self._frame_bytes

    @property
    def buffered_bytes(self) -> int:
        """How many received bytes are kept undecoded."""
        return self._frames.buffered_bytes

    def request_state(self, request_id: int) -> RequestState:
        """The state of a request; DONE also for one that never was."""
        entry = self._ledger.requests.get(request_id)
        return RequestState.DONE if entry is None else entry.state

    def credit_bytes(self, request_id: int) -> int:
        """How many bytes of chunks we may send for this request now; 0 when it is DONE."""
        entry = self._ledger.requests.get(request_id)
        if entry is None:
            return 0
        if self._us is Sender.SERVER:
            return min(entry.download_window, entry.download_left)
        return min(entry.upload_window, entry.upload_left)

    def bridge_state(self, request_id: int) -> BridgeState:
        """The state of a request's bridge; OVER for one that is DONE or asked for none."""
        entry = self._ledger.requests.get(request_id)
        return BridgeState.OVER if entry is None or entry.bridge is None else entry.bridge.state

    def bridge_credit_bytes(self, request_id: int) -> int:
        """How much the frames may cost that we send over a request's bridge now."""
        entry = self._ledger.requests.get(request_id)
        if entry is None or entry.bridge is None:
            return 0
        return entry.bridge.window[Party(self._us.value)]

    def bytes_owed(self, request_id: int) -> int:
        """How many bytes of chunks this side may still send for a request, with credit or
        without; 0 when it is DONE."""
        entry = self._ledger.requests.get(request_id)
        if entry is None:
            return 0
        return entry.download_left if self._us is Sender.SERVER else entry.upload_left

    def bytes_awaited(self, request_id: int) -> int:
        """How many bytes of chunks the peer may still send for a request. After a Cancel they
        may never come."""
        entry = self._ledger.requests.get(request_id)
        if entry is None:
            return 0
        return entry.upload_left if self._us is Sender.SERVER else entry.download_left

    def receive_data(self, data: bytes) -> None:
        """Take received bytes; b"" says that the peer ended its stream.

        Raises: RemoteProtocolError for an illegal frame length; LocalProtocolError for data
        after the end, or when events are not taken between two pieces.
        """
        if self._ended:
            raise LocalProtocolError("bytes are received after the end of the stream")
        if not data:
            self._ended = True
        elif self.state is ConnectionState.CLOSING or self._failure is not None:
            self._frames.clear()
        else:
            try:
                self._frames.feed(data)
            except RemoteProtocolError as error:
                self._failure = error
                raise

    def next_event(self) -> Received | Pause:
        """Take the next message of the peer's.

        Raises: RemoteProtocolError, and the same again at each later call.
        """
        while True:
            if self._failure is not None:
                raise RemoteProtocolError(self._failure.detail)
            if self.state is ConnectionState.CLOSING:
                return CLOSED if self._ended else NEED_DATA
            try:
                message = self._take()
            except RemoteProtocolError as error:
                self._failure = error
                raise
            if message is None:
                if self._ended:
                    return CLOSED
                return NEED_DATA
            try:
                disposition = self._ledger.enter(self._them, message)
            except IllegalMessage as error:
                self._failure = RemoteProtocolError(str(error))
                raise self._failure from None
            self._entered(message)
            if disposition is Disposition.APPLIED:
                return message

    def send(self, message: Sent) -> bytes:
        """Enter a message of ours and return its frame.

        Raises: LocalProtocolError when it is illegal now; nothing has then changed.
        """
        request_id = getattr(message, "request_id", None)
        if (
            not isinstance(message, m.Request)
            and request_id is not None
            and request_id not in self._ledger.requests
        ):
            raise LocalProtocolError(f"{type(message).__name__} names no open request")
        frame = encode_frame(self._encoder.encode(message), frame_bytes_max=self._frame_bytes_max)
        try:
            self._ledger.enter(self._us, message)
        except IllegalMessage as error:
            raise LocalProtocolError(str(error)) from None
        self._entered(message)
        return frame

    def _decoder(self) -> "StrictDecoder[Received] | None":
        """The decoder of what the peer may say now; None while nothing is decoded at all."""
        raise NotImplementedError

    def _entered(self, message: m.Message) -> None:
        if isinstance(message, m.Welcome):
            self._frames.raise_cap(self._frame_bytes_max)
        elif isinstance(message, m.Goodbye):
            self._frames.clear()

    def _take(self) -> Received | None:
        decoder = self._decoder()
        if decoder is None:
            return None
        body = self._frames.next_frame()
        if body is None:
            if self._ended and self._frames.buffered_bytes:
                raise RemoteProtocolError("the stream ends within a frame")
            return None
        self._frame_bytes = len(body)
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise RemoteProtocolError(f"undecodable message: {error}") from None


class ServerConnection(_Connection[m.Message, m.Message]):
    """The daemon's end of one connection: receives ClientMessage, sends ServerMessage."""

    _us = Sender.SERVER
    _them = Sender.CLIENT

    def __init__(
        self,
        *,
        role: Role,
        hello_bytes_max: int = HELLO_BYTES_MAX,
        frame_bytes_max: int = m.FRAME_BYTES_MAX,
        requests_max: int = m.REQUESTS_IN_FLIGHT_MAX,
    ) -> None:
        super().__init__(
            role=role,
            first_frame_bytes_max=min(hello_bytes_max, frame_bytes_max),
            frame_bytes_max=frame_bytes_max,
            requests_max=requests_max,
        )
        self._hello: StrictDecoder[m.Message] = StrictDecoder(m.Hello)
        later = AdminMessage if role is Role.ADMIN else WorkerMessage
        # A second Hello decodes, so that the table is what refuses it.
        self._later: StrictDecoder[m.Message] = StrictDecoder(later | m.Hello)

    def _decoder(self) -> "StrictDecoder[m.Message] | None":
        if self.state is ConnectionState.GREETING:
            return self._hello
        if self.state is ConnectionState.READY:
            return self._later
        return None


class ClientConnection(_Connection[m.Message, m.Message]):
    """A worker's or an operator's end: receives ServerMessage, sends ClientMessage."""

    _us = Sender.CLIENT
    _them = Sender.SERVER

    def __init__(
        self,
        *,
        role: Role,
        frame_bytes_max: int = m.FRAME_BYTES_MAX,
        requests_max: int = m.REQUESTS_IN_FLIGHT_MAX,
    ) -> None:
        super().__init__(
            role=role,
            first_frame_bytes_max=min(HELLO_BYTES_MAX, frame_bytes_max),
            frame_bytes_max=frame_bytes_max,
            requests_max=requests_max,
        )
        self._greeting: StrictDecoder[m.Message] = StrictDecoder(GreetingReply)
        self._later: StrictDecoder[m.Message] = StrictDecoder(m.ServerMessage)

    def fresh_request_id(self) -> int:
        """The identifier for the next request; the request must be sent before the next call."""
        return self._ledger.highest_request_id + 1

    def _decoder(self) -> "StrictDecoder[m.Message] | None":
        if self.state is ConnectionState.READY:
            return self._later
        return self._greeting
