"""Every message of the protocol, as frozen tagged structs.

A frame is a 4-byte big-endian length and the msgpack of one of these (`sbxd.wire.framing`). Which
message is legal when is the table of `sbxd.wire.connection`; nothing here does I/O.

Streams: whatever may be large travels as chunks under credit. A sender of chunks may have at most
`INITIAL_CREDIT_BYTES` outstanding per request and direction; the receiver returns credit as it
consumes. `Execute.stdin_bytes` and `WorkspaceWrite.size_bytes` announce an upload of exactly that
many bytes, sent as `Upload` frames. Replies stream `Output`, `Content` and `Entries` frames and
end with exactly one terminal message for the request.

File names and arguments are bytes on the wire: they need not be UTF-8.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from sbxd.port.command import (
    ARGV_BYTES_MAX,
    OUTPUT_BYTES_MAX,
    STDIN_BYTES_MAX,
    ChangeKind,
    Evidence,
    KillReason,
    Usage,
)
from sbxd.port.egress import EgressDestination, EgressPolicy
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec, ImageDigestField
from sbxd.port.errors import EscapeCode, RejectedCode, UnavailableCode, WorkspaceCode
from sbxd.port.ids import EnvironmentIdField
from sbxd.port.limits import ResourceLimits
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.wire.base import Message as Message
from sbxd.wire.base import Request as Request
from sbxd.wire.base import RequestIdField as RequestIdField
from sbxd.wire.descriptions import EnvironmentInfo as EnvironmentInfo
from sbxd.wire.descriptions import ImageFormat as ImageFormat
from sbxd.wire.descriptions import ImageInfo as ImageInfo
from sbxd.wire.descriptions import PostureItem as PostureItem
from sbxd.wire.egress import EgressReply, EgressRequest
from sbxd.wire.greeting import Goodbye as Goodbye
from sbxd.wire.greeting import GoodbyeCode as GoodbyeCode
from sbxd.wire.greeting import Hello as Hello
from sbxd.wire.greeting import Welcome as Welcome
from sbxd.wire.observing import ObservingReply, ObservingRequest
from sbxd.wire.repair import ClearingWord as ClearingWord
from sbxd.wire.repair import QuarantineClear as QuarantineClear
from sbxd.wire.repair import QuarantinedItem as QuarantinedItem
from sbxd.wire.repair import QuarantineIs as QuarantineIs
from sbxd.wire.repair import QuarantineList as QuarantineList
from sbxd.wire.repair import QuarantineWasCleared as QuarantineWasCleared
from sbxd.wire.repair import Reap as Reap
from sbxd.wire.repair import Reaped as Reaped

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 1024 * 1024
CHUNK_BYTES_MAX = 256 * 1024
INITIAL_CREDIT_BYTES = 1024 * 1024
BRIDGE_FRAME_BYTES_MAX = 256 * 1024
BRIDGE_CREDIT_BYTES = 1024 * 1024
BRIDGE_FRAME_COST_BYTES = 64  # of credit, beside its length
REQUESTS_IN_FLIGHT_MAX = 64
WORKSPACE_FILE_BYTES_MAX = 2**40
PATH_BYTES_MAX = 4096

PathField = Annotated[bytes, Meta(max_length=PATH_BYTES_MAX)]
ChunkField = Annotated[bytes, Meta(max_length=CHUNK_BYTES_MAX)]
BridgeDataField = Annotated[bytes, Meta(max_length=BRIDGE_FRAME_BYTES_MAX)]


# --- worker requests --------------------------------------------------------------------------


class Provision(Request, frozen=True, tag="provision", kw_only=True):
    specification: EnvironmentSpec


class WireCommand(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """ExecutionCommand without its stdin, which is uploaded."""

    argv: Annotated[
        tuple[Annotated[bytes, Meta(max_length=ARGV_BYTES_MAX)], ...],
        Meta(min_length=1, max_length=4096),
    ]
    working_directory: PathField
    timeout_seconds: Annotated[int, Meta(ge=1, le=86_400)]
    maximum_output_bytes: Annotated[int, Meta(ge=1, le=OUTPUT_BYTES_MAX)]
    network_enabled: bool = False


class Execute(Request, frozen=True, tag="execute", kw_only=True):
    """bridge: this client serves the environment's bridge while the command runs. Without it the
    command gets neither the socket's path nor the token, and nobody listens."""

    handle: EnvironmentHandle
    command: WireCommand
    stdin_bytes: Annotated[int, Meta(ge=0, le=STDIN_BYTES_MAX)] = 0
    bridge: bool = False


