"""Files that the host puts into the workspace: all of one at once, or nothing.

A file is collected under a name of its own in the root directory, which belongs to nobody but
root of the sandbox and is hidden by its inode from every listing, and takes its place by one
rename. It belongs to the workload, mode 0644 (or that of the file which it replaces); so do the
parents that are made for it, mode 0755.

Invariants: no link is followed anywhere; a target that is a link, a directory, no regular file or
has a second name is refused; what is at the path afterwards is proven to be what was written.
"""

import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field

from sbxd.steward.files import OPEN_DIRECTORY, Refusal, open_beneath, refusal
from sbxd.steward.frames import Status

OWNER = 10001
FILE_BYTES_MAX = 2**50
UNFINISHED_MAX = 8
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755


@dataclass
class _Unfinished:
    path: bytes
    size: int
    descriptor: int
    name: bytes
    inode: int
    written: int = 0
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)


@dataclass(frozen=True)
class Written:
    """What a commit put there: the file, and the directories that were made for it."""

    path: bytes
    status: os.stat_result
    digest: bytes
    made: tuple[tuple[bytes, os.stat_result], ...]


class Writer:
    """The unfinished files of one workspace. `hidden` holds their inodes."""

    def __init__(self, root_fd: int, owner: int = OWNER) -> None:
        self.hidden: set[int] = set()
        self._root_fd = root_fd
        self._owner = owner
        self._unfinished: dict[int, _Unfinished] = {}
        self._last_ticket = 0

    def begin(self, path: bytes, size: int) -> int:
        """Reserve the space; the ticket of the file. Raises Refusal."""
        if path == b".":
            raise Refusal(Status.IS_A_DIRECTORY)
        if size > FILE_BYTES_MAX:
            raise Refusal(Status.NO_SPACE)
        while len(self._unfinished) >= UNFINISHED_MAX:
            self.abandon(min(self._unfinished))
        self._check_target(path)
        name = b".sbx-" + os.urandom(12).hex().encode()
        try:
            descriptor = open_beneath(self._root_fd, name, _CREATE, 0o600)
        except OSError as problem:
            raise refusal(problem) from None
        inode = os.fstat(descriptor).st_ino
        self._last_ticket += 1
        ticket = self._last_ticket
        self._unfinished[ticket] = _Unfinished(path, size, descriptor, name, inode)
        self.hidden.add(inode)
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as problem:
            self.abandon(ticket)
            raise refusal(problem) from None
        return ticket

    def piece(self, ticket: int, data: bytes) -> None:
        """Raises Refusal; then the file is forgotten."""
        unfinished = self._find(ticket)
        if unfinished.written + len(data) > unfinished.size:
            self.abandon(ticket)
            raise Refusal(Status.REFUSED)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(unfinished.descriptor, view) :]
        except OSError as problem:
            self.abandon(ticket)
            raise refusal(problem) from None
        unfinished.written += len(data)
        unfinished.digest.update(data)

    def commit(self, ticket: int) -> Written:
        """Put the file at its path. Raises Refusal; then the file is forgotten."""
        unfinished = self._find(ticket)
        try:
            if unfinished.written != unfinished.size:
                raise Refusal(Status.REFUSED)
            return self._place(unfinished)
        except OSError as problem:
            raise refusal(problem) from None
        finally:
            self.abandon(ticket)

    def abandon(self, ticket: int) -> None:
        """Forget an unfinished file and remove what there is of it. Idempotent."""
        unfinished = self._unfinished.pop(ticket, None)
        if unfinished is None:
            return
        with suppress(OSError):  # a workload may have removed the name
            status = os.stat(unfinished.name, dir_fd=self._root_fd, follow_symlinks=False)
            if status.st_ino == unfinished.inode:
                os.unlink(unfinished.name, dir_fd=self._root_fd)
        os.close(unfinished.descriptor)
        self.hidden.discard(unfinished.inode)

    def _find(self, ticket: int) -> _Unfinished:
        try:
            return self._unfinished[ticket]
        except KeyError:
            raise Refusal(Status.ABORTED) from None

    def _place(self, unfinished: _Unfinished) -> Written:
        *parents, name = unfinished.path.split(b"/")
        made: list[tuple[bytes, os.stat_result]] = []
        directory = self._make_parents(parents, made)
        try:
            mode = _checked_mode(directory, name)
            os.fchmod(unfinished.descriptor, mode)
            os.fchown(unfinished.descriptor, self._owner, self._owner)
            os.rename(unfinished.name, name, src_dir_fd=self._root_fd, dst_dir_fd=directory)
            status = os.fstat(unfinished.descriptor)
            there = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if (there.st_dev, there.st_ino) != (status.st_dev, status.st_ino):
                raise Refusal(Status.REFUSED)
        except (OSError, Refusal):
            self._unmake(made)
            raise
        finally:
            os.close(directory)
        digest = unfinished.digest.digest()
        return Written(unfinished.path, status, digest, tuple(made))

    def _make_parents(self, parents: list[bytes], made: list[tuple[bytes, os.stat_result]]) -> int:
        """The directory that the file goes to; the caller closes it."""
        directory = os.dup(self._root_fd)
        try:
            for depth, component in enumerate(parents, start=1):
                below, status = self._enter(directory, component)
                os.close(directory)
                directory = below
                if status is not None:
                    made.append((b"/".join(parents[:depth]), status))
        except (OSError, Refusal):
            os.close(directory)
            self._unmake(made)
            raise
        return directory

    def _enter(self, directory: int, name: bytes) -> tuple[int, os.stat_result | None]:
        """One directory down; with its state when it had to be made."""
        try:
            return open_beneath(directory, name, OPEN_DIRECTORY), None
        except FileNotFoundError:
            os.mkdir(name, _DIRECTORY_MODE, dir_fd=directory)
        except NotADirectoryError:
            raise Refusal(Status.NOT_A_DIRECTORY) from None
        below = open_beneath(directory, name, OPEN_DIRECTORY)
        if os.fstat(below).st_uid != self._owner:
            os.fchown(below, self._owner, self._owner)
        return below, os.fstat(below)

    def _unmake(self, made: list[tuple[bytes, os.stat_result]]) -> None:
        """Remove the parents of a file that did not come, unless something else is in them."""
        for path, _ in reversed(made):
            above, _, name = path.rpartition(b"/")
            with suppress(OSError):
                directory = open_beneath(self._root_fd, above or b".", OPEN_DIRECTORY)
                try:
                    os.rmdir(name, dir_fd=directory)
                finally:
                    os.close(directory)

    def _check_target(self, path: bytes) -> None:
        """Refuse early what `commit` would refuse. Raises Refusal."""
        *parents, name = path.split(b"/")
        directory = os.dup(self._root_fd)
        try:
            for component in parents:
                below = open_beneath(directory, component, OPEN_DIRECTORY)
                os.close(directory)
                directory = below
            _checked_mode(directory, name)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            raise Refusal(Status.NOT_A_DIRECTORY) from None
        except OSError as problem:
            raise refusal(problem) from None
        finally:
            os.close(directory)


def _checked_mode(directory: int, name: bytes) -> int:
    """The mode for the new file. Raises Refusal when what is there must not be replaced."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return _FILE_MODE
    if stat.S_ISLNK(status.st_mode):
        raise Refusal(Status.ESCAPE)
    if stat.S_ISDIR(status.st_mode):
        raise Refusal(Status.IS_A_DIRECTORY)
    if not stat.S_ISREG(status.st_mode):
        raise Refusal(Status.NOT_A_FILE)
    if status.st_nlink > 1:
        raise Refusal(Status.HARD_LINKED)
    return status.st_mode & 0o777
