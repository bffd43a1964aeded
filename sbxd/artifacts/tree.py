"""The artifact tree on a file system: every step that touches it, blocking.

    <root>/store                         whose tree this is: one random id
    <root>/incoming/<artifact_id>        what is being received
    <root>/objects/<tenant>/<shard>/<artifact_id>

Invariants: a file appears below `objects` whole, synced and by a rename, or not at all; its name
is durable before `commit` returns. Everything is reached from the root's descriptor one component
at a time, never through a symbolic link; what is not a folder or a regular file of this user with
one name is refused and neither read nor removed. Folders are 0700, files 0600, whatever the umask.
Errors are ArtifactUnavailable without a path; OSError does not leave this module. Removing what is
not there is no error. Deliberately absent: knowledge of metadata, and listing what there is (the
metadata knows every name before a file has it).
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import final

from sbxd.port.artifact import ArtifactId, ArtifactUnavailable, ArtifactUnavailableCode

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, so that a FIFO that somebody planted cannot hold a thread.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_STORE_ID_BYTES = 36
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_STRANGE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EEXIST})


class ObjectMissing(Exception):
    """There is no object of this key."""


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn an OSError into the port's, which repeats no path."""
    try:
        yield
    except OSError as problem:
        number = problem.errno
        code = (
            ArtifactUnavailableCode.NO_SPACE
            if number in _NO_SPACE
            else ArtifactUnavailableCode.REFUSED
            if number in _STRANGE
            else ArtifactUnavailableCode.IO
        )
        name = errno.errorcode.get(number, "?") if number is not None else "?"
        raise ArtifactUnavailable(code, f"{doing}: {name}") from None


def _refused(detail: str) -> ArtifactUnavailable:
    return ArtifactUnavailable(ArtifactUnavailableCode.REFUSED, detail)


