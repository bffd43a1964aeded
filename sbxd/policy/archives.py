"""Which archives and packed streams a content is, found while it streams by; and whether it may be.

Invariants: the bytes are not altered and nothing is unpacked; the answer does not depend on how
they are cut into pieces; memory is bounded. What is found is what a common reader would open: by
the magic at the beginning, by one at its fixed offset (tar, ISO 9660), by one that readers search
for near the beginning (self-extracting RAR, 7z, CAB), and by the end of a zip's directory, which
may stand behind anything. Deliberately absent: formats without a magic (raw LZMA, Brotli).
"""

import re

from sbxd.port.artifact import ContentFlag

# Readers look for a self-extracting archive in the first mebibyte.
_HEAD_BYTES = 1024 * 1024
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
_ZIP_COMMENT_MAX = 65_535
_TAIL_BYTES = _ZIP_END_BYTES + _ZIP_COMMENT_MAX
_TAR_HEADER_BYTES = 512
_TAR_SUM = slice(148, 156)
_ISO_OFFSETS = (0x8001, 0x8801, 0x9001)

_AT_THE_BEGINNING: tuple[tuple[ContentFlag, re.Pattern[bytes]], ...] = (
    (ContentFlag.ARCHIVE_ZIP, re.compile(rb"PK(?:\x03\x04|\x05\x06|\x07\x08)")),
    (ContentFlag.ARCHIVE_GZIP, re.compile(rb"\x1f\x8b\x08")),
    (ContentFlag.ARCHIVE_COMPRESS, re.compile(rb"\x1f[\x9d\xa0]")),
    (ContentFlag.ARCHIVE_BZIP2, re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")),
    (ContentFlag.ARCHIVE_XZ, re.compile(rb"\xfd7zXZ\x00")),
    (ContentFlag.ARCHIVE_ZSTD, re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")),
    (ContentFlag.ARCHIVE_LZ4, re.compile(rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18")),
    (ContentFlag.ARCHIVE_AR, re.compile(rb"!<(?:arch|thin)>\n")),
    (
        ContentFlag.ARCHIVE_CPIO,
        re.compile(rb"0707(?:0[12][0-9A-Fa-f]{104}|07[0-7]{70})|\xc7\x71|\x71\xc7"),
    ),
)
_NEAR_THE_BEGINNING: tuple[tuple[ContentFlag, bytes], ...] = (
    (ContentFlag.ARCHIVE_7Z, b"7z\xbc\xaf\x27\x1c"),
    (ContentFlag.ARCHIVE_RAR, b"Rar!\x1a\x07"),
    (ContentFlag.ARCHIVE_CAB, b"MSCF\x00\x00\x00\x00"),
)
ARCHIVES = frozenset(flag for flag in ContentFlag if flag.startswith("ARCHIVE_"))

# What a declared type says that a content is. A type that is not here and that an operator lists is
# a document in a zip (a spreadsheet, a Java archive, a book).
_OF_TYPE: dict[str, frozenset[ContentFlag]] = {
    "application/octet-stream": ARCHIVES,
    "application/x-tar": frozenset({ContentFlag.ARCHIVE_TAR}),
    "application/gzip": frozenset({ContentFlag.ARCHIVE_GZIP}),
    "application/x-gzip": frozenset({ContentFlag.ARCHIVE_GZIP}),
    "application/x-bzip2": frozenset({ContentFlag.ARCHIVE_BZIP2}),
    "application/x-xz": frozenset({ContentFlag.ARCHIVE_XZ}),
    "application/zstd": frozenset({ContentFlag.ARCHIVE_ZSTD}),
    "application/x-lz4": frozenset({ContentFlag.ARCHIVE_LZ4}),
    "application/x-compress": frozenset({ContentFlag.ARCHIVE_COMPRESS}),
    "application/x-7z-compressed": frozenset({ContentFlag.ARCHIVE_7Z}),
    "application/vnd.rar": frozenset({ContentFlag.ARCHIVE_RAR}),
    "application/x-rar-compressed": frozenset({ContentFlag.ARCHIVE_RAR}),
    "application/vnd.ms-cab-compressed": frozenset({ContentFlag.ARCHIVE_CAB}),
    "application/x-iso9660-image": frozenset({ContentFlag.ARCHIVE_ISO9660}),
    "application/x-archive": frozenset({ContentFlag.ARCHIVE_AR}),
    "application/vnd.debian.binary-package": frozenset({ContentFlag.ARCHIVE_AR}),
    "application/x-cpio": frozenset({ContentFlag.ARCHIVE_CPIO}),
}
_IN_A_ZIP = frozenset({ContentFlag.ARCHIVE_ZIP})


def refused_archives(
    found: frozenset[ContentFlag], media_type: str, listed: frozenset[str]
) -> frozenset[ContentFlag]:
    """Which of the archives that a content is its declared type does not allow. listed: the types
    that the operator allows to be one, bare and in lower case."""
    bare = media_type.partition(";")[0].strip().lower()
    allowed = _OF_TYPE.get(bare, _IN_A_ZIP) if bare in listed else frozenset()
    return found & ARCHIVES - allowed


class ArchiveScanner:
    """Fed with the pieces of a content in order; `finish` says what it is."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()

    def feed(self, data: bytes | bytearray) -> None:
        """Look at the next piece (any length)."""
        room = _HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += data[:room]
        self._tail += data[-_TAIL_BYTES:]
        del self._tail[:-_TAIL_BYTES]

    def finish(self) -> frozenset[ContentFlag]:
        """The flags of the whole; call once, after the last piece."""
        head = bytes(self._head)
        found = {flag for flag, magic in _AT_THE_BEGINNING if magic.match(head)}
        found |= {flag for flag, magic in _NEAR_THE_BEGINNING if magic in head}
        if _is_tar(head):
            found.add(ContentFlag.ARCHIVE_TAR)
        if any(head.startswith(b"CD001", offset) for offset in _ISO_OFFSETS):
            found.add(ContentFlag.ARCHIVE_ISO9660)
        # The directory's end is as long as that, and its comment may be cut.
        if self._tail.find(_ZIP_END, 0, len(self._tail) - _ZIP_END_BYTES + len(_ZIP_END)) >= 0:
            found.add(ContentFlag.ARCHIVE_ZIP)
        return frozenset(found)


def _is_tar(head: bytes) -> bool:
    """By its magic, or as the oldest ones, which have none, by the sum of its first header."""
    if head.startswith(b"ustar", 257):
        return True
    header = head[:_TAR_HEADER_BYTES]
    digits = header[_TAR_SUM].strip(b" \x00")
    if len(header) < _TAR_HEADER_BYTES or not header[0] or not re.fullmatch(rb"[0-7]{1,8}", digits):
        return False
    blank = header[: _TAR_SUM.start] + b" " * 8 + header[_TAR_SUM.stop :]
    return sum(blank) == int(digits, 8)
