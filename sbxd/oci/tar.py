"""The tar format, read strictly: what an image's layer or an archive of images may look like.

A pull reader over any `read(n)`. It understands ustar, GNU long names and pax records for names,
links, sizes and owners, and refuses everything else that changes what an entry means: sparse
files, negative numbers, unknown types, records that do not add up, a missing end mark, bytes
after it. Names are bytes and are not judged here (`safe_parts` does that).

Invariants: pure; no more than HEADER_BYTES_MAX of headers are held at once, whatever the archive
announces; each header is looked at once, so time is linear in the bytes that are read.
"""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

BLOCK = 512
HEADER_BYTES_MAX = 1024 * 1024
ENTRY_BYTES_MAX = 2**40  # of an entry's content; what lies behind more, no file can be asked for
RECORDS_MAX = 1024
PATH_BYTES_MAX = 4095
PART_BYTES_MAX = 255
DEPTH_MAX = 128
_EXTENSIONS_MAX = 4
_DRAIN_BYTES = 256 * 1024
_ZERO = bytes(BLOCK)
_OCTAL = re.compile(rb" *([0-7]*) *")
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_TIME = re.compile(rb"(-?)([0-9]{1,12})(?:\.[0-9]{1,64})?")
_GLOBAL_REFUSED = frozenset({b"path", b"linkpath", b"size", b"uid", b"gid"})


class BadArchive(ValueError):
    """No tar, or one that no honest tool writes. The text is for people and names no host path."""


class Kind(StrEnum):
    FILE = "FILE"
    DIRECTORY = "DIRECTORY"
    SYMLINK = "SYMLINK"
    HARDLINK = "HARDLINK"
    DEVICE = "DEVICE"  # or a FIFO: nothing that an image needs


_KINDS = {
    b"0": Kind.FILE, b"\0": Kind.FILE, b"7": Kind.FILE, b"1": Kind.HARDLINK, b"2": Kind.SYMLINK,
    b"3": Kind.DEVICE, b"4": Kind.DEVICE, b"5": Kind.DIRECTORY, b"6": Kind.DEVICE,
}  # fmt: skip


class Entry(NamedTuple):
    """One member. size: bytes of content, 0 unless it is a file. mtime: seconds, 0 or later."""

    name: bytes
    kind: Kind
    size: int
    mode: int
    uid: int
    gid: int
    mtime: int
    link: bytes


