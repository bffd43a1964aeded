"""The server name of a TLS ClientHello, from bytes, without input or output.

Theory: with `require_matching_sni` the first bytes of a tunnel have to be one whole ClientHello
whose server name is the host that was asked for. The reader wants exactly that: handshake records
that hold the ClientHello and nothing else, one server_name extension with one host name. What it
cannot read it does not pass on.

Invariants: at most `HELLO_BYTES_MAX` bytes are held; no split of the bytes changes the result.

Deliberately absent: every other part of TLS. With Encrypted ClientHello the name is the outer
one: the inner one cannot be read, so a destination that shares a front with others and offers ECH
can still be used to reach them.
"""

from enum import StrEnum

from msgspec import Struct

HELLO_BYTES_MAX = 32 * 1024

_HANDSHAKE_OF_TLS = b"\x16\x03"  # record type, major version
_RECORD_BYTES_MAX = 2**14
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0


class HelloFlaw(StrEnum):
    """NOT_TLS: no ClientHello, or one that no server should read. NO_NAME: none in it."""

    NOT_TLS = "NOT_TLS"
    NO_NAME = "NO_NAME"


class Hello(Struct, frozen=True, kw_only=True):
    """A ClientHello. server_name: ASCII, lower case, as it stands there otherwise."""

    server_name: str


class HelloReader:
    """Reads one ClientHello. Feed `receive` until it returns something."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._at = 0  # where the next record begins
        self._message = bytearray()  # the handshake message so far
        self._result: Hello | HelloFlaw | None = None

    @property
    def held(self) -> bytes:
        """Every byte that was received, in order."""
        return bytes(self._held)

    def receive(self, data: bytes) -> Hello | HelloFlaw | None:
        """Take the next bytes; None while the ClientHello is incomplete."""
        self._held += data
        if self._result is None:
            self._result = self._read()
            if self._result is None and len(self._held) > HELLO_BYTES_MAX:
                self._result = HelloFlaw.NOT_TLS
        return self._result

    def _read(self) -> Hello | HelloFlaw | None:
        while True:
            header = bytes(self._held[self._at : self._at + 5])
            if not _HANDSHAKE_OF_TLS.startswith(header[:2]):
                return HelloFlaw.NOT_TLS
            if len(header) < 5:
                return None
            length = int.from_bytes(header[3:5])
            if not 1 <= length <= _RECORD_BYTES_MAX:
                return HelloFlaw.NOT_TLS
            end = self._at + 5 + length
            if len(self._held) < end:
                return None
            if end > HELLO_BYTES_MAX:
                return HelloFlaw.NOT_TLS
            self._message += self._held[self._at + 5 : end]
            self._at = end
            if self._message[0] != _CLIENT_HELLO:
                return HelloFlaw.NOT_TLS
            if len(self._message) >= 4:
                size = 4 + int.from_bytes(self._message[1:4])
                if size > HELLO_BYTES_MAX or len(self._message) > size:
                    return HelloFlaw.NOT_TLS
                if len(self._message) == size:
                    return _server_name(bytes(self._message[4:]))


class _Short(Exception):
    """A length reaches beyond what there is."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise _Short
        self._at += size
        return self._data[self._at - size : self._at]

    def vector(self, length_bytes: int) -> bytes:
        return self.take(int.from_bytes(self.take(length_bytes)))


def _server_name(hello: bytes) -> Hello | HelloFlaw:
    """RFC 8446, 4.1.2 and RFC 6066, 3."""
    try:
        body = _Reader(hello)
        body.take(2 + 32)  # version, random
        body.vector(1)  # session
        body.vector(2)  # cipher suites
        body.vector(1)  # compression
        if not body.left:
            return HelloFlaw.NO_NAME
        extensions = _Reader(body.vector(2))
        if body.left:
            return HelloFlaw.NOT_TLS
        found = []
        while extensions.left:
            kind, content = int.from_bytes(extensions.take(2)), extensions.vector(2)
            if kind == _SERVER_NAME:
                found.append(content)
        if not found:
            return HelloFlaw.NO_NAME
        if len(found) > 1:
            return HelloFlaw.NOT_TLS
        extension = _Reader(found[0])
        names = _Reader(extension.vector(2))
        kind, name = names.take(1)[0], names.vector(2)
        if kind != _HOST_NAME or names.left or extension.left or not name.isascii():
            return HelloFlaw.NOT_TLS
        return Hello(server_name=name.decode("ascii").lower())
    except _Short:
        return HelloFlaw.NOT_TLS