class Destroy(Request, frozen=True, tag="destroy", kw_only=True):
    handle: EnvironmentHandle


class WorkspaceRead(Request, frozen=True, tag="workspace_read", kw_only=True):
    """maximum_bytes: refuse (TOO_LARGE) rather than send more."""

    handle: EnvironmentHandle
    path: PathField
    maximum_bytes: Annotated[int, Meta(ge=0, le=WORKSPACE_FILE_BYTES_MAX)]


class WorkspaceWrite(Request, frozen=True, tag="workspace_write", kw_only=True):
    """Creates or replaces one file atomically; parent directories are made."""

    handle: EnvironmentHandle
    path: PathField
    size_bytes: Annotated[int, Meta(ge=0, le=WORKSPACE_FILE_BYTES_MAX)]


class WorkspaceList(Request, frozen=True, tag="workspace_list", kw_only=True):
    handle: EnvironmentHandle
    path: PathField


class WorkspaceProvenanceQuery(Request, frozen=True, tag="workspace_provenance", kw_only=True):
    handle: EnvironmentHandle
    path: PathField


class NetworkGrantQuery(Request, frozen=True, tag="network_grant", kw_only=True):
    """Which destinations a yes to the network grants: the operator's, and nothing more."""


# --- admin requests (admin socket only) -------------------------------------------------------


class AdminDescribe(Request, frozen=True, tag="admin_describe", kw_only=True):
    """What this daemon is: settings that matter to an operator, images, posture."""


class AdminList(Request, frozen=True, tag="admin_list", kw_only=True):
    """All live environments, oldest first. skip: how many of them an earlier page has shown."""

    skip: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class AdminInspect(Request, frozen=True, tag="admin_inspect", kw_only=True):
    environment_id: EnvironmentIdField


class ImageImport(Request, frozen=True, tag="image_import", kw_only=True):
    """Uploads an uncompressed tar of exactly size_bytes. reference: which image of an archive.

    expected_digest: refuse the import when the resulting manifest digest is another.
    """

    size_bytes: Annotated[int, Meta(ge=512, le=2**40)]
    format: ImageFormat = ImageFormat.ROOTFS
    reference: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    expected_digest: ImageDigestField | None = None
    label: Annotated[str, Meta(max_length=512)] = ""


class ImageList(Request, frozen=True, tag="image_list", kw_only=True):
    pass


class ImageRemove(Request, frozen=True, tag="image_remove", kw_only=True):
    digest: ImageDigestField


class Reconcile(Request, frozen=True, tag="reconcile", kw_only=True):
    """Compare the journal with the kernel's inventory, destroy orphans, report."""


# --- within a request, from the client --------------------------------------------------------


class Upload(Message, frozen=True, tag="upload", kw_only=True):
    request_id: RequestIdField
    data: ChunkField


class Cancel(Message, frozen=True, tag="cancel", kw_only=True):
    """Ask that a request ends early. It still gets its terminal reply."""

    request_id: RequestIdField


class Credit(Message, frozen=True, tag="credit", kw_only=True):
    """The receiver of a stream has consumed this many bytes. Sent in both directions."""

    request_id: RequestIdField
    size_bytes: Annotated[int, Meta(ge=1, le=INITIAL_CREDIT_BYTES)]


