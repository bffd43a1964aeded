"""How many forks a guest's kernel has refused: what the Sentry tells, counted.

The host's kernel counts threads of the Sentry and its stubs, not processes of the guest, and a
guest's limit refuses without a count. So this is the Sentry's word (decision 0113): a guest that
has taken its Sentry over can keep it back or make it up, and so only end its own command with PIDS
instead of TIMEOUT, or the other way round.

The form is that of gVisor's remote sink: a header of little-endian numbers (its own size, the kind
of the message, how many were dropped), then a protocol buffer, whose field 2 is the exit of the
call, whose field 2 is the errno.

Invariants: nothing of a message is kept but whether it is a refusal; one that does not parse is
none; at most `MESSAGES_MAX` are read at a time, and no more often than the caller's pace or
`PACE_SECONDS`, so that a guest cannot keep the daemon busy: what is not read, the Sentry drops.
"""

import errno
import socket
from struct import Struct
from struct import error as StructError

import trio

from sbxd import rights

MESSAGES_MAX = 512
PACE_SECONDS = 0.01
_ROUNDS_MAX = 8  # more than a socket holds
_MESSAGE_BYTES_MAX = 2048
_HEADER = Struct("<HHI")
_EXIT_FIELD = 2
_ERRNO_FIELD = 2
_VARINT_BYTES_MAX = 10
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5


class BadMessage(ValueError):
    """These bytes are not a message of the sink's form."""


def refused(raw: bytes) -> bool:
    """Whether this message tells of a call that ended with EAGAIN. Raises BadMessage."""
    try:
        size, _, _ = _HEADER.unpack_from(raw)
    except StructError:
        raise BadMessage("no header") from None
    if size < _HEADER.size or size > len(raw):
        raise BadMessage("the header's size")
    exit_of_call = _field(raw[size:], _EXIT_FIELD)
    if not isinstance(exit_of_call, bytes):
        return False
    return _field(exit_of_call, _ERRNO_FIELD) == errno.EAGAIN


def _field(raw: bytes, wanted: int) -> int | bytes | None:
    """The first field of this number. Raises BadMessage."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _varint(raw, at)
        else:
            if kind == _LEN:
                size, at = _varint(raw, at)
            elif kind in (_I64, _I32):
                size = 8 if kind == _I64 else 4
            else:
                raise BadMessage("the kind of a field")
            if size > len(raw) - at:
                raise BadMessage("a field is cut off")
            value = raw[at : at + size]
            at += size
        if number == wanted:
            return value
    return None


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for position in range(_VARINT_BYTES_MAX):
        if at + position >= len(raw):
            break
        byte = raw[at + position]
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, at + position + 1
    raise BadMessage("a number is cut off")


class RefusedForks:
    """The count of one Sentry. Owns its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        rights.refuse(self._socket)
        self._socket.setblocking(False)
        self._count = 0
        self._is_open = True

    def begin(self) -> None:
        """A command is about to start: what is told of earlier ones is forgotten."""
        for _ in range(_ROUNDS_MAX):
            if self._read_some() < MESSAGES_MAX:
                break
        self._count = 0

    def count(self) -> int:
        """Refused forks since `begin`, as far as they have been read."""
        self._read_some()
        return self._count

    async def wait_more(self) -> None:
        """Until more are told than have been counted; forever when the Sentry tells no more."""
        seen = self._count
        while self._is_open:
            await trio.lowlevel.wait_readable(self._socket)
            self._read_some()
            if self._count > seen:
                return
            await trio.sleep(PACE_SECONDS)
        await trio.sleep_forever()

    def _read_some(self) -> int:
        """Count what is there, at most MESSAGES_MAX; how many messages that were."""
        for number in range(MESSAGES_MAX):
            if not self._is_open:
                return number
            try:
                raw = self._socket.recv(_MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return number
            except OSError:
                raw = b""
            if not raw:
                self._is_open = False
                return number
            try:
                self._count += refused(raw)
            except BadMessage:
                continue
        return MESSAGES_MAX

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        self._is_open = False
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
