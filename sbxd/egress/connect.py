"""The head of a CONNECT request, from bytes to one event, without input or output.

Theory: the head is judged byte by byte, so the event is a function of the shortest prefix that
decides, and no split of the bytes changes it. What follows the head ("early bytes") belongs to the
tunnel: it is kept as it came and never looked at. A head that any server could read in two ways is
malformed: line ends other than CR LF, controls, bytes that are not ASCII, folded lines, a body.

Invariants: at most `head_bytes_max` bytes of head are held; a host in an event is in canonical
form, so never an address or what a resolver reads as one; nothing here looks up a name; after the
first event the parser gives no other.

Deliberately absent: every method but CONNECT; the request's header fields, which decide nothing
(Host included: the target of the request line is the destination).
"""

import re
from enum import StrEnum

from msgspec import Struct

from sbxd.policy.destinations import (
    PORT_MAX,
    DestinationInvalid,
    canonical_requested_host,
    parse_port,
)

HEAD_BYTES_MAX = 8192

_METHOD = re.compile(rb"[A-Z][A-Z-]{0,31}")
_VERSION = re.compile(rb"HTTP/1\.[01]")
# RFC 9110, 5.1: a token, and no space before the colon.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([ -~]*)")
# All that a line may not hold: controls (CR LF ends it and is taken off before), DEL, not ASCII.
_ILLEGAL = re.compile(rb"[^ -~]")


class Flaw(StrEnum):
    """Why a head is malformed."""

    BYTES = "BYTES"
    LINE_END = "LINE_END"
    REQUEST_LINE = "REQUEST_LINE"
    VERSION = "VERSION"
    TARGET = "TARGET"
    HOST = "HOST"
    PORT = "PORT"
    FIELD = "FIELD"
    BODY = "BODY"
    INCOMPLETE = "INCOMPLETE"


class Request(Struct, frozen=True, kw_only=True):
    """A well-formed CONNECT: a canonical host and a port from 1 to 65535."""

    host: str
    port: int


class Malformed(Struct, frozen=True, kw_only=True):
    """Not a request that this proxy reads. detail: for people, holds nothing of the request."""

    flaw: Flaw
    detail: str


class MethodNotAllowed(Struct, frozen=True, kw_only=True):
    """A request of HTTP/1 whose method is not CONNECT."""


class TooLarge(Struct, frozen=True, kw_only=True):
    """More than the most bytes of head, and not at its end."""


Event = Request | Malformed | MethodNotAllowed | TooLarge


class ConnectParser:
    """Reads one head. Feed `receive` until it returns an event."""

    def __init__(self, *, head_bytes_max: int = HEAD_BYTES_MAX) -> None:
        self._room = head_bytes_max
        self._line = bytearray()
        self._request: Request | None = None
        self._event: Event | None = None
        self._early = b""

    @property
    def early(self) -> bytes:
        """What came after the head; empty before a Request has been returned."""
        return self._early

    @property
    def has_begun(self) -> bool:
        """Whether any byte has come."""
        return bool(self._line) or self._request is not None or self._event is not None

    def receive(self, data: bytes) -> Event | None:
        """Take the next bytes; None while the head is incomplete.

        After an event the bytes are the tunnel's if it was a Request, and dropped if not.
        """
        at = 0
        while self._event is None and at < len(data):
            newline = data.find(b"\n", at)
            end = len(data) if newline < 0 else newline + 1
            piece = data[at : min(end, at + self._room)]
            self._room -= len(piece)
            at += len(piece)
            self._event = self._take(piece)
            if self._event is None and self._room == 0 and at < len(data):
                self._event = TooLarge()
        if isinstance(self._event, Request):
            self._early += data[at:]
        return self._event

    def end(self) -> Event | None:
        """The peer sends nothing more. None when it never sent anything."""
        if self._event is None and self.has_begun:
            self._event = _malformed(Flaw.INCOMPLETE, "the request ends before its empty line")
        return self._event

    def _take(self, piece: bytes) -> Event | None:
        """A piece that holds at most one line's end, at its own end."""
        before = len(self._line)
        self._line += piece
        ended = piece.endswith(b"\n")
        # A CR is legal as the last byte before LF; while it is the last there is, it is open.
        text_end = len(self._line) - ended
        has_return = self._line.endswith(b"\r", 0, text_end)
        flawed = _ILLEGAL.search(self._line, max(before - 1, 0), text_end - has_return)
        if flawed is not None:
            return _illegal(flawed[0])
        if not ended:
            return None
        if not has_return:
            return _malformed(Flaw.LINE_END, "each line of the request ends in CR LF")
        line = bytes(self._line[:-2])
        self._line.clear()
        if self._request is None:
            return self._start(line)
        if not line:
            return self._request
        return _field_flaw(line)

    def _start(self, line: bytes) -> Event | None:
        parts = line.split(b" ")
        if len(parts) != 3 or not all(parts) or not _METHOD.fullmatch(parts[0]):
            return _malformed(
                Flaw.REQUEST_LINE, "the request line is: CONNECT host:port HTTP/1.1, one space each"
            )
        method, target, version = parts
        if not _VERSION.fullmatch(version):
            return _malformed(Flaw.VERSION, "the version is HTTP/1.1 or HTTP/1.0")
        if method != b"CONNECT":
            return MethodNotAllowed()
        requested = _target(target)
        if isinstance(requested, Request):
            self._request = requested
            return None
        return requested


def _target(target: bytes) -> Request | Malformed:
    host, colon, digits = target.rpartition(b":")
    if not colon or any(mark in target for mark in b"/@?#\\%"):
        return _malformed(Flaw.TARGET, "the target is host:port and nothing else")
    port = parse_port(digits.decode("latin-1"))
    if port is None:
        return _malformed(Flaw.PORT, f"the port is a decimal number from 1 to {PORT_MAX}")
    try:
        return Request(host=canonical_requested_host(host.decode("ascii")), port=port)
    except DestinationInvalid:
        return _malformed(
            Flaw.HOST,
            "the host is a DNS name of letters, digits and hyphens: no address, no brackets, "
            "no wildcard, no dot at its end",
        )


def _field_flaw(line: bytes) -> Malformed | None:
    field = _FIELD.fullmatch(line)
    if field is None:
        return _malformed(Flaw.FIELD, "a header field is name: value on one line")
    name, value = field[1].lower(), field[2].strip(b" ")
    if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
        return _malformed(Flaw.BODY, "a CONNECT request has no body")
    return None


def _illegal(byte: bytes | bytearray) -> Malformed:
    if byte == b"\r":
        return _malformed(Flaw.LINE_END, "each line of the request ends in CR LF")
    return _malformed(
        Flaw.BYTES, "the request is printable ASCII: this proxy speaks HTTP/1 CONNECT and no other"
    )


def _malformed(flaw: Flaw, detail: str) -> Malformed:
    return Malformed(flaw=flaw, detail=detail)
