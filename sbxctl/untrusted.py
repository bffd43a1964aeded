"""Reading a file in a folder that belongs to a less trusted account, as root.

Invariants: no link is followed, of the folder or of the file; the folder's owner owns the file, it
is a regular file and has one name; what is read has a bound. The owner of the folder can therefore
make us read no file but its own.
"""

import os
import stat
from pathlib import Path


class NotItsOwn(OSError):
    """The file is none that the owner of its folder could have written there."""


class OwnedFolder:
    """A folder, held open. Use it in a `with`. Raises OSError where it is none, or a link."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def __enter__(self) -> "OwnedFolder":
        return self

    def __exit__(self, *problem: object) -> None:
        os.close(self._fd)

    def read(self, name: str, *, at_most: int) -> bytes:
        """The file's first bytes. Raises OSError, NotItsOwn among it."""
        fd = self._open(name)
        try:
            return os.read(fd, at_most)
        finally:
            os.close(fd)

    def size(self, name: str) -> int:
        """The file's size in bytes. Raises as `read`."""
        fd = self._open(name)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def _open(self, name: str) -> int:
        # Without waiting: a pipe has nobody at its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        fd = os.open(name, flags, dir_fd=self._fd)
        found, owner = os.fstat(fd), os.fstat(self._fd).st_uid
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner or found.st_nlink != 1:
            os.close(fd)
            raise NotItsOwn(0, f"{name} is not a regular file that the service owns")
        return fd
