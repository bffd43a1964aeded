"""Which message is legal when, as data, and the one ledger that applies it.

House rules: every transition of a connection or a request is in this file; nothing here knows
which side we are. Both sides keep the same ledger and enter into it what each of them says, so
the two cannot disagree about what is open.

Theory. A connection is one machine, moved by Hello, Welcome and Goodbye:

    GREETING --Hello--> AUTHENTICATING --Welcome--> READY --Goodbye--> CLOSING
        `------------------Goodbye-----------------------------------------^

A server decodes exactly one frame, the Hello, before it has said Welcome. Each request is a
machine of its own:

    UPLOADING --the announced bytes have arrived--> OPEN
    UPLOADING, OPEN --Cancel--> CANCELLED
    UPLOADING, OPEN, CANCELLED --a terminal reply--> DONE

Request identifiers rise strictly on a connection. So every identifier up to the highest is known
(open, or DONE) without a memory of it, and what a client sends within a request that was DONE
before the reply reached it (Upload, Cancel, Credit) is dropped, not an error. After DONE the
server says nothing about a request.

Guards, beside the tables: at most `requests_max` requests are open; chunks are not empty, stay
within the credit of their direction and within what was announced or asked; credit returns
nothing that was not taken; one Ping at a time is unanswered in each direction. The messages of a
bridge have a machine and guards of their own (`sbxd.wire.bridge`), and none without being asked
for by Execute.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sbxd.port.workspace import LISTING_ENTRIES_MAX
from sbxd.wire import messages as m
from sbxd.wire.bridge import BridgeAccount, IllegalBridge, Party
from sbxd.wire.egress import EgressCheck, EgressChecked, EgressShow, EgressShown
from sbxd.wire.observing import (
    MetersAre,
    MetersQuery,
    MetricsAre,
    MetricsQuery,
    StatusIs,
    StatusQuery,
)

ENTRIES_MAX = LISTING_ENTRIES_MAX


class Sender(StrEnum):
    CLIENT = "client"
    SERVER = "server"


class Role(StrEnum):
    """What a socket is for. ADMIN may send every request, WORKER the worker's alone."""

    WORKER = "worker"
    ADMIN = "admin"


class ConnectionState(StrEnum):
    GREETING = "GREETING"
    AUTHENTICATING = "AUTHENTICATING"
    READY = "READY"
    CLOSING = "CLOSING"


class RequestState(StrEnum):
    UPLOADING = "UPLOADING"
    OPEN = "OPEN"
    CANCELLED = "CANCELLED"
    DONE = "DONE"


MessageType = type[m.Message]

WORKER_REQUESTS: Final[frozenset[MessageType]] = frozenset(
    {
        m.Provision,
        m.Execute,
        m.Destroy,
        m.WorkspaceRead,
        m.WorkspaceWrite,
        m.WorkspaceList,
        m.WorkspaceProvenanceQuery,
        m.NetworkGrantQuery,
    }
)
ADMIN_REQUESTS: Final[frozenset[MessageType]] = frozenset(
    {
        m.AdminDescribe,
        m.AdminList,
        m.AdminInspect,
        m.ImageImport,
        m.ImageList,
        m.ImageRemove,
        m.Reconcile,
        m.Reap,
        m.QuarantineList,
        m.QuarantineClear,
        EgressCheck,
        EgressShow,
        MetricsQuery,
        StatusQuery,
        MetersQuery,
    }
)
REQUESTS_OF_ROLE: Final = {
    Role.WORKER: WORKER_REQUESTS,
    Role.ADMIN: WORKER_REQUESTS | ADMIN_REQUESTS,
}

