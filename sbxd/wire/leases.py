"""The protocol of a lease authority without I/O: messages, legality and both ends.

The frames are those of `sbxd.wire.framing`, smaller. A connection says Lease hello once, in one of
two roles: a HOLDER (a worker, or the supervisor of workers) registers, binds, releases and fences;
an ASKER (the daemon) asks about environments by their ids, and neither gives nor gets anything of
a tenant. Questions and answers alternate strictly, so nothing needs a request identifier and
nobody can make the other hold more than one frame.

Invariants: nothing that a peer sends raises anything but RemoteProtocolError, and after one every
further call raises it again; a refused `send` raises LocalProtocolError and changes nothing; an
answer has exactly one standing for each id that was asked. Deliberately absent: sockets, clocks,
whom to admit.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sbxd.port.ids import EnvironmentIdField, LeaseEpochField
from sbxd.port.leases import LeaseNonceField, LeaseRefusalCode, LeaseStanding, RunKeyField
from sbxd.wire.connection import CLOSED, NEED_DATA, Pause
from sbxd.wire.errors import LocalProtocolError, RemoteProtocolError
from sbxd.wire.framing import FrameDecoder, encode_frame
from sbxd.wire.legality import Sender
from sbxd.wire.messages import Message
from sbxd.wire.strict import StrictDecoder

LEASE_PROTOCOL_VERSION = 1
LEASE_FRAME_BYTES_MAX = 64 * 1024
QUERY_IDS_MAX = 1024


class LeaseRole(StrEnum):
    HOLDER = "holder"
    ASKER = "asker"


class LeaseFarewellCode(StrEnum):
    NOT_AUTHORIZED = "NOT_AUTHORIZED"
    VERSION = "VERSION"
    PROTOCOL = "PROTOCOL"
    CAPACITY = "CAPACITY"


class LeaseHello(Message, frozen=True, tag="lease_hello", kw_only=True):
    """The client's first frame."""

    protocol_version: int
    role: LeaseRole


class LeaseWelcome(Message, frozen=True, tag="lease_welcome", kw_only=True):
    """grace_seconds: how long a lease outlives its holder's connection."""

    protocol_version: int
    grace_seconds: float


class LeaseFarewell(Message, frozen=True, tag="lease_farewell", kw_only=True):
    """The authority's last frame."""

    code: LeaseFarewellCode


class Register(Message, frozen=True, tag="lease_register", kw_only=True):
    """Before an environment is provisioned. Again, word for word, after a lost connection."""

    nonce: LeaseNonceField
    run: RunKeyField
    lease_epoch: LeaseEpochField


class Bind(Message, frozen=True, tag="lease_bind", kw_only=True):
    """Which environment the lease is for."""

    nonce: LeaseNonceField
    environment_id: EnvironmentIdField


class Release(Message, frozen=True, tag="lease_release", kw_only=True):
    nonce: LeaseNonceField


class Fence(Message, frozen=True, tag="lease_fence", kw_only=True):
    """Every lease of the run with a lower epoch is stale from now on."""

    run: RunKeyField
    lease_epoch: LeaseEpochField


class Query(Message, frozen=True, tag="lease_query", kw_only=True):
    environment_ids: Annotated[
        tuple[EnvironmentIdField, ...], Meta(min_length=1, max_length=QUERY_IDS_MAX)
    ]


class Granted(Message, frozen=True, tag="lease_granted", kw_only=True):
    """To Register, Bind, Release and Fence."""


class Refused(Message, frozen=True, tag="lease_refused", kw_only=True):
    """To the same."""

    code: LeaseRefusalCode


class Standings(Message, frozen=True, tag="lease_standings", kw_only=True):
    """To Query: one for each id, in the order of the question."""

    standings: Annotated[tuple[LeaseStanding, ...], Meta(min_length=1, max_length=QUERY_IDS_MAX)]


HolderRequest = Register | Bind | Release | Fence
LeaseRequest = HolderRequest | Query
LeaseReply = Granted | Refused | Standings
ToAuthority = LeaseHello | LeaseRequest
FromAuthority = LeaseWelcome | LeaseFarewell | LeaseReply

MessageType = type[Message]


class LeaseState(StrEnum):
    """GREETING: nothing was said. JUDGING: the hello was. READY: a question may come. ASKED: its
    answer is due. CLOSING: the farewell was said."""

    GREETING = "GREETING"
    JUDGING = "JUDGING"
    READY = "READY"
    ASKED = "ASKED"
    CLOSING = "CLOSING"


