"""What a layer's blob holds when it is unpacked, as a stream that is hashed and counted.

Runs in the confined process, which has no view of the installed libraries: `load_zstd` is called
before.

Invariants: the memory that a stream needs does not depend on what it says of itself; an end that
comes too early is an error; no more than `bytes_max` are ever given out.
"""

import hashlib
import importlib
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from sbxd.oci.media import Compression
from sbxd.oci.tar import BadArchive

_CHUNK_BYTES = 256 * 1024
_PACKED_BYTES = 32 * 1024  # small, since what follows a member is copied for each member
_GZIP_WBITS = 31
_ZSTD_WINDOW_BYTES_MAX = 128 * 1024 * 1024
ZSTD_MISSING = "a layer is packed with zstd: install zstandard (Debian: python3-zstandard)"


def load_zstd() -> None:
    """Import the library, if there is one."""
    with suppress(ImportError):
        importlib.import_module("zstandard")


class LayerStream:
    """bytes_max: of the unpacked layer. Raises BadArchive when zstd is needed and not there."""

    def __init__(self, raw: IO[bytes], compression: Compression, bytes_max: int) -> None:
        self._raw = raw
        self._left = bytes_max
        self._hash = hashlib.sha256()
        self._read: Callable[[int], bytes]
        match compression:
            case Compression.NONE:
                self._read = raw.read
            case Compression.GZIP:
                self._read = _Gunzip(raw).read
            case Compression.ZSTD:
                self._read = _zstd(raw)

    def read(self, size: int) -> bytes:
        """At most `size` bytes, b"" at the end. Raises BadArchive."""
        piece = self._read(size)
        self._left -= len(piece)
        if self._left < 0:
            raise BadArchive("the image is too large for the space that it may take")
        self._hash.update(piece)
        return piece

    def finish(self) -> str:
        """Take what is left of the blob too; the digest of all that was unpacked."""
        while self.read(_CHUNK_BYTES):
            pass
        while self._raw.read(_CHUNK_BYTES):
            pass
        return f"sha256:{self._hash.hexdigest()}"


class _Gunzip:
    """Members one after another, as gzip allows; zeros may follow the last one."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._member = zlib.decompressobj(_GZIP_WBITS)
        self._fresh = True  # nothing of this member was seen
        self._input = b""

    def read(self, size: int) -> bytes:
        while True:
            if self._member.eof:
                self._input = self._member.unused_data.lstrip(b"\0") or self._after_zeros()
                if not self._input:
                    return b""
                self._member, self._fresh = zlib.decompressobj(_GZIP_WBITS), True
            if not self._input:
                self._input = self._raw.read(_PACKED_BYTES)
                if not self._input and not self._fresh:
                    raise BadArchive("a packed layer is cut short")
                if not self._input:
                    raise BadArchive("a packed layer is empty")
            self._fresh = False
            try:
                piece = self._member.decompress(self._input, size)
            except zlib.error:
                raise BadArchive("a layer is not what gzip writes") from None
            self._input = self._member.unconsumed_tail
            if piece:
                return piece

    def _after_zeros(self) -> bytes:
        while raw := self._raw.read(_CHUNK_BYTES):
            if rest := raw.lstrip(b"\0"):
                return rest
        return b""


def _zstd(raw: IO[bytes]) -> Callable[[int], bytes]:
    try:
        import zstandard
    except ImportError:
        raise BadArchive(ZSTD_MISSING) from None
    unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
    reader = unpacker.stream_reader(raw, read_size=_CHUNK_BYTES, read_across_frames=True)

    def read(size: int) -> bytes:
        try:
            return reader.read(size)
        except zstandard.ZstdError:
            raise BadArchive("a layer is not what zstd writes, or needs too much memory") from None

    return read