# What may answer every request, whatever it asked.
FAILURES: Final[frozenset[MessageType]] = frozenset(
    {m.Unavailable, m.Rejected, m.EscapeSuspected, m.Cancelled}
)
_WORKSPACE_FAILURES: Final[frozenset[MessageType]] = FAILURES | {
    m.WorkspaceEscaped,
    m.WorkspaceFailed,
}
TERMINAL_REPLIES: Final[dict[MessageType, frozenset[MessageType]]] = {
    m.Provision: FAILURES | {m.Provisioned},
    m.Execute: FAILURES | {m.Executed},
    m.Destroy: FAILURES | {m.Done},
    m.WorkspaceRead: _WORKSPACE_FAILURES | {m.ContentEnd},
    m.WorkspaceWrite: _WORKSPACE_FAILURES | {m.Done},
    m.WorkspaceList: _WORKSPACE_FAILURES | {m.Listed},
    m.WorkspaceProvenanceQuery: _WORKSPACE_FAILURES | {m.ProvenanceIs},
    m.NetworkGrantQuery: FAILURES | {m.NetworkGrantIs},
    m.AdminDescribe: FAILURES | {m.Described},
    m.AdminList: FAILURES | {m.Environments},
    m.AdminInspect: FAILURES | {m.Environments},
    m.ImageImport: FAILURES | {m.ImageImported},
    m.ImageList: FAILURES | {m.Images},
    m.ImageRemove: FAILURES | {m.Done},
    m.Reconcile: FAILURES | {m.Reconciled},
    m.Reap: FAILURES | {m.Reaped},
    m.QuarantineList: FAILURES | {m.QuarantineIs},
    m.QuarantineClear: FAILURES | {m.QuarantineWasCleared},
    EgressCheck: FAILURES | {EgressChecked},
    EgressShow: FAILURES | {EgressShown},
    MetricsQuery: FAILURES | {MetricsAre},
    StatusQuery: FAILURES | {StatusIs},
    MetersQuery: FAILURES | {MetersAre},
}
_BRIDGE_STREAM: Final[frozenset[MessageType]] = frozenset(
    {m.BridgeOpened, m.BridgeFrame, m.BridgeClosed}
)
STREAM_REPLIES: Final[dict[MessageType, frozenset[MessageType]]] = {
    m.Execute: frozenset({m.Output, m.Entries, *_BRIDGE_STREAM}),
    m.WorkspaceRead: frozenset({m.Content}),
    m.WorkspaceList: frozenset({m.Entries}),
}
ALL_TERMINAL: Final[frozenset[MessageType]] = frozenset().union(*TERMINAL_REPLIES.values())
ALL_STREAM: Final[frozenset[MessageType]] = frozenset().union(*STREAM_REPLIES.values())

_BRIDGE_OF_CLIENT: Final[frozenset[MessageType]] = frozenset(
    {m.BridgeFrame, m.BridgeCredit, m.BridgeClose}
)
# What moves a request's bridge (`sbxd.wire.bridge`).
BRIDGE: Final[frozenset[MessageType]] = _BRIDGE_OF_CLIENT | _BRIDGE_STREAM
_NO_MESSAGES: Final[frozenset[MessageType]] = frozenset()
_IN_REQUEST: Final[frozenset[MessageType]] = frozenset(
    {m.Upload, m.Cancel, m.Credit, *_BRIDGE_OF_CLIENT}
)


def _stay(
    state: ConnectionState, kinds: frozenset[MessageType]
) -> dict[MessageType, ConnectionState]:
    return dict.fromkeys(kinds, state)


CONNECTION_TABLE: Final[dict[Sender, dict[ConnectionState, dict[MessageType, ConnectionState]]]] = {
    Sender.CLIENT: {
        ConnectionState.GREETING: {m.Hello: ConnectionState.AUTHENTICATING},
        ConnectionState.AUTHENTICATING: {},
        ConnectionState.READY: _stay(
            ConnectionState.READY,
            WORKER_REQUESTS | ADMIN_REQUESTS | _IN_REQUEST | {m.Ping, m.Pong},
        ),
        ConnectionState.CLOSING: {},
    },
    Sender.SERVER: {
        ConnectionState.GREETING: {m.Goodbye: ConnectionState.CLOSING},
        ConnectionState.AUTHENTICATING: {
            m.Welcome: ConnectionState.READY,
            m.Goodbye: ConnectionState.CLOSING,
        },
        ConnectionState.READY: {
            **_stay(
                ConnectionState.READY,
                ALL_TERMINAL | ALL_STREAM | {m.Credit, m.BridgeCredit, m.Ping, m.Pong},
            ),
            m.Goodbye: ConnectionState.CLOSING,
        },
        ConnectionState.CLOSING: {},
    },
}


def _server_in(state: RequestState) -> dict[MessageType, RequestState]:
    bridge = _NO_MESSAGES if state is RequestState.UPLOADING else BRIDGE
    return {
        **dict.fromkeys((ALL_STREAM - BRIDGE) | {m.Credit}, state),
        **dict.fromkeys(bridge & (ALL_STREAM | {m.BridgeCredit}), state),
        **dict.fromkeys(ALL_TERMINAL, RequestState.DONE),
    }


