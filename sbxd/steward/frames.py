"""The frames between the daemon and a steward, over one SOCK_STREAM channel.

A frame is a 4-byte big-endian length, one byte of kind and a body. The daemon asks, the steward
answers with any number of OPENED, DATA and ENTRY frames and then with exactly one END; one request
is under way at a time. STOP is the one exception: it may be sent at any time, ends what is under
way with ABORTED, and is ignored when nothing is.

Invariants: stdlib only, used by both sides; both caps are hard; names are bytes; what does not
parse exactly is refused whole. The steward may have been compromised by the tree that it walks:
the daemon believes its frames only as data of the environment itself.
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct, error

DATA_BYTES_MAX = 256 * 1024
PATH_BYTES_MAX = 4096
NAME_BYTES_MAX = 255
FRAME_BYTES_MAX = DATA_BYTES_MAX + 64
ENTRIES_MAX = 100_000
READ_BYTES_MAX = 4 * DATA_BYTES_MAX
STAMP_BYTES = 40
NO_STAMP = bytes(STAMP_BYTES)

LENGTH = Struct("!I")
_CHANGES = Struct("!IQ")
_READ = Struct(f"!QQI{STAMP_BYTES}s")
_BEGIN = Struct("!Q")
_TICKET = Struct("!Q")
_LIST = Struct("!IQB")
_OPENED = Struct(f"!Q{STAMP_BYTES}s")
_ENTRY = Struct("!BBQ32s")
_END = Struct("!BBQQ")


class FrameError(ValueError):
    """The bytes are not a frame of this grammar."""


class Verb(IntEnum):
    """The kinds. The daemon sends those below 32."""

    STOP = 1
    SNAPSHOT = 2
    CHANGES = 3
    READ = 4
    BEGIN = 5
    PIECE = 6
    COMMIT = 7
    ABANDON = 8
    LIST = 9
    PROVENANCE = 10
    USAGE = 11
    OPENED = 32
    DATA = 33
    ENTRY = 34
    END = 35


class Status(IntEnum):
    """How a request ended."""

    OK = 0
    NOT_FOUND = 1
    NOT_A_FILE = 2
    NOT_A_DIRECTORY = 3
    IS_A_DIRECTORY = 4
    HARD_LINKED = 5
    TOO_LARGE = 6
    NO_SPACE = 7
    CHANGED_DURING_READ = 8
    REFUSED = 9
    ESCAPE = 10
    ABORTED = 11


class Kind(IntEnum):
    """What happened to an entry."""

    CREATED = 1
    MODIFIED = 2
    DELETED = 3


class Origin(IntEnum):
    """Who put a file where it is."""

    UNKNOWN = 0
    TOOL_WRITTEN = 1
    SANDBOX_WRITTEN = 2


@dataclass(frozen=True)
class Stop:
    """End what is under way."""


@dataclass(frozen=True)
class Snapshot:
    """Remember the tree: a command is about to run. END's `first` and `second` are device and
    inode of the tree's root."""


@dataclass(frozen=True)
class Changes:
    """Answered by at most `maximum` ENTRY frames in bytewise order of their paths, and an END
    whose flag says that there were more; `first` and `second` are bytes and inodes in use.
    At most `hash_bytes` of file content, and never more than the volume can hold, are read for
    digests: what does not fit (a sparse file) is told without."""

    maximum: int
    hash_bytes: int


@dataclass(frozen=True)
class Read:
    """A piece of one regular file: OPENED, DATA frames of `length` bytes in all (fewer at the end
    of the file), END. `stamp` is that of the first piece's OPENED, NO_STAMP for the first."""

    maximum_bytes: int
    offset: int
    length: int
    stamp: bytes
    path: bytes


@dataclass(frozen=True)
class Begin:
    """Start a file of exactly `size` bytes. END's `first` is the ticket of what follows."""

    size: int
    path: bytes


@dataclass(frozen=True)
class Piece:
    """The next bytes of the file. An error ends the file."""

    ticket: int
    data: bytes


@dataclass(frozen=True)
class Commit:
    """Put the finished file at its path, in one step."""

    ticket: int


@dataclass(frozen=True)
class Abandon:
    """Forget an unfinished file. An unknown ticket is no error."""

    ticket: int


@dataclass(frozen=True)
class List:
    """A page of one directory, answered as CHANGES, with names in the place of paths: what comes
    after the name `after` (b"" for the first page). It may be shorter than `maximum` before others.
    END's flag says that there is more; `first` is how many bytes were read for digests, `second`
    how many names of the directory are too long to be a path."""

    maximum: int
    hash_bytes: int
    after: bytes
    path: bytes


@dataclass(frozen=True)
class Provenance:
    """END's `first` is an Origin."""

    path: bytes


@dataclass(frozen=True)
class Usage:
    """END's `first` and `second` are bytes and inodes in use."""


@dataclass(frozen=True)
class Opened:
    """size: of the whole file. stamp: its identity and state."""

    size: int
    stamp: bytes


@dataclass(frozen=True)
class Data:
    data: bytes


@dataclass(frozen=True)
class Entry:
    """digest: SHA-256, or None."""

    kind: Kind
    size: int
    digest: bytes | None
    path: bytes


@dataclass(frozen=True)
class End:
    status: Status
    truncated: bool = False
    first: int = 0
    second: int = 0


Request = (
    Stop | Snapshot | Changes | Read | Begin | Piece | Commit | Abandon | List | Provenance | Usage
)
Reply = Opened | Data | Entry | End


