"""The workspace's tree in memory, read by a walk that no tree can exhaust.

A file is remembered by inode, ctime, size and mode: a workload cannot set a ctime, so one that has
not moved proves that nothing happened, unless it is *racy*: so young that the kernel's coarse
clock could give the next change the same ctime. Racy entries are reported by the walk.

Invariants: linear in the entries; no recursion; at most a fixed number of descriptors, whatever
the depth (the way back up is `..`, proven by inode); nothing is opened but directories. A
directory's own times are not remembered: they change with what is in it, which is seen anyway.
"""

import errno
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct

from sbxd.steward.files import OPEN_DIRECTORY, open_beneath, open_parent
from sbxd.steward.frames import PATH_BYTES_MAX

NODES_MAX = 1_000_000
_OPEN_MAX = 64
_RACY_MAX = 20_000
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # or something else by now
_REALTIME_COARSE = 5  # CLOCK_REALTIME_COARSE, which ctimes are taken from
_RECORD = Struct("=QqQI")
_pack = _RECORD.pack

Interrupted = Callable[[], None]  # raises when the walk is to end


@dataclass(frozen=True)
class Clock:
    """The time that ctimes are taken from.

    granularity_ns: the kernel's tick. coarsen: applied to every ctime that is read; tests give a
    coarser clock than the kernel's.
    """

    granularity_ns: int
    now_ns: Callable[[], int] = time.time_ns
    coarsen: Callable[[int], int] | None = None

    @property
    def racy_ns(self) -> int:
        """How old a ctime must be to be proof."""
        return 2 * self.granularity_ns


def kernel_clock() -> Clock:
    """The running kernel's."""
    return Clock(granularity_ns=int(time.clock_getres(_REALTIME_COARSE) * 1e9))