REQUEST_TABLE: Final[dict[Sender, dict[RequestState, dict[MessageType, RequestState]]]] = {
    Sender.CLIENT: {
        RequestState.UPLOADING: {
            m.Upload: RequestState.UPLOADING,  # OPEN with the last announced byte
            m.Cancel: RequestState.CANCELLED,
            m.Credit: RequestState.UPLOADING,
        },
        RequestState.OPEN: {
            m.Cancel: RequestState.CANCELLED,
            **dict.fromkeys(_BRIDGE_OF_CLIENT | {m.Credit}, RequestState.OPEN),
        },
        RequestState.CANCELLED: dict.fromkeys(
            (m.Credit, m.BridgeCredit, m.BridgeClose), RequestState.CANCELLED
        ),
        # Crossed with the terminal reply on its way: dropped by the receiver.
        RequestState.DONE: dict.fromkeys(_IN_REQUEST, RequestState.DONE),
    },
    Sender.SERVER: {
        RequestState.UPLOADING: _server_in(RequestState.UPLOADING),
        RequestState.OPEN: _server_in(RequestState.OPEN),
        RequestState.CANCELLED: _server_in(RequestState.CANCELLED),
        RequestState.DONE: {},
    },
}


class IllegalMessage(Exception):
    """The table or a guard refuses a message; nothing was changed."""


class Disposition(StrEnum):
    """What to do with a legal message. DROPPED: it belongs to a request that is DONE."""

    APPLIED = "APPLIED"
    DROPPED = "DROPPED"


@dataclass(slots=True)
class RequestEntry:
    """The account of one open request, the same on both sides.

    upload_left, download_left: bytes that may still come in total. upload_window,
    download_window: bytes of credit. entries_left: entries that may still be listed. bridge: of an
    Execute that asked for it.
    """

    kind: MessageType
    state: RequestState
    upload_left: int
    download_left: int
    entries_left: int
    upload_window: int = m.INITIAL_CREDIT_BYTES
    download_window: int = m.INITIAL_CREDIT_BYTES
    bridge: BridgeAccount | None = None