class BridgeFrame(Message, frozen=True, tag="bridge_frame", kw_only=True):
    """One frame over the bridge, opaque to the daemon. Sent in both directions."""

    request_id: RequestIdField
    data: BridgeDataField


class BridgeCredit(Message, frozen=True, tag="bridge_credit", kw_only=True):
    """The receiver of frames has taken so much of what they cost. Sent in both directions."""

    request_id: RequestIdField
    size_bytes: Annotated[int, Meta(ge=1, le=BRIDGE_CREDIT_BYTES)]


class BridgeClose(Message, frozen=True, tag="bridge_close", kw_only=True):
    """The client sends no more frames: the program reads the end of the stream."""

    request_id: RequestIdField


class Ping(Message, frozen=True, tag="ping", kw_only=True):
    token: int


class Pong(Message, frozen=True, tag="pong", kw_only=True):
    token: int


# --- replies ----------------------------------------------------------------------------------


class OutputStream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


class Output(Message, frozen=True, tag="output", kw_only=True):
    request_id: RequestIdField
    stream: OutputStream
    data: ChunkField


class Content(Message, frozen=True, tag="content", kw_only=True):
    """A piece of the file that WorkspaceRead asked for."""

    request_id: RequestIdField
    data: ChunkField


class BridgeOpened(Message, frozen=True, tag="bridge_opened", kw_only=True):
    """A program of the command has presented the token. At most once in a request."""

    request_id: RequestIdField


class BridgeEnd(StrEnum):
    """ENDED: by the program. FRAME_ILLEGAL: an empty, too long or cut one. TURN_BYTES: more, in
    either direction, than a turn may carry. BUDGET: more than the environment may return."""

    ENDED = "ENDED"
    FRAME_ILLEGAL = "FRAME_ILLEGAL"
    TURN_BYTES = "TURN_BYTES"
    BUDGET = "BUDGET"


class BridgeClosed(Message, frozen=True, tag="bridge_closed", kw_only=True):
    """The program sends no more frames. After ENDED it may still read the client's."""

    request_id: RequestIdField
    reason: BridgeEnd