class TarReader:
    """Entries one after another; the content of an entry is read before the next is asked for.

    read: at most n bytes, b"" at the end. skip: passes n bytes without reading them, where the
    source can (a file can seek); without it they are read.
    """

    def __init__(
        self, read: Callable[[int], bytes], *, skip: Callable[[int], object] | None = None
    ) -> None:
        self._source = read
        self._skip = skip
        self._left = 0  # of the content
        self._padding = 0

    def next(self) -> Entry | None:
        """The next entry, None after the last one. Raises BadArchive."""
        self._pass(self._left + self._padding)
        self._left = self._padding = 0
        pax: dict[bytes, bytes] = {}
        long_name = long_link = None
        for _ in range(_EXTENSIONS_MAX + 1):
            header = self._exactly(BLOCK)
            if header == _ZERO:
                if pax or long_name is not None or long_link is not None:
                    raise BadArchive("the archive ends after an extended header")
                self._end()
                return None
            _check_sum(header)
            kind = header[156:157]
            size = _number(header[124:136])
            if kind == b"x" and not pax:
                pax = _records(self._extension(size))
                if not pax:
                    pax = {b"": b""}  # seen
            elif kind == b"g":
                if _GLOBAL_REFUSED & _records(self._extension(size)).keys():
                    raise BadArchive("a global header names or sizes entries")
            elif kind == b"L" and long_name is None:
                long_name = _text(self._extension(size))
            elif kind == b"K" and long_link is None:
                long_link = _text(self._extension(size))
            elif kind in _KINDS:
                return self._entry(header, _KINDS[kind], size, pax, long_name, long_link)
            elif kind == b"S":
                raise BadArchive("a sparse file: pack it without --sparse")
            else:
                raise BadArchive(f"an entry of type {kind!r}")
        raise BadArchive("too many extended headers before one entry")

    def read(self, size: int) -> bytes:
        """At most `size` bytes of the current entry's content, b"" at its end."""
        wanted = min(size, self._left)
        if wanted == 0:
            return b""
        piece = self._source(wanted)
        if not piece:
            raise BadArchive("the archive ends within an entry")
        self._left -= len(piece)
        return piece

    def _entry(
        self,
        header: bytes,
        kind: Kind,
        size: int,
        pax: dict[bytes, bytes],
        long_name: bytes | None,
        long_link: bytes | None,
    ) -> Entry:
        name = _text(header[:100])
        if header[257:263] == b"ustar\0" and header[345] and long_name is None:
            name = _text(header[345:500]) + b"/" + name
        name = pax.get(b"path", name if long_name is None else long_name)
        link = pax.get(b"linkpath", _text(header[157:257]) if long_link is None else long_link)
        if header[156] == 0 and name.endswith(b"/"):
            kind = Kind.DIRECTORY  # as the oldest tools write it
        size = _decimal(pax[b"size"]) if b"size" in pax else size
        if kind is not Kind.FILE:
            size = 0  # a number there is a hint; no content follows
        if size > ENTRY_BYTES_MAX:
            raise BadArchive("an entry is too large")
        if b"\0" in name or b"\0" in link:
            raise BadArchive("a name holds NUL")
        self._left = size
        self._padding = -size % BLOCK
        return Entry(
            name=name,
            kind=kind,
            size=size,
            mode=_number(header[100:108]) & 0o7777,
            uid=_decimal(pax[b"uid"]) if b"uid" in pax else _number(header[108:116]),
            gid=_decimal(pax[b"gid"]) if b"gid" in pax else _number(header[116:124]),
            mtime=_seconds(pax[b"mtime"]) if b"mtime" in pax else _number(header[136:148]),
            link=link,
        )

    def _extension(self, size: int) -> bytes:
        if size > HEADER_BYTES_MAX:
            raise BadArchive("an extended header is too large")
        raw = self._exactly(size)
        self._pass(-size % BLOCK)
        return raw

    def _exactly(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            piece = self._source(size - len(raw))
            if not piece:
                raise BadArchive("the archive is cut short: it has no end mark")
            raw = raw + piece if raw else piece
        return raw

    def _pass(self, size: int) -> None:
        if self._skip is not None:
            self._skip(size)
            return
        while size > 0:
            piece = self._source(min(size, _DRAIN_BYTES))
            if not piece:
                raise BadArchive("the archive ends within an entry")
            size -= len(piece)

    def _end(self) -> None:
        """Nothing but zeros follows the end mark: what is behind it, no two tools agree on."""
        while piece := self._source(_DRAIN_BYTES):
            if piece.count(0) != len(piece):
                raise BadArchive("something follows the archive's end mark")


def safe_parts(name: bytes) -> tuple[bytes, ...]:
    """The parts of an entry's name, () for the root itself. Raises BadArchive for a name that is
    absolute, leaves the root, or is longer or deeper than a file system bears."""
    if name.startswith(b"/"):
        raise BadArchive("a name is absolute")
    if len(name) > PATH_BYTES_MAX:
        raise BadArchive("a name is too long")
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise BadArchive("a name holds ..")
    if len(parts) > DEPTH_MAX:
        raise BadArchive("a name is nested too deeply")
    if any(len(part) > PART_BYTES_MAX for part in parts):
        raise BadArchive("a part of a name is too long")
    return parts


def _check_sum(header: bytes) -> None:
    written = _OCTAL.fullmatch(_text(header[148:156]))
    summed = sum(header) - sum(header[148:156]) + 8 * 0x20
    if written is None or int(written[1] or b"0", 8) != summed:
        raise BadArchive("no tar header where one should be")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # base 256
        if field[0] != 0x80 or field[1:-8].strip(b"\0"):
            raise BadArchive("a number is negative or too large")
        value = int.from_bytes(field[max(1, len(field) - 8) :], "big")
    else:
        match = _OCTAL.fullmatch(_text(field))
        if match is None:
            raise BadArchive("a number is none")
        value = int(match[1] or b"0", 8)
    return _bounded(value)


def _decimal(text: bytes) -> int:
    if _DECIMAL.fullmatch(text) is None:
        raise BadArchive("a number of an extended header is none")
    return _bounded(int(text))


def _bounded(value: int) -> int:
    if value >= 2**62:
        raise BadArchive("a number is negative or too large")
    return value


def _seconds(text: bytes) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise BadArchive("a time of an extended header is none")
    return 0 if match[1] else int(match[2])


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _records(raw: bytes) -> dict[bytes, bytes]:
    """The records `LENGTH KEY=VALUE\\n` of a pax header."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(raw):
        space = raw.find(b" ", at, at + 20)
        if space < 0 or _DECIMAL.fullmatch(raw[at:space]) is None:
            raise BadArchive("a record of an extended header has no length")
        end = at + int(raw[at:space])
        record = raw[space + 1 : end]
        key, equals, value = record[:-1].partition(b"=")
        if end > len(raw) or end <= space or record[-1:] != b"\n" or not equals:
            raise BadArchive("a record of an extended header does not add up")
        if key.startswith(b"GNU.sparse."):
            raise BadArchive("a sparse file: pack it without --sparse")
        if len(found) >= RECORDS_MAX:
            raise BadArchive("an extended header has too many records")
        found[key] = value
        at = end
    return found