def encode(frame: Request | Reply) -> bytes:
    """The bytes of one frame, its length included. Raises FrameError above the cap and for what
    is no path relative to the workspace."""
    kind, body = _body(frame)
    if len(body) >= FRAME_BYTES_MAX:
        raise FrameError(f"a body of {len(body)} bytes is above the cap")
    return b"".join((LENGTH.pack(1 + len(body)), bytes((kind,)), body))


def _body(frame: Request | Reply) -> tuple[Verb, bytes]:
    match frame:
        case Stop():
            return Verb.STOP, b""
        case Snapshot():
            return Verb.SNAPSHOT, b""
        case Changes():
            return Verb.CHANGES, _CHANGES.pack(frame.maximum, frame.hash_bytes)
        case Read():
            head = _READ.pack(frame.maximum_bytes, frame.offset, frame.length, frame.stamp)
            return Verb.READ, head + _path(frame.path)
        case Begin():
            return Verb.BEGIN, _BEGIN.pack(frame.size) + _path(frame.path)
        case Piece():
            return Verb.PIECE, _TICKET.pack(frame.ticket) + frame.data
        case Commit():
            return Verb.COMMIT, _TICKET.pack(frame.ticket)
        case Abandon():
            return Verb.ABANDON, _TICKET.pack(frame.ticket)
        case List():
            head = _LIST.pack(frame.maximum, frame.hash_bytes, len(frame.after))
            return Verb.LIST, head + frame.after + _path(frame.path)
        case Provenance():
            return Verb.PROVENANCE, _path(frame.path)
        case Usage():
            return Verb.USAGE, b""
        case Opened():
            return Verb.OPENED, _OPENED.pack(frame.size, frame.stamp)
        case Data():
            return Verb.DATA, frame.data
        case Entry():
            digest = frame.digest or bytes(32)
            flag = int(frame.digest is not None)
            head = _ENTRY.pack(frame.kind, flag, frame.size, digest)
            return Verb.ENTRY, head + _path(frame.path)
        case End():
            return Verb.END, _END.pack(frame.status, frame.truncated, frame.first, frame.second)


def body_length(head: bytes) -> int:
    """How many bytes follow these four. Raises FrameError outside the cap."""
    (length,) = LENGTH.unpack(head)
    if not 1 <= length <= FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {length} bytes is outside the cap")
    return int(length)


def decode_request(raw: bytes) -> Request:
    """The request that these bytes (without the length) are. Raises FrameError."""
    kind, body = raw[:1], raw[1:]
    try:
        match Verb(kind[0]):
            case Verb.STOP if not body:
                return Stop()
            case Verb.SNAPSHOT if not body:
                return Snapshot()
            case Verb.CHANGES:
                maximum, hash_bytes = _CHANGES.unpack(body)
                if maximum <= ENTRIES_MAX:
                    return Changes(maximum, hash_bytes)
            case Verb.READ:
                maximum, offset, length, stamp = _READ.unpack_from(body)
                if length <= READ_BYTES_MAX:
                    return Read(maximum, offset, length, stamp, _path(body[_READ.size :]))
            case Verb.BEGIN:
                (size,) = _BEGIN.unpack_from(body)
                return Begin(size, _path(body[_BEGIN.size :]))
            case Verb.PIECE if len(body) <= _TICKET.size + DATA_BYTES_MAX:
                (ticket,) = _TICKET.unpack_from(body)
                return Piece(ticket, body[_TICKET.size :])
            case Verb.COMMIT:
                return Commit(*_TICKET.unpack(body))
            case Verb.ABANDON:
                return Abandon(*_TICKET.unpack(body))
            case Verb.LIST:
                maximum, hash_bytes, length = _LIST.unpack_from(body)
                after, path = body[_LIST.size :][:length], body[_LIST.size + length :]
                if 0 < maximum <= ENTRIES_MAX and len(after) == length:
                    return List(maximum, hash_bytes, after, _path(path))
            case Verb.PROVENANCE:
                return Provenance(_path(body))
            case Verb.USAGE if not body:
                return Usage()
    except (error, ValueError, IndexError) as problem:
        raise FrameError(str(problem)) from None
    raise FrameError("not a request")


def decode_reply(raw: bytes) -> Reply:
    """The reply that these bytes (without the length) are. Raises FrameError."""
    kind, body = raw[:1], raw[1:]
    try:
        match Verb(kind[0]):
            case Verb.OPENED:
                return Opened(*_OPENED.unpack(body))
            case Verb.DATA if 0 < len(body) <= DATA_BYTES_MAX:
                return Data(body)
            case Verb.ENTRY:
                change, flag, size, digest = _ENTRY.unpack_from(body)
                path = _path(body[_ENTRY.size :])
                if flag in (0, 1) and path != b".":
                    return Entry(Kind(change), size, digest if flag else None, path)
            case Verb.END:
                status, flag, first, second = _END.unpack(body)
                if flag in (0, 1):
                    return End(Status(status), bool(flag), first, second)
    except (error, ValueError, IndexError) as problem:
        raise FrameError(str(problem)) from None
    raise FrameError("not a reply")


def _path(raw: bytes) -> bytes:
    """A path relative to the workspace; b"." is the workspace itself. Raises FrameError."""
    if raw == b".":
        return raw
    if not raw or len(raw) > PATH_BYTES_MAX or b"\0" in raw:
        raise FrameError("not a relative path")
    for component in raw.split(b"/"):
        if component in (b"", b".", b"..") or len(component) > NAME_BYTES_MAX:
            raise FrameError("not a relative path")
    return raw
