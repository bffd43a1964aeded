"""The frames between the daemon and an environment's init: one SOCK_SEQPACKET message each.

Invariants: stdlib only; fixed grammar; strings are NUL-terminated bytes and hold no NUL; a frame
that does not parse exactly is refused whole. The guest never holds either end of this channel.
Init's words are trusted for exit statuses and for nothing else: `killed_by` never rests on them.
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct, error

# The number of the launcher's own command: before the daemon has the channel, and never after,
# since numbers rise. Its RUN carries the program as a fourth descriptor.
CANARY = 0
RUN_DESCRIPTORS = 3
CANARY_DESCRIPTORS = 4
FRAME_BYTES_MAX = 192 * 1024  # below the kernel's default send buffer for one message


class FrameError(ValueError):
    """The bytes are not a frame of this grammar."""


class Verb(IntEnum):
    PARK = 1  # daemon: make a child in this leaf and let it wait (descriptor: leaf directory)
    RUN = 2  # daemon: let the parked child exec (descriptors: stdin, stdout, stderr)
    PARKED = 3  # init: the child of leaf n waits
    STARTED = 4  # init: its exec succeeded
    FAILED = 5  # init: PARK or RUN failed at a step with an errno; the child is gone
    EXITED = 6  # init: the main process of leaf n ended with this wait status
    READY = 7  # init: construction is complete
    # Of a sandbox with a kernel of its own alone, whose process 1 has no leaf to be killed by:
    KILL = 8  # daemon: kill every process but process 1
    QUIET = 9  # init: of command n nothing is left; after its EXITED
    FILTER = 11  # launcher: the seccomp program that binds every command from now on
    LIMIT = 10  # daemon: the number is how many processes a command may have from now on
    PORT = 20  # daemon: bind the proxy's port (1), or give it up for good (0)
    DOOR = 21  # daemon: serve this door until the next command has ended (descriptors: two)


@dataclass(frozen=True)
class Park:
    number: int


@dataclass(frozen=True)
class Run:
    """argv[0] is absolute or a bare name looked up on `path` (a fixed, colon-separated PATH)."""

    number: int
    working_directory: bytes  # relative to /workspace; b"." for the root
    argv: tuple[bytes, ...]
    environment: tuple[bytes, ...]  # NAME=value
    search_path: bytes


@dataclass(frozen=True)
class Parked:
    number: int


@dataclass(frozen=True)
class Started:
    number: int


@dataclass(frozen=True)
class RunFailed:
    number: int
    errno: int
    step: str


@dataclass(frozen=True)
class Exited:
    """wait_status as of waitpid."""

    number: int
    wait_status: int


@dataclass(frozen=True)
class Ready:
    pass


@dataclass(frozen=True)
class Kill:
    number: int


@dataclass(frozen=True)
class Quiet:
    number: int


@dataclass(frozen=True)
class Limit:
    processes_max: int


@dataclass(frozen=True)
class Port:
    """wanted: 1 to bind it, 0 to give it up."""

    wanted: int


class Which(IntEnum):
    """The doors of a sandbox that has a kernel of its own."""

    PROXY = 0
    BRIDGE = 1


@dataclass(frozen=True)
class Door:
    """Two SOCK_SEQPACKET sockets come along. On the first the daemon offers one socket at a time
    (one byte and the descriptor), and the sandbox says with one byte that a connection has taken
    it. On the second either says which connection (a number of four bytes in the machine's order,
    from 0) it is about to end properly."""

    which: Which


@dataclass(frozen=True)
class Filter:
    """program: struct sock_filter[]."""

    program: bytes


Frame = (
    Park | Run | Parked | Started | RunFailed | Exited | Ready | Kill | Quiet | Limit | Filter
    | Port | Door
)  # fmt: skip

_HEAD = Struct("!BI")
_RUN = Struct("!HH")
_NUMBER = Struct("!i")


def run_descriptors(number: int) -> int:
    """How many descriptors the RUN of this number carries."""
    return CANARY_DESCRIPTORS if number == CANARY else RUN_DESCRIPTORS


def _strings(*values: bytes) -> bytes:
    for value in values:
        if b"\0" in value:
            raise FrameError("a string of a frame may not hold a NUL byte")
    return b"".join(value + b"\0" for value in values)


def encode(frame: Frame) -> bytes:
    """The bytes of one frame.

    Raises FrameError when a string holds NUL, argv is empty, a number does not fit its field, or
    the whole is too long.
    """
    try:
        raw = _pack(frame)
    except (error, UnicodeEncodeError) as problem:
        raise FrameError(str(problem)) from None
    if len(raw) > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {len(raw)} bytes is above the cap of {FRAME_BYTES_MAX}")
    return raw


def _pack(frame: Frame) -> bytes:
    match frame:
        case Park():
            raw = _HEAD.pack(Verb.PARK, frame.number)
        case Run():
            if not frame.argv:
                raise FrameError("argv is empty")
            raw = (
                _HEAD.pack(Verb.RUN, frame.number)
                + _RUN.pack(len(frame.argv), len(frame.environment))
                + _strings(
                    frame.working_directory, frame.search_path, *frame.argv, *frame.environment
                )
            )
        case Parked():
            raw = _HEAD.pack(Verb.PARKED, frame.number)
        case Started():
            raw = _HEAD.pack(Verb.STARTED, frame.number)
        case RunFailed():
            raw = (
                _HEAD.pack(Verb.FAILED, frame.number)
                + _NUMBER.pack(frame.errno)
                + _strings(frame.step.encode("ascii"))
            )
        case Exited():
            raw = _HEAD.pack(Verb.EXITED, frame.number) + _NUMBER.pack(frame.wait_status)
        case Ready():
            raw = _HEAD.pack(Verb.READY, 0)
        case Kill():
            raw = _HEAD.pack(Verb.KILL, frame.number)
        case Quiet():
            raw = _HEAD.pack(Verb.QUIET, frame.number)
        case Limit():
            raw = _HEAD.pack(Verb.LIMIT, frame.processes_max)
        case Filter():
            raw = _HEAD.pack(Verb.FILTER, 0) + frame.program
        case Port():
            raw = _HEAD.pack(Verb.PORT, frame.wanted)
        case Door():
            raw = _HEAD.pack(Verb.DOOR, frame.which)
    return raw


def decode(raw: bytes) -> Frame:
    """The frame that these bytes are. Raises FrameError for anything else whatever."""
    try:
        verb, number = _HEAD.unpack_from(raw)
        rest = raw[_HEAD.size :]
        match Verb(verb):
            case Verb.PARK if not rest:
                return Park(number)
            case Verb.PARKED if not rest:
                return Parked(number)
            case Verb.STARTED if not rest:
                return Started(number)
            case Verb.READY if not rest and number == 0:
                return Ready()
            case Verb.KILL if not rest:
                return Kill(number)
            case Verb.QUIET if not rest:
                return Quiet(number)
            case Verb.LIMIT if not rest:
                return Limit(number)
            case Verb.PORT if not rest and number <= 1:
                return Port(number)
            case Verb.DOOR if not rest:
                return Door(Which(number))
            case Verb.FILTER if number == 0 and rest and len(rest) % 8 == 0:
                return Filter(rest)
            case Verb.EXITED:
                (status,) = _NUMBER.unpack(rest)
                return Exited(number, status)
            case Verb.FAILED:
                (errno,) = _NUMBER.unpack_from(rest)
                (step,) = _split(rest[_NUMBER.size :], 1)
                return RunFailed(number, errno, step.decode("ascii"))
            case Verb.RUN:
                argc, envc = _RUN.unpack_from(rest)
                values = _split(rest[_RUN.size :], 2 + argc + envc)
                if argc < 1:
                    raise FrameError("argv is empty")
                return Run(number, values[0], values[2 : 2 + argc], values[2 + argc :], values[1])
    except (error, ValueError, UnicodeDecodeError) as problem:
        raise FrameError(str(problem)) from None
    raise FrameError("trailing bytes")


def _split(raw: bytes, count: int) -> tuple[bytes, ...]:
    parts = raw.split(b"\0")
    if parts.pop() != b"" or len(parts) != count:
        raise FrameError(f"expected {count} strings")
    return tuple(parts)