@final
class ArtifactTree:
    """One tree, held by descriptors. Its methods may run in several threads at once.

    Args:
        root: an existing folder that belongs to this user and that nobody else can write to.
        new_store_id: 36 characters, for a tree that has none yet.

    Raises: ArtifactUnavailable; REFUSED for a root that others could write to.
    """

    def __init__(self, root: Path, new_store_id: str) -> None:
        with translated("opening the artifact store"):
            # The operator names the root: a link there is the operator's.
            self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._held = [self._root_fd]
        try:
            self._judge_root()
            with translated("preparing the artifact store"):
                self._incoming_fd = self._hold(self._folder(self._root_fd, "incoming"))
                self._objects_fd = self._hold(self._folder(self._root_fd, "objects"))
                self.store_id = self._store_id(new_store_id)
                self._drop_unused_ids()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""
        while self._held:
            os.close(self._held.pop())

    def is_empty(self) -> bool:
        """Whether no tenant ever stored anything here."""
        with translated("looking at the artifact store"):
            return not os.listdir(self._objects_fd)

    def begin(self, artifact_id: ArtifactId) -> int:
        """A descriptor to write a new object to; the caller closes it. As long as it is open, the
        put is alive (`is_being_put`)."""
        with translated("receiving an artifact"):
            partial_fd = os.open(artifact_id, _CREATE, 0o600, dir_fd=self._incoming_fd)
            try:
                os.fchmod(partial_fd, 0o600)
                # Waits for no longer than another looks whether it is held.
                fcntl.flock(partial_fd, fcntl.LOCK_EX)
            except BaseException:
                os.close(partial_fd)
                raise
            return partial_fd

    def append(self, partial_fd: int, data: bytes | bytearray) -> None:
        """Write all of `data`."""
        with translated("receiving an artifact"):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(partial_fd, rest) :]

    def commit(self, partial_fd: int, artifact_id: ArtifactId, key: str) -> None:
        """Give a received object its place; durable when this returns.

        key: of `sbxd.policy.storage_key`. Raises ArtifactUnavailable(ABANDONED) when the partial
        was swept away meanwhile.
        """
        tenant, shard, name = key.split("/")
        with translated("storing an artifact"):
            os.fsync(partial_fd)
            tenant_fd = self._folder(self._objects_fd, tenant)
            try:
                shard_fd = self._folder(tenant_fd, shard)
            finally:
                os.close(tenant_fd)
            try:
                try:
                    os.rename(artifact_id, name, src_dir_fd=self._incoming_fd, dst_dir_fd=shard_fd)
                except FileNotFoundError:
                    raise ArtifactUnavailable(
                        ArtifactUnavailableCode.ABANDONED, "the put took too long and was swept"
                    ) from None
                os.fsync(shard_fd)
                os.fsync(self._incoming_fd)
            finally:
                os.close(shard_fd)

    def is_being_put(self, artifact_id: ArtifactId, key: str) -> bool:
        """Whether a process holds the descriptor that `begin` gave it, committed or not."""
        with translated("looking at a put"):
            for find in (partial(self._open_partial, artifact_id), partial(self._open_key, key)):
                try:
                    object_fd = find()
                except FileNotFoundError:
                    continue
                try:
                    fcntl.flock(object_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
                finally:
                    os.close(object_fd)
            return False

    def _open_partial(self, artifact_id: ArtifactId) -> int:
        return os.open(artifact_id, _READ, dir_fd=self._incoming_fd)

    def _open_key(self, key: str) -> int:
        tenant, shard, name = key.split("/")
        shard_fd = self._open_shard(tenant, shard)
        try:
            return os.open(name, _READ, dir_fd=shard_fd)
        finally:
            os.close(shard_fd)

    def discard(self, artifact_id: ArtifactId) -> None:
        """Remove what was received of an object that is not to be."""
        with translated("removing a partial artifact"):
            self._unlink(self._incoming_fd, artifact_id)

    def remove(self, key: str) -> None:
        """Remove an object; durable when this returns."""
        tenant, shard, name = key.split("/")
        with translated("removing an artifact"):
            try:
                shard_fd = self._open_shard(tenant, shard)
            except FileNotFoundError:
                return
            try:
                self._unlink(shard_fd, name)
                os.fsync(shard_fd)
            finally:
                os.close(shard_fd)

    def open_object(self, key: str) -> tuple[int, int]:
        """(descriptor, size) of an object; the caller closes it. Raises ObjectMissing."""
        tenant, shard, name = key.split("/")
        with translated("opening an artifact"):
            try:
                shard_fd = self._open_shard(tenant, shard)
                try:
                    object_fd = os.open(name, _READ, dir_fd=shard_fd)
                finally:
                    os.close(shard_fd)
            except FileNotFoundError:
                raise ObjectMissing from None
            try:
                facts = os.fstat(object_fd)
                if not facts.st_nlink:  # removed since it was opened
                    raise ObjectMissing
                self._judge_file(facts)
            except BaseException:
                os.close(object_fd)
                raise
            return object_fd, facts.st_size

    def read(self, object_fd: int, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; empty at the end."""
        with translated("reading an artifact"):
            return os.pread(object_fd, length, offset)

    def _open_shard(self, tenant: str, shard: str) -> int:
        tenant_fd = self._existing(self._objects_fd, tenant)
        try:
            return self._existing(tenant_fd, shard)
        finally:
            os.close(tenant_fd)

    def _existing(self, parent_fd: int, name: str) -> int:
        folder_fd = os.open(name, _FOLDER, dir_fd=parent_fd)
        facts = os.fstat(folder_fd)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            os.close(folder_fd)
            raise _refused("a folder of the artifact store is not this user's alone")
        return folder_fd

    def _folder(self, parent_fd: int, name: str) -> int:
        """A descriptor of a folder, which is made if it is not there; durable either way (who made
        it may have died before it synced)."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent_fd)
        folder_fd = self._existing(parent_fd, name)
        try:
            os.fsync(parent_fd)
        except BaseException:
            os.close(folder_fd)
            raise
        return folder_fd

    def _unlink(self, folder_fd: int, name: str) -> None:
        try:
            facts = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            if not facts.st_nlink:  # removed by another since it was found
                return
            self._judge_file(facts)
            os.unlink(name, dir_fd=folder_fd)
        except FileNotFoundError:
            return

    def _judge_root(self) -> None:
        facts = os.fstat(self._root_fd)
        if facts.st_uid != os.geteuid():
            raise _refused("the artifact store's folder belongs to another user")
        if facts.st_mode & 0o022:
            raise _refused("others may write to the artifact store's folder")

    @staticmethod
    def _judge_file(facts: os.stat_result) -> None:
        if not stat.S_ISREG(facts.st_mode):
            raise _refused("an object of the artifact store is not a regular file")
        if facts.st_nlink != 1 or facts.st_uid != os.geteuid():
            raise _refused("an object of the artifact store has another name or owner")

    def _store_id(self, new: str) -> str:
        """The tree's id; a new one is written whole under another name and linked into place."""
        while True:
            try:
                marker_fd = os.open("store", _READ, dir_fd=self._root_fd)
            except FileNotFoundError:
                self._write_store_id(new)
                continue
            try:
                text = os.read(marker_fd, _STORE_ID_BYTES + 2)
            finally:
                os.close(marker_fd)
            if len(text) != _STORE_ID_BYTES + 1 or not text.endswith(b"\n"):
                raise _refused("the artifact store's id is damaged")
            return text[:-1].decode("ascii", "replace")

    def _write_store_id(self, new: str) -> None:
        if len(new) != _STORE_ID_BYTES:
            raise ValueError("a store id has 36 characters")
        passing = f"store.{new}"
        new_fd = os.open(passing, _CREATE, 0o600, dir_fd=self._root_fd)
        try:
            os.write(new_fd, f"{new}\n".encode())
            os.fsync(new_fd)
        finally:
            os.close(new_fd)
        # When another process was faster, its id is the tree's, and it may have tidied up already.
        with suppress(FileExistsError, FileNotFoundError):
            os.link(passing, "store", src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
        with suppress(FileNotFoundError):
            os.unlink(passing, dir_fd=self._root_fd)
        os.fsync(self._root_fd)

    def _drop_unused_ids(self) -> None:
        """Remove what a process left that died while it named the store."""
        for name in os.listdir(self._root_fd):
            if name.startswith("store.") and len(name) == len("store.") + _STORE_ID_BYTES:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._root_fd)

    def _hold(self, fd: int) -> int:
        self._held.append(fd)
        return fd
