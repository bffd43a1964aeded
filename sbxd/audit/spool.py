"""Records that wait for the journal, in order, in one file of bounded size.

Invariants: a record is appended whole or the file is as before; what was read back is what was
appended (a checksum each); the first record that is not whole ends the file, and what follows is
discarded and counted. Written without fsync, as the journal itself does with ordinary records: a
record survives the daemon, and a loss of power as far as the kernel had written it back.
"""

import os
import zlib
from pathlib import Path

SPOOL_BYTES_MAX = 64 * 1024 * 1024
_HEAD_BYTES = 8


class SpoolFull(Exception):
    """The record was not appended."""


class Spool:
    """The file. Every method may raise OSError.

    replayed_bytes: how much of what is there the journal has already.
    """

    def __init__(
        self, path: Path, *, replayed_bytes: int, bytes_max: int = SPOOL_BYTES_MAX
    ) -> None:
        self.bytes_max = bytes_max
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._size, self.waiting, self.discarded_bytes = self._scan(replayed_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        self.replayed_bytes = replayed_bytes if self.waiting else 0
        if not self.waiting:
            self._clear()

    @property
    def is_empty(self) -> bool:
        return self.waiting == 0

    @property
    def size_bytes(self) -> int:
        """Of the file, with what was replayed and not yet cut off."""
        return self._size

    def append(self, record: bytes, *, bytes_max: int) -> None:
        """Add a record, if the file is not larger than `bytes_max` afterwards.

        Raises:
            SpoolFull, OSError: the file is as before.
        """
        whole = len(record).to_bytes(4, "little") + zlib.crc32(record).to_bytes(4, "little")
        whole += record
        if self._size + len(whole) > bytes_max:
            raise SpoolFull
        written = 0
        try:
            while written < len(whole):
                written += os.pwrite(self._fd, whole[written:], self._size + written)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(whole)
        self.waiting += 1

    def first(self) -> bytes:
        """The oldest record; only while it is not empty."""
        record = self._read(self.replayed_bytes)
        assert record is not None
        return record

    def drop_first(self) -> None:
        """The journal has the oldest record."""
        self.replayed_bytes += _HEAD_BYTES + len(self.first())
        self.waiting -= 1
        if not self.waiting:
            self._clear()

    def close(self) -> None:
        os.close(self._fd)

    def _clear(self) -> None:
        # Cut first: an offset beyond the end means that nothing waits.
        os.ftruncate(self._fd, 0)
        self._size = self.replayed_bytes = 0

    def _scan(self, replayed_bytes: int) -> tuple[int, int, int]:
        size = os.fstat(self._fd).st_size
        offset, waiting = replayed_bytes, 0
        while (record := self._read(offset)) is not None:
            offset += _HEAD_BYTES + len(record)
            waiting += 1
        if offset < size:
            os.ftruncate(self._fd, offset)
        return min(offset, size), waiting, max(size - offset, 0)

    def _read(self, offset: int) -> bytes | None:
        head = os.pread(self._fd, _HEAD_BYTES, offset)
        if len(head) < _HEAD_BYTES:
            return None
        length, checksum = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
        if length > self.bytes_max:
            return None
        record = os.pread(self._fd, length, offset + _HEAD_BYTES)
        if len(record) < length or zlib.crc32(record) != checksum:
            return None
        return record
