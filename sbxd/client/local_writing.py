"""Writing into a directory of this host: all of a file at once, or nothing. Blocking.

A file is collected under a name of its own in the root and takes its place by one rename. No link
is followed; a target that is a link, a directory, no regular file or has a second name is refused;
what is at the path afterwards is proven to be what was written, beneath the root.
"""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass

from sbxd.client.beneath import (
    CREATE_FILE,
    OPEN_DIRECTORY,
    OPEN_PATH,
    open_beneath,
    refusal,
)
from sbxd.port.errors import WorkspaceCode, WorkspaceError, WorkspaceEscape

_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755


@dataclass(frozen=True)
class Placed:
    """A file that a tool put there."""

    device: int
    inode: int
    digest: bytes


class Unfinished:
    """One file that is being written. Either `place` or `abandon` ends it."""

    def __init__(self, root: int, path: bytes) -> None:
        """Raises WorkspaceError, WorkspaceEscape."""
        if path == b".":
            raise WorkspaceError(WorkspaceCode.IS_A_DIRECTORY, "a directory")
        self._root = root
        self._path = path
        self._name = b".sbx-" + secrets.token_hex(12).encode()
        self._digest = hashlib.sha256()
        self._check_target()
        try:
            self._descriptor = open_beneath(root, self._name, CREATE_FILE, 0o600)
        except OSError as problem:
            raise refusal(problem) from None
        self._open = True
        self.inode = os.fstat(self._descriptor).st_ino

    def add(self, data: bytes) -> None:
        """Raises WorkspaceError (NO_SPACE)."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as problem:
            raise refusal(problem) from None
        self._digest.update(data)

    def place(self) -> Placed:
        """Put the file at its path. Raises WorkspaceError, WorkspaceEscape."""
        *parents, name = self._path.split(b"/")
        directory = self._make_parents(parents)
        try:
            os.fchmod(self._descriptor, _checked_mode(directory, name))
            os.rename(self._name, name, src_dir_fd=self._root, dst_dir_fd=directory)
            written = os.fstat(self._descriptor)
            self._prove(written, directory, name)
        except OSError as problem:
            raise refusal(problem) from None
        finally:
            os.close(directory)
        return Placed(written.st_dev, written.st_ino, self._digest.digest())

    def abandon(self) -> None:
        """Remove what is left of it. Idempotent; after `place` it closes and nothing else."""
        if not self._open:
            return
        self._open = False
        with suppress(OSError):
            status = os.stat(self._name, dir_fd=self._root, follow_symlinks=False)
            if status.st_ino == self.inode:
                os.unlink(self._name, dir_fd=self._root)
        os.close(self._descriptor)

    def _prove(self, written: os.stat_result, directory: int, name: bytes) -> None:
        """The directory may have been moved out of the root meanwhile."""
        try:
            found = open_beneath(self._root, self._path, OPEN_PATH)
        except OSError:
            there = None
        else:
            there = os.fstat(found)
            os.close(found)
        if there is None or (there.st_dev, there.st_ino) != (written.st_dev, written.st_ino):
            with suppress(OSError):
                placed = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if placed.st_ino == written.st_ino:
                    os.unlink(name, dir_fd=directory)
            raise WorkspaceError(WorkspaceCode.REFUSED, "the directory changed meanwhile")

    def _make_parents(self, parents: list[bytes]) -> int:
        """The directory that the file goes to; the caller closes it."""
        directory = os.dup(self._root)
        try:
            for component in parents:
                try:
                    below = open_beneath(directory, component, OPEN_DIRECTORY)
                except FileNotFoundError:
                    with suppress(FileExistsError):
                        os.mkdir(component, _DIRECTORY_MODE, dir_fd=directory)
                    below = open_beneath(directory, component, OPEN_DIRECTORY)
                os.close(directory)
                directory = below
        except OSError as problem:
            os.close(directory)
            raise _of_parent(problem) from None
        return directory

    def _check_target(self) -> None:
        """Refuse early what `place` would refuse."""
        *parents, name = self._path.split(b"/")
        directory = os.dup(self._root)
        try:
            for component in parents:
                below = open_beneath(directory, component, OPEN_DIRECTORY)
                os.close(directory)
                directory = below
            _checked_mode(directory, name)
        except FileNotFoundError:
            return
        except OSError as problem:
            raise _of_parent(problem) from None
        finally:
            os.close(directory)


def _of_parent(problem: OSError) -> WorkspaceError | WorkspaceEscape:
    if isinstance(problem, NotADirectoryError):
        return WorkspaceError(WorkspaceCode.NOT_A_DIRECTORY, "a file is in the way")
    return refusal(problem)


def _checked_mode(directory: int, name: bytes) -> int:
    """The mode for the new file. Raises when what is there must not be replaced."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return _FILE_MODE
    if stat.S_ISLNK(status.st_mode):
        raise WorkspaceEscape("the path is a link")
    if stat.S_ISDIR(status.st_mode):
        raise WorkspaceError(WorkspaceCode.IS_A_DIRECTORY, "a directory is in the way")
    if not stat.S_ISREG(status.st_mode):
        raise WorkspaceError(WorkspaceCode.NOT_A_FILE, "not a regular file")
    if status.st_nlink > 1:
        raise WorkspaceError(WorkspaceCode.HARD_LINKED, "the file has a second name")
    return status.st_mode & 0o777
