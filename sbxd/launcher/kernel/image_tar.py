"""Lay one layer over a directory (in a confined process; see `launcher.unpacker`).

That process' root and namespaces are the boundary. Within it every path is walked by descriptor
and beneath the directory: a link that is absolute or leads out is never followed, and the last
part of a name never is. Names are bytes and need not be UTF-8.

Refused: names that are absolute or hold "..", paths through such links, hard links to anything
but a regular file, owners outside the image's block, sparse files, more than the caps. Left out:
device nodes and FIFOs (the sandbox has its own /dev). Dropped: set-uid and set-gid bits, extended
attributes, and with them file capabilities and ACLs. A whiteout hides what earlier layers hold,
never what its own layer brings, wherever in the layer it stands.
"""

import errno
import os
import stat
from contextlib import suppress
from typing import NamedTuple

from sbxd.jail import syscalls
from sbxd.oci.tar import DEPTH_MAX, PATH_BYTES_MAX, BadArchive, Entry, Kind, TarReader, safe_parts

ENTRIES_MAX = 1_000_000
BYTES_MAX = 64 * 1024**3
ENTRY_BYTES = 4096  # what an entry takes besides its content
OWNER_MAX = 65_535
MOUNT_POINTS = ("proc", "dev", "tmp", "workspace")
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_RESERVED = b".wh..wh."
_CHUNK_BYTES = 256 * 1024
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_MAGICLINKS
_TRIES = 100
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_DIRECTORY
_NAME_IN_ERRORS_MAX = 120


class UnsafeLayer(BadArchive):
    """The layer holds what no honest layer holds."""


def safe_mode(mode: int) -> int:
    """Permission bits and the sticky bit; never set-uid or set-gid."""
    return mode & 0o1777


def add_mount_points(root: int) -> None:
    """What the sandbox mounts over must be directories and no links."""
    for name in MOUNT_POINTS:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=root)
        if not stat.S_ISDIR(os.lstat(name, dir_fd=root).st_mode):
            raise UnsafeLayer(f"/{name} of the image is not a directory")


class Room(NamedTuple):
    """What is left for an image, and what it leaves free whoever else takes from the disk."""

    entries: int
    size_bytes: int
    entries_kept: int
    bytes_kept: int


def room_of(root: int, share: float) -> Room:
    """A share of what is free: no image fills the disk that everybody's state is on."""
    free = os.fstatvfs(root)
    entries = int(free.f_favail * share) if free.f_files else ENTRIES_MAX
    bytes_free = free.f_bavail * free.f_frsize
    kept = (int(free.f_favail * (1 - share)), int(bytes_free * (1 - share)))
    return Room(min(entries, ENTRIES_MAX), min(int(bytes_free * share), BYTES_MAX), *kept)


