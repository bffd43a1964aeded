"""SHA-256 of what is in the workspace, within a budget of bytes.

A sparse file costs nothing to make and hours to read, so a budget bounds the sum of the sizes that
are read; what does not fit has no digest. A budget of the volume's own size always suffices for
files that are not sparse.
"""

import hashlib
import os
import stat
from collections.abc import Callable

from sbxd.steward.files import Refusal, open_container, open_regular

_PIECE = 256 * 1024


class Budget:
    """How many bytes may still be read for digests."""

    def __init__(self, bytes_max: int) -> None:
        self.left = bytes_max


class Digester:
    """Digests of one workspace."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd

    def of(
        self, path: bytes, mode: int, budget: Budget, between: Callable[[], None]
    ) -> bytes | None:
        """The digest of a regular file's content or of a link's target; None for anything else,
        for what has no more budget, and for what is no longer there. `between` may raise."""
        if stat.S_ISLNK(mode):
            return self._of_link(path)
        if not stat.S_ISREG(mode):
            return None
        try:
            descriptor, status = open_regular(self._root_fd, path)
        except Refusal:
            return None
        try:
            if status.st_size > budget.left:
                return None
            budget.left -= status.st_size
            return self._of_file(descriptor, status.st_size, between)
        finally:
            os.close(descriptor)

    def _of_file(self, descriptor: int, size: int, between: Callable[[], None]) -> bytes | None:
        digest = hashlib.sha256()
        view = memoryview(bytearray(min(size, _PIECE)))  # kept no longer: an idle steward is small
        left = size
        while left:
            try:
                count = os.readv(descriptor, (view[: min(left, _PIECE)],))
            except OSError:
                return None
            if not count:
                return None  # it shrank: whoever asks sees another state next time
            digest.update(view[:count])
            left -= count
            between()
        return digest.digest()

    def _of_link(self, path: bytes) -> bytes | None:
        try:
            parent, name = open_container(self._root_fd, path)
        except Refusal:
            return None
        try:
            return hashlib.sha256(os.readlink(name, dir_fd=parent)).digest()
        except OSError:
            return None
        finally:
            os.close(parent)