class Node:
    """One directory: its entries by name (records), and its directories by name."""

    __slots__ = ("directories", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.directories: dict[str, Node] = {}

    def put(self, path: str, record: bytes) -> None:
        """Enter what is known to be at a path; parents that are not known get a node only."""
        *parents, name = path.split("/")
        node = self
        for parent in parents:
            node = node.directories.setdefault(parent, Node())
        node.entries[name] = record
        if is_directory(record):
            node.directories.setdefault(name, Node())

    def get(self, path: str) -> bytes | None:
        """The record at a path."""
        *parents, name = path.split("/")
        node = self
        for parent in parents:
            below = node.directories.get(parent)
            if below is None:
                return None
            node = below
        return node.entries.get(name)


EMPTY = Node()


def record_of(status: os.stat_result, clock: Clock) -> bytes:
    """What is remembered of an entry."""
    if stat.S_ISDIR(status.st_mode):
        return _pack(0, 0, 0, status.st_mode)
    ctime = status.st_ctime_ns if clock.coarsen is None else clock.coarsen(status.st_ctime_ns)
    return _pack(status.st_ino, ctime, status.st_size, status.st_mode)


def ctime_of(record: bytes) -> int:
    return int(_RECORD.unpack(record)[1])


def size_of(record: bytes) -> int:
    """0 for a directory."""
    return int(_RECORD.unpack(record)[2])


def mode_of(record: bytes) -> int:
    return int(_RECORD.unpack(record)[3])


def is_directory(record: bytes) -> bool:
    return stat.S_ISDIR(mode_of(record))


@dataclass
class Walk:
    """What a walk found.

    complete: everything was read; of what was not, the old state is kept. racy: paths of files and
    links whose record is no proof yet; None when there are too many to name. newest_ns: the latest
    ctime among them."""

    root: Node
    complete: bool = True
    racy: list[str] | None = field(default_factory=list)
    newest_ns: int = 0


class _Frame:
    """One directory on the way down. path: None where it is too long to be named."""

    __slots__ = ("fd", "identity", "name", "node", "old", "path", "pending")

    def __init__(self, fd: int, name: str, path: str | None, old: Node | None) -> None:
        self.fd = fd
        self.name = name
        self.path = path
        self.old = old
        self.node = Node()
        self.pending: list[str] = []
        status = os.fstat(fd)
        self.identity = (status.st_dev, status.st_ino)


class Walker:
    """Walks one workspace. `hidden` are inodes that are no entries (unfinished writes)."""

    def __init__(self, root_fd: int, clock: Clock, hidden: set[int]) -> None:
        self._root_fd = root_fd
        self._clock = clock
        self._hidden = hidden

    def walk_anew(self) -> Node:
        """The whole tree, compared with nothing. Raises OSError."""
        return self.walk(Node(), lambda: None).root

    def walk(self, old: Node, interrupted: Interrupted) -> Walk:
        """Read the whole tree. What has not changed since `old` is shared with it.

        Raises OSError when the root itself cannot be read, and whatever `interrupted` raises.
        """
        self._left = NODES_MAX
        self._young_ns = self._clock.now_ns() - self._clock.racy_ns
        self._found = Walk(EMPTY)
        stack = [_Frame(os.dup(self._root_fd), "", "", old)]
        opened = 1
        try:
            self._scan(stack[0])
            while True:
                interrupted()
                frame = stack[-1]
                if frame.pending:
                    child = self._enter(frame)
                    if child is None:
                        continue
                    stack.append(child)
                    opened += 1
                    if opened > _OPEN_MAX:
                        shallowest = next(above for above in stack if above.fd >= 0)
                        os.close(shallowest.fd)
                        shallowest.fd = -1
                        opened -= 1
                    continue
                stack.pop()
                node = _settled(frame)
                if not stack:
                    self._found.root = node
                    os.close(frame.fd)
                    return self._found
                stack[-1].node.directories[frame.name] = node
                if stack[-1].fd < 0:
                    opened += self._reopen(stack[-1], frame.fd)
                os.close(frame.fd)
                frame.fd = -1
                opened -= 1
        finally:
            for frame in stack:
                if frame.fd >= 0:
                    with suppress(OSError):
                        os.close(frame.fd)

    def _reopen(self, frame: _Frame, below: int) -> int:
        """Find the way back up. A directory that moved meanwhile ends the walk."""
        descriptor = open_parent(below)
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != frame.identity:
            os.close(descriptor)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        frame.fd = descriptor
        return 1

    def _enter(self, frame: _Frame) -> _Frame | None:
        name = frame.pending.pop()
        try:
            descriptor = open_beneath(frame.fd, os.fsencode(name), OPEN_DIRECTORY)
        except OSError as problem:
            if problem.errno not in _GONE:
                self._keep_old(frame, name)
            return None
        path = None
        if frame.path is not None:
            path = f"{frame.path}{name}/"
            if len(os.fsencode(path)) > PATH_BYTES_MAX:
                path = None
        old = frame.old.directories.get(name) if frame.old is not None else None
        child = _Frame(descriptor, name, path, old)
        try:
            self._scan(child)
        except BaseException:
            os.close(descriptor)
            raise
        return child

    def _keep_old(self, frame: _Frame, name: str) -> None:
        """A directory that cannot be read: what was known of it stays, and the walk says so."""
        self._found.complete = False
        if frame.old is not None and name in frame.old.directories:
            frame.node.directories[name] = frame.old.directories[name]

    def _scan(self, frame: _Frame) -> None:
        """Read one directory: one stat for each entry."""
        descriptor = frame.fd
        entries = frame.node.entries
        pending = frame.pending
        look, pack, coarsen = os.stat, _pack, self._clock.coarsen
        young, hidden = self._young_ns, self._hidden
        newest = self._found.newest_ns
        for name in os.listdir(descriptor):
            try:
                status = look(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            mode = status.st_mode
            if mode & 0o170000 == 0o040000:
                entries[name] = pack(0, 0, 0, mode)
                pending.append(name)
                continue
            inode = status.st_ino
            if inode in hidden:
                continue
            ctime = status.st_ctime_ns
            if coarsen is not None:
                ctime = coarsen(ctime)
            entries[name] = pack(inode, ctime, status.st_size, mode)
            if ctime >= young:
                newest = max(newest, ctime)
                self._note_racy(frame, name, mode)
        self._found.newest_ns = newest
        self._left -= len(entries)
        if self._left < 0:
            self._found.complete = False
            pending.clear()
            frame.node = frame.old or Node()
        elif frame.old is not None and frame.old.entries == entries:
            frame.node.entries = frame.old.entries

    def _note_racy(self, frame: _Frame, name: str, mode: int) -> None:
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)) or frame.path is None:
            return
        racy = self._found.racy
        if racy is None or len(racy) >= _RACY_MAX:
            self._found.racy = None
        else:
            racy.append(frame.path + name)


def _settled(frame: _Frame) -> Node:
    """The frame's node, or the old one when they are the same."""
    old, node = frame.old, frame.node
    if (
        old is not None
        and old.entries is node.entries
        and old.directories.keys() == node.directories.keys()
        and all(old.directories[name] is below for name, below in node.directories.items())
    ):
        return old
    return node