class Ledger:
    """The state of one connection and its requests.

    Invariant: `enter` either applies a message wholly, or raises IllegalMessage and changes
    nothing.
    """

    def __init__(self, *, role: Role, requests_max: int = m.REQUESTS_IN_FLIGHT_MAX) -> None:
        self.role = role
        self.requests_max = requests_max
        self.state = ConnectionState.GREETING
        self.requests: dict[int, RequestEntry] = {}
        self.highest_request_id = 0
        self._unanswered_ping: dict[Sender, int | None] = dict.fromkeys(Sender)

    def is_ping_unanswered(self, sender: Sender) -> bool:
        """Whether a Ping of `sender` has no Pong yet."""
        return self._unanswered_ping[sender] is not None

    def enter(self, sender: Sender, message: m.Message) -> Disposition:
        """Enter what `sender` says.

        Raises: IllegalMessage, and then the ledger is as it was.
        """
        kind = type(message)
        next_state = CONNECTION_TABLE[sender][self.state].get(kind)
        if next_state is None:
            raise IllegalMessage(f"{kind.__name__} from the {sender} is illegal in {self.state}")
        disposition = Disposition.APPLIED
        if isinstance(message, m.Request):
            self._open(message)
        elif isinstance(message, m.Ping):
            self._ping(sender, message)
        elif isinstance(message, m.Pong):
            self._pong(sender, message)
        elif isinstance(message, m.Hello | m.Welcome | m.Goodbye):
            pass
        else:
            disposition = self._within(sender, message)
        self.state = next_state
        return disposition

    def _open(self, request: m.Request) -> None:
        kind = type(request)
        if kind not in REQUESTS_OF_ROLE[self.role]:
            raise IllegalMessage(f"{kind.__name__} is illegal on the {self.role} socket")
        if request.request_id <= self.highest_request_id:
            raise IllegalMessage("a request_id must be larger than all before it")
        if len(self.requests) >= self.requests_max:
            raise IllegalMessage(f"more than {self.requests_max} requests are open")
        upload = download = 0
        if isinstance(request, m.Execute):
            upload = request.stdin_bytes
            download = 2 * request.command.maximum_output_bytes
        elif isinstance(request, m.WorkspaceWrite | m.ImageImport):
            upload = request.size_bytes
        elif isinstance(request, m.WorkspaceRead):
            download = request.maximum_bytes
        self.requests[request.request_id] = RequestEntry(
            kind=kind,
            state=RequestState.UPLOADING if upload else RequestState.OPEN,
            upload_left=upload,
            download_left=download,
            entries_left=ENTRIES_MAX,
            bridge=BridgeAccount() if getattr(request, "bridge", False) else None,
        )
        self.highest_request_id = request.request_id

    def _ping(self, sender: Sender, message: m.Ping) -> None:
        if self._unanswered_ping[sender] is not None:
            raise IllegalMessage("a Ping is sent while another is unanswered")
        self._unanswered_ping[sender] = message.token

    def _pong(self, sender: Sender, message: m.Pong) -> None:
        asker = Sender.SERVER if sender is Sender.CLIENT else Sender.CLIENT
        if self._unanswered_ping[asker] != message.token:
            raise IllegalMessage("a Pong answers no Ping")
        self._unanswered_ping[asker] = None

    def _within(self, sender: Sender, message: m.Message) -> Disposition:
        kind = type(message)
        request_id: int = getattr(message, "request_id")  # noqa: B009  (all that are left have one)
        entry = self.requests.get(request_id)
        if entry is None and not 0 < request_id <= self.highest_request_id:
            raise IllegalMessage(f"{kind.__name__} names an unknown request")
        state = RequestState.DONE if entry is None else entry.state
        next_state = REQUEST_TABLE[sender][state].get(kind)
        if next_state is None:
            raise IllegalMessage(f"{kind.__name__} from the {sender} is illegal in {state}")
        if entry is None:
            return Disposition.DROPPED
        if kind in ALL_STREAM and kind not in STREAM_REPLIES.get(entry.kind, frozenset()):
            raise IllegalMessage(
                f"{kind.__name__} is no part of the answer to {entry.kind.__name__}"
            )
        if next_state is RequestState.DONE:
            if kind not in TERMINAL_REPLIES[entry.kind]:
                raise IllegalMessage(f"{kind.__name__} is no answer to {entry.kind.__name__}")
            del self.requests[request_id]
            return Disposition.APPLIED
        if kind in BRIDGE:
            _bridge(entry, sender, message)
        elif isinstance(message, m.Upload):
            _upload(entry, len(message.data))
            next_state = entry.state
        elif isinstance(message, m.Output | m.Content):
            _download(entry, len(message.data))
        elif isinstance(message, m.Credit):
            _credit(entry, sender, message.size_bytes)
        elif isinstance(message, m.Entries):
            if not 0 < len(message.entries) <= entry.entries_left:
                raise IllegalMessage("Entries is empty, or lists more than a listing may hold")
            entry.entries_left -= len(message.entries)
        entry.state = next_state
        return Disposition.APPLIED


def _upload(entry: RequestEntry, size: int) -> None:
    if not 0 < size <= entry.upload_left:
        raise IllegalMessage("an Upload is empty, or exceeds the announced size")
    if size > entry.upload_window:
        raise IllegalMessage("an Upload exceeds its credit")
    entry.upload_left -= size
    entry.upload_window -= size
    if not entry.upload_left:
        entry.state = RequestState.OPEN


def _download(entry: RequestEntry, size: int) -> None:
    if not 0 < size <= entry.download_left:
        raise IllegalMessage("a chunk is empty, or exceeds what was asked for")
    if size > entry.download_window:
        raise IllegalMessage("a chunk exceeds its credit")
    entry.download_left -= size
    entry.download_window -= size


def _bridge(entry: RequestEntry, sender: Sender, message: m.Message) -> None:
    if entry.bridge is None:
        raise IllegalMessage(f"{type(message).__name__} within a request that asked for no bridge")
    try:
        entry.bridge.enter(Party(sender.value), message)
    except IllegalBridge as error:
        raise IllegalMessage(str(error)) from None


def _credit(entry: RequestEntry, sender: Sender, size: int) -> None:
    # The client returns credit for what it downloaded, the server for what was uploaded to it.
    if sender is Sender.CLIENT:
        if entry.download_window + size > m.INITIAL_CREDIT_BYTES:
            raise IllegalMessage("Credit returns more than was taken")
        entry.download_window += size
    else:
        if entry.upload_window + size > m.INITIAL_CREDIT_BYTES:
            raise IllegalMessage("Credit returns more than was taken")
        entry.upload_window += size