class WireChange(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: PathField
    change: ChangeKind
    size_bytes: int
    sha256: str | None


class Entries(Message, frozen=True, tag="entries", kw_only=True):
    """Some of files_changed, or of a listing, whose paths are relative to the listed folder. Not
    under credit; bounded by the listing's cap."""

    request_id: RequestIdField
    entries: Annotated[tuple[WireChange, ...], Meta(max_length=1024)]


class Provisioned(Message, frozen=True, tag="provisioned", kw_only=True):
    request_id: RequestIdField
    handle: EnvironmentHandle


class Executed(Message, frozen=True, tag="executed", kw_only=True):
    """Terminal reply of Execute; stdout, stderr and files_changed were streamed before it."""

    request_id: RequestIdField
    exit_code: int | None
    signal: int | None
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    killed_by: KillReason | None
    files_changed_truncated: bool
    duration_ms: int
    evidence: Evidence
    usage: Usage
    unenforced_limits: tuple[str, ...] = ()


class Done(Message, frozen=True, tag="done", kw_only=True):
    """Terminal reply of Destroy, WorkspaceWrite, ImageRemove."""

    request_id: RequestIdField


class Listed(Message, frozen=True, tag="listed", kw_only=True):
    """Terminal reply of WorkspaceList. truncated: the directory holds more entries than were
    sent."""

    request_id: RequestIdField
    truncated: bool


class ContentEnd(Message, frozen=True, tag="content_end", kw_only=True):
    """Terminal reply of WorkspaceRead: the file is complete, and this is what the daemon read."""

    request_id: RequestIdField
    size_bytes: Annotated[int, Meta(ge=0, le=2**53)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class ProvenanceIs(Message, frozen=True, tag="provenance_is", kw_only=True):
    request_id: RequestIdField
    provenance: WorkspaceProvenance


class NetworkGrantIs(Message, frozen=True, tag="network_grant_is", kw_only=True):
    """policy: as a specification may carry it."""

    request_id: RequestIdField
    policy: EgressPolicy


class Unavailable(Message, frozen=True, tag="unavailable", kw_only=True):
    """retry_after_ms: before that nothing will have changed; None when that is not known."""

    request_id: RequestIdField
    code: UnavailableCode
    detail: str
    retry_after_ms: Annotated[int, Meta(ge=0, le=3_600_000)] | None = None


class Rejected(Message, frozen=True, tag="rejected", kw_only=True):
    request_id: RequestIdField
    code: RejectedCode
    detail: str
    field: str | None = None


class EscapeSuspected(Message, frozen=True, tag="escape_suspected", kw_only=True):
    request_id: RequestIdField
    code: EscapeCode
    detail: str


class WorkspaceEscaped(Message, frozen=True, tag="workspace_escaped", kw_only=True):
    request_id: RequestIdField
    detail: str


class WorkspaceFailed(Message, frozen=True, tag="workspace_failed", kw_only=True):
    request_id: RequestIdField
    code: WorkspaceCode
    detail: str


class Cancelled(Message, frozen=True, tag="cancelled", kw_only=True):
    """Terminal reply of a cancelled request that has no result of its own (not of an Execute
    whose command was started)."""

    request_id: RequestIdField


class Described(Message, frozen=True, tag="described", kw_only=True):
    request_id: RequestIdField
    version: str
    mechanism: str
    deployment_mode: str
    default_limits: ResourceLimits
    ceilings: ResourceLimits
    default_image: str | None
    image_aliases: dict[str, str]
    destinations: tuple[EgressDestination, ...]
    reserve_ready: int
    reserve_target: int
    environments: int
    posture: tuple[PostureItem, ...]


class Environments(Message, frozen=True, tag="environments", kw_only=True):
    """more: the page is full and AdminList with a larger `skip` shows the rest."""

    request_id: RequestIdField
    environments: tuple[EnvironmentInfo, ...]
    more: bool = False


class Images(Message, frozen=True, tag="images", kw_only=True):
    request_id: RequestIdField
    images: tuple[ImageInfo, ...]


class ImageImported(Message, frozen=True, tag="image_imported", kw_only=True):
    request_id: RequestIdField
    image: ImageInfo


class Reconciled(Message, frozen=True, tag="reconciled", kw_only=True):
    request_id: RequestIdField
    destroyed: tuple[str, ...]
    quarantined: tuple[str, ...]
    released: tuple[str, ...] = ()


WorkerRequest = (
    Provision
    | Execute
    | Destroy
    | WorkspaceRead
    | WorkspaceWrite
    | WorkspaceList
    | WorkspaceProvenanceQuery
    | NetworkGrantQuery
)
ImageRequest = ImageImport | ImageList | ImageRemove
AdminRequest = (
    AdminDescribe
    | AdminList
    | AdminInspect
    | ImageRequest
    | Reconcile
    | Reap
    | QuarantineList
    | QuarantineClear
    | EgressRequest
    | ObservingRequest
)
AnyRequest = WorkerRequest | AdminRequest
BridgeMessage = BridgeFrame | BridgeCredit | BridgeClose
ClientMessage = Hello | AnyRequest | Upload | Cancel | Credit | BridgeMessage | Ping | Pong
TerminalReply = (
    Provisioned | Executed | Done | Listed | ContentEnd | ProvenanceIs | NetworkGrantIs
    | Unavailable | Rejected | EscapeSuspected | WorkspaceEscaped | WorkspaceFailed | Cancelled
    | Described | Environments | Images | ImageImported | Reconciled | Reaped | QuarantineIs
    | QuarantineWasCleared | EgressReply | ObservingReply
)  # fmt: skip
ServerMessage = (
    Welcome
    | Goodbye
    | Output
    | Content
    | Entries
    | Credit
    | BridgeOpened
    | BridgeFrame
    | BridgeCredit
    | BridgeClosed
    | Ping
    | Pong
    | TerminalReply
)