_HOLDER_REQUESTS: Final[frozenset[MessageType]] = frozenset({Register, Bind, Release, Fence})
REQUESTS_OF_ROLE: Final = {
    LeaseRole.HOLDER: _HOLDER_REQUESTS,
    LeaseRole.ASKER: frozenset[MessageType]({Query}),
}
REPLIES: Final[dict[MessageType, frozenset[MessageType]]] = {
    **dict.fromkeys(_HOLDER_REQUESTS, frozenset({Granted, Refused})),
    Query: frozenset({Standings}),
}
LEASE_TABLE: Final[dict[Sender, dict[LeaseState, dict[MessageType, LeaseState]]]] = {
    Sender.CLIENT: {
        LeaseState.GREETING: {LeaseHello: LeaseState.JUDGING},
        LeaseState.JUDGING: {},
        LeaseState.READY: dict.fromkeys((*_HOLDER_REQUESTS, Query), LeaseState.ASKED),
        LeaseState.ASKED: {},
        LeaseState.CLOSING: {},
    },
    Sender.SERVER: {
        LeaseState.GREETING: {LeaseFarewell: LeaseState.CLOSING},
        LeaseState.JUDGING: {
            LeaseWelcome: LeaseState.READY,
            LeaseFarewell: LeaseState.CLOSING,
        },
        LeaseState.READY: {LeaseFarewell: LeaseState.CLOSING},
        LeaseState.ASKED: {
            **dict.fromkeys((Granted, Refused, Standings), LeaseState.READY),
            LeaseFarewell: LeaseState.CLOSING,
        },
        LeaseState.CLOSING: {},
    },
}


class LeaseConnection:
    """One end. us: CLIENT for a holder or an asker, SERVER for the authority.

    Use: `receive_data(piece)`, then `next_event()` until NEED_DATA or CLOSED; `send(message)`
    returns the bytes to write. What arrives before its turn waits undecoded.
    """

    def __init__(self, us: Sender) -> None:
        self._us = us
        self._them = Sender.SERVER if us is Sender.CLIENT else Sender.CLIENT
        self._frames = FrameDecoder(frame_bytes_max=LEASE_FRAME_BYTES_MAX)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: StrictDecoder[Message] = StrictDecoder(
            FromAuthority if us is Sender.CLIENT else ToAuthority
        )
        self._role: LeaseRole | None = None
        self._question: Message | None = None
        self._ended = False
        self._failure: RemoteProtocolError | None = None
        self.state = LeaseState.GREETING

    def receive_data(self, data: bytes) -> None:
        """Take received bytes; b"" says that the peer ended its stream. Raises
        RemoteProtocolError."""
        if not data:
            self._ended = True
            return
        try:
            self._frames.feed(data)
        except RemoteProtocolError as error:
            self._failure = error
            raise
        except LocalProtocolError:
            self._failure = RemoteProtocolError("frames arrive faster than their turn comes")
            raise self._failure from None

    def next_event(self) -> Message | Pause:
        """The peer's next message, if it is its turn. Raises RemoteProtocolError."""
        if self._failure is not None:
            raise RemoteProtocolError(self._failure.detail)
        if not LEASE_TABLE[self._them][self.state]:
            return CLOSED if self._ended else NEED_DATA
        try:
            body = self._frames.next_frame()
            if body is None:
                if self._ended and self._frames.buffered_bytes:
                    raise RemoteProtocolError("the stream ends within a frame")
                return CLOSED if self._ended else NEED_DATA
            message = self._decoder.decode(body)
            problem = self._enter(self._them, message)
            if problem is not None:
                raise RemoteProtocolError(problem)
        except RemoteProtocolError as error:
            self._failure = error
            raise
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            self._failure = RemoteProtocolError(f"undecodable message: {error}")
            raise self._failure from None
        return message

    def send(self, message: Message) -> bytes:
        """Enter a message of ours and return its frame. Raises LocalProtocolError."""
        frame = encode_frame(self._encoder.encode(message), frame_bytes_max=LEASE_FRAME_BYTES_MAX)
        problem = self._enter(self._us, message)
        if problem is not None:
            raise LocalProtocolError(problem)
        return frame

    def _enter(self, sender: Sender, message: Message) -> str | None:
        """Apply a legal message; for an illegal one say why, and change nothing."""
        kind = type(message)
        following = LEASE_TABLE[sender][self.state].get(kind)
        if following is None:
            return f"{kind.__name__} from the {sender} is illegal in {self.state}"
        if isinstance(message, LeaseHello):
            self._role = message.role
        elif kind in REPLIES:
            if self._role is None or kind not in REQUESTS_OF_ROLE[self._role]:
                return f"{kind.__name__} is no request of this role"
            self._question = message
        elif self.state is LeaseState.ASKED and kind is not LeaseFarewell:
            question = self._question
            if question is None or kind not in REPLIES[type(question)]:
                return f"{kind.__name__} is no answer to what was asked"
            if isinstance(question, Query) and isinstance(message, Standings):
                asked, answered = len(question.environment_ids), len(message.standings)
                if asked != answered:
                    return f"{answered} standings answer a question about {asked}"
            self._question = None
        self.state = following
        return None