class Extractor:
    """Lays the entries of one layer. `entries` and `size_bytes` count what was taken.

    root: a descriptor of the directory, borrowed. lowest: nothing lies below this layer, so
    whiteouts hide nothing.
    """

    def __init__(self, root: int, room: Room, *, lowest: bool) -> None:
        self.entries = 0
        self.size_bytes = 0
        self._root = root
        self._room = room
        self._modes: dict[bytes, tuple[int, int]] = {}
        # Of this layer: the parent's inode number and the name. None: nobody asks.
        self._own: set[tuple[int, bytes]] | None = None if lowest else set()
        self._at: tuple[bytes, ...] = ()
        self._place = os.dup(root)
        self._inode = os.fstat(root).st_ino

    def extract(self, tar: TarReader) -> None:
        """All entries. Raises BadArchive (of which UnsafeLayer), OSError."""
        while (entry := tar.next()) is not None:
            try:
                self._entry(tar, entry)
            except BadArchive as problem:
                name = ascii(entry.name.decode("utf-8", "replace"))[1:-1]
                raise UnsafeLayer(f"{name[:_NAME_IN_ERRORS_MAX]}: {problem}") from None
        for path, (mode, mtime) in self._modes.items():
            self._settle(path, mode, mtime)
        os.close(self._place)

    def _entry(self, tar: TarReader, entry: Entry) -> None:
        parts = safe_parts(entry.name)
        if max(entry.uid, entry.gid) > OWNER_MAX:
            raise UnsafeLayer("an owner of the layer is outside the image's block")
        self._charge(entry.size)
        if not parts:
            if entry.kind is Kind.DIRECTORY:
                self._modes[b"."] = (safe_mode(entry.mode) | 0o700, entry.mtime)
            return
        name = parts[-1]
        if name.startswith(_WHITEOUT):
            self._whiteout(parts[:-1], name)
            return
        parent = self._enter(parts[:-1])
        match entry.kind:
            case Kind.DIRECTORY:
                self._directory(parent, name)
                self._modes[b"/".join(parts)] = (safe_mode(entry.mode), entry.mtime)
            case Kind.FILE:
                self._vacate(parent, name)
                self._is_own(self._inode, name)
                self._file(tar, entry, parent, name)
                return
            case Kind.SYMLINK:
                if not 0 < len(entry.link) <= PATH_BYTES_MAX:
                    raise UnsafeLayer("a link leads nowhere, or its target is too long")
                self._vacate(parent, name)
                os.symlink(entry.link, name, dir_fd=parent)
            case Kind.HARDLINK:
                self._hard_link(entry.link, parts, name)
                return
            case Kind.DEVICE:
                self._vacate(parent, name)
                return
        self._is_own(self._inode, name)
        os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)

    # --- walking ------------------------------------------------------------------------------

    def _open(self, path: bytes, flags: int) -> int:
        """Beneath the root. Raises UnsafeLayer for a link that leads out, OSError."""
        for _ in range(_TRIES):  # the kernel gives up when anything is renamed meanwhile
            try:
                return syscalls.openat2(self._root, path or b".", flags, _BENEATH)
            except OSError as problem:
                if problem.errno == errno.EXDEV:
                    raise UnsafeLayer("it lies behind a link that leaves the root") from None
                if problem.errno == errno.ELOOP:
                    raise UnsafeLayer("it lies behind a link that leads nowhere") from None
                if problem.errno == errno.ENOTDIR:
                    raise UnsafeLayer("what it lies in is not a directory") from None
                if problem.errno != errno.EAGAIN:
                    raise
        raise UnsafeLayer("a link of the layer could not be followed")

    def _folder(self, path: bytes) -> int:
        """The directory at `path`. Links within the root are followed, if what they lead to is
        no deeper than a name may be: nothing here or in whoever removes the tree has to recurse
        further. Raises UnsafeLayer, OSError."""
        try:
            return syscalls.openat2(
                self._root, path or b".", _PLACE, _BENEATH | syscalls.RESOLVE_NO_SYMLINKS
            )
        except OSError as problem:
            if problem.errno not in (errno.ELOOP, errno.EAGAIN, errno.ENOTDIR):
                raise
        place = self._open(path, _PLACE)
        root = os.fstat(self._root)
        for up in range(DEPTH_MAX):
            if os.path.samestat(os.stat(b"/".join([b"."] + [b".."] * up), dir_fd=place), root):
                return place
        os.close(place)
        raise UnsafeLayer("it is nested too deeply")

    def _enter(self, parts: tuple[bytes, ...]) -> int:
        """The directory of these parts, made where it is missing; stays ours."""
        if parts == self._at:
            return self._place
        try:
            place = self._folder(b"/".join(parts))
        except FileNotFoundError:
            place = self._make(parts)
        self._stand(parts, place)
        return place

    def _make(self, parts: tuple[bytes, ...]) -> int:
        parent = self._folder(b"")
        for depth, name in enumerate(parts, start=1):
            path = b"/".join(parts[:depth])
            try:
                child = self._folder(path)
            except FileNotFoundError:
                self._charge(0)
                try:
                    os.mkdir(name, 0o755, dir_fd=parent)
                except FileExistsError:
                    raise UnsafeLayer("it lies behind a link that leads nowhere") from None
                self._is_own(os.fstat(parent).st_ino, name)
                child = self._folder(path)
            os.close(parent)
            parent = child
        return parent

    def _stand(self, parts: tuple[bytes, ...], place: int) -> None:
        os.close(self._place)
        self._at, self._place = parts, place
        self._inode = os.fstat(place).st_ino

    def _leave(self) -> None:
        """A directory went: what was stood on may be gone."""
        self._stand((), self._folder(b""))

    # --- entries ------------------------------------------------------------------------------

    def _directory(self, parent: int, name: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                os.unlink(name, dir_fd=parent)
                os.mkdir(name, 0o700, dir_fd=parent)

    def _file(self, tar: TarReader, entry: Entry, parent: int, name: bytes) -> None:
        file = os.open(name, _NEW, 0o600, dir_fd=parent)
        try:
            while chunk := tar.read(_CHUNK_BYTES):
                self._leave_room()
                view = memoryview(chunk)
                while view:
                    view = view[os.write(file, view) :]
            os.fchown(file, entry.uid, entry.gid)
            os.fchmod(file, safe_mode(entry.mode))
            os.utime(file, (entry.mtime, entry.mtime))
        finally:
            os.close(file)

    def _hard_link(self, link: bytes, parts: tuple[bytes, ...], name: bytes) -> None:
        target = safe_parts(link)
        if not target:
            raise UnsafeLayer("a hard link to the root")
        try:
            folder = self._folder(b"/".join(target[:-1]))
        except FileNotFoundError:
            raise UnsafeLayer("a hard link to what is not there") from None
        try:
            try:
                found = os.lstat(target[-1], dir_fd=folder)
            except FileNotFoundError:
                raise UnsafeLayer("a hard link to what is not there") from None
            if not stat.S_ISREG(found.st_mode):
                raise UnsafeLayer("a hard link to what is not a file")
            parent = self._enter(parts[:-1])
            if (os.fstat(folder).st_ino, target[-1]) == (self._inode, name):
                return  # to itself
            self._vacate(parent, name)
            self._is_own(self._inode, name)
            os.link(target[-1], name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(folder)

    def _settle(self, path: bytes, mode: int, mtime: int) -> None:
        """Modes of directories come last: a read-only one could not be filled."""
        try:
            place = self._open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, UnsafeLayer):
            return  # a later entry has replaced it
        try:
            os.fchmod(place, mode)
            os.utime(place, (mtime, mtime))
        finally:
            os.close(place)

    def _charge(self, size: int) -> None:
        self.entries += 1
        self.size_bytes += size + ENTRY_BYTES
        if self.entries > self._room.entries or self.size_bytes > self._room.size_bytes:
            raise UnsafeLayer("the image is too large for the space that it may take")
        self._leave_room()

    def _leave_room(self) -> None:
        """Raises OSError(ENOSPC) when too little is free by now."""
        free, room = os.fstatvfs(self._root), self._room
        if free.f_bavail * free.f_frsize < room.bytes_kept or free.f_favail < room.entries_kept:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # --- removing -----------------------------------------------------------------------------

    def _is_own(self, inode: int, name: bytes) -> None:
        if self._own is not None:
            self._own.add((inode, name))

    def _vacate(self, parent: int, name: bytes) -> None:
        """Remove whatever is there, links as links."""
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except OSError as problem:
            if problem.errno not in (errno.EISDIR, errno.EPERM):
                raise
            _remove_tree(parent, name)

    def _whiteout(self, folder: tuple[bytes, ...], name: bytes) -> None:
        hidden = name[len(_WHITEOUT) :]
        if name != _OPAQUE and (hidden in (b"", b".", b"..") or name.startswith(_RESERVED)):
            if name.startswith(_RESERVED):
                return  # another layered file system's own records
            raise UnsafeLayer("a whiteout of nothing, or of a directory's own name")
        if self._own is None:
            return
        try:
            place = self._open(b"/".join(folder), os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return
        try:
            inode = os.fstat(place).st_ino
            for each in os.listdir(place) if name == _OPAQUE else [hidden]:
                with suppress(FileNotFoundError):
                    self._hide(place, inode, os.fsencode(each))
        finally:
            os.close(place)
        self._leave()

    def _hide(self, parent: int, parent_inode: int, name: bytes) -> None:
        """Remove what earlier layers have laid at `name`, and keep what this one has."""
        assert self._own is not None
        own = (parent_inode, name) in self._own
        if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
            if not own:
                os.unlink(name, dir_fd=parent)
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        place = os.open(name, flags, dir_fd=parent)
        try:
            inode = os.fstat(place).st_ino
            for each in os.listdir(place):
                self._hide(place, inode, os.fsencode(each))
        finally:
            os.close(place)
        if not own:
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError as problem:
                if problem.errno != errno.ENOTEMPTY:  # it holds something of this layer
                    raise


def _remove_tree(parent: int, name: bytes) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    place = os.open(name, flags, dir_fd=parent)
    try:
        for each in os.listdir(place):
            child = os.fsencode(each)
            if stat.S_ISDIR(os.lstat(child, dir_fd=place).st_mode):
                _remove_tree(place, child)
            else:
                os.unlink(child, dir_fd=place)
    finally:
        os.close(place)
    os.rmdir(name, dir_fd=parent)
