"""The workspace's tree in memory, read by a walk that no tree can exhaust.

A file is remembered by inode, ctime, size and mode: a workload cannot set a ctime, so one that has
not moved proves that nothing happened, unless it is *racy*: so young that the kernel's coarse
clock could give the next change the same ctime. Racy entries are reported by the walk.

Invariants: linear in the entries; no recursion; at most a fixed number of descriptors, whatever
the depth (the way back up is `..`, proven by inode); nothing is opened but directories. Entries,
bytes of memory and seconds are bounded (`Bounds`), and so is the depth: below a path that is too
long to be named nothing is read. What was not read is UNREAD, and the walk says so. A directory's
own times are not remembered: they change with what is in it, which is seen anyway.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from sbxd.steward.files import OPEN_DIRECTORY, open_beneath, open_parent
from sbxd.steward.frames import PATH_BYTES_MAX
from sbxd.steward.nodes import (
    EMPTY,
    FAN,
    SPLIT_ENTRIES,
    UNREAD,
    Block,
    Node,
    Split,
    pack_record,
)

_OPEN_MAX = 64
_RACY_MAX = 1024
_RACY_BYTES_MAX = 512 * 1024
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # or something else by now
_REALTIME_COARSE = 5  # CLOCK_REALTIME_COARSE, which ctimes are taken from

Interrupted = Callable[[], None]  # raises when the walk is to end


@dataclass(frozen=True)
class Bounds:
    """What a walk may use.

    entries: how many it reads. tree_bytes: memory of the tree to compare with and of what the new
    one does not share with it; with what the processes need besides, within the headroom of an
    environment. seconds: by the monotonic clock, below the daemon's budgets for a start (30 s) and
    a comparison (60 s).
    """

    entries: int = 1 << 20
    tree_bytes: int = 56 * 1024 * 1024
    seconds: float = 20.0
    monotonic: Callable[[], float] = time.monotonic


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


def record_of(status: os.stat_result, clock: Clock) -> bytes:
    """What is remembered of an entry."""
    if stat.S_ISDIR(status.st_mode):
        return pack_record(0, 0, 0, status.st_mode)
    ctime = status.st_ctime_ns if clock.coarsen is None else clock.coarsen(status.st_ctime_ns)
    return pack_record(status.st_ino, ctime, status.st_size, status.st_mode)


@dataclass
class Walk:
    """What a walk found.

    complete: everything was read. racy: paths of files and links whose record is no proof yet;
    None when there are too many to name. newest_ns: the latest ctime among them. tree_bytes: the
    memory that the tree takes.
    """

    root: Node = EMPTY
    complete: bool = True
    racy: list[bytes] | None = field(default_factory=list)
    newest_ns: int = 0
    tree_bytes: int = 0


class _Frame:
    """One directory on the way down, block by block.

    path: with a slash behind, or empty. old: what was known of it. packed: its block; None where
    it is split.
    """

    __slots__ = (
        "below", "done", "fd", "identity", "names", "old", "packed", "parts", "path", "split"
    )  # fmt: skip

    def __init__(self, fd: int, path: bytes, old: Node) -> None:
        self.fd = fd
        self.path = path
        self.old = old
        status = os.fstat(fd)
        self.identity = (status.st_dev, status.st_ino)
        self.packed: bytes | None = None
        self.split: Split | None = None
        self.names: Iterator[bytes] = iter(())
        self.below: list[Node] = []
        self.parts: list[Node] = []
        self.done = False

    def begin(self) -> None:
        """Go on to the next block, or to the first."""
        if self.split is not None:
            self.packed = self.split.take(len(self.parts))
        assert self.packed is not None
        self.names = Node(self.packed).directory_names()
        self.below = []

    def settle(self) -> tuple[Node, bool]:
        """The block that is complete, and whether it is the old one, which is then shared."""
        assert self.packed is not None
        node = Node(self.packed, tuple(self.below))
        old = self.old
        if self.split is not None:
            old = old.below[len(self.parts)] if old.packed is None else EMPTY
        same = _same(old, node)
        self.parts.append(old if same else node)
        self.done = self.split is None or len(self.parts) == FAN
        return self.parts[-1], same

    def node(self) -> Node:
        """The whole directory."""
        if self.split is None:
            return self.parts[0]
        whole = Node(None, tuple(self.parts))
        return self.old if _same(self.old, whole) else whole


def _same(old: Node, new: Node) -> bool:
    return (
        old is not UNREAD
        and old.packed == new.packed
        and len(old.below) == len(new.below)
        and all(one is other for one, other in zip(old.below, new.below, strict=True))
    )


class Walker:
    """Walks one workspace. `hidden` are inodes that are no entries (unfinished writes)."""

    def __init__(
        self, root_fd: int, clock: Clock, hidden: set[int], bounds: Bounds | None = None
    ) -> None:
        self._root_fd = root_fd
        self._clock = clock
        self._hidden = hidden
        self._bounds = bounds or Bounds()

    def walk(self, old: Walk, interrupted: Interrupted) -> Walk:
        """Read the whole tree. What has not changed since `old` is shared with it.

        Raises OSError when the root itself cannot be read, and whatever `interrupted` raises.
        """
        bounds = self._bounds
        self._entries_left = bounds.entries
        self._bytes_left = bounds.tree_bytes - old.tree_bytes
        self._until = bounds.monotonic() + bounds.seconds
        self._young_ns = self._clock.now_ns() - self._clock.racy_ns
        self._racy_bytes = 0
        self._found = Walk()
        self._interrupted = interrupted
        stack = [_Frame(os.dup(self._root_fd), b"", old.root)]
        closed = 0  # how many frames, from the root on, have no descriptor
        try:
            if not self._read(stack[0]):
                self._found.root, self._found.complete = UNREAD, False
                return self._found
            while True:
                interrupted()
                frame = stack[-1]
                child = self._descend(frame)
                if child is not None:
                    stack.append(child)
                    if len(stack) - closed > _OPEN_MAX:
                        os.close(stack[closed].fd)
                        stack[closed].fd = -1
                        closed += 1
                    continue
                self._settle(frame)
                if not frame.done:
                    continue
                stack.pop()
                if not stack:
                    self._found.root = frame.node()
                    os.close(frame.fd)
                    return self._found
                stack[-1].below.append(frame.node())
                if stack[-1].fd < 0:
                    self._reopen(stack[-1], frame.fd)
                    closed -= 1
                os.close(frame.fd)
                frame.fd = -1
        finally:
            for frame in stack:
                if frame.fd >= 0:
                    with suppress(OSError):
                        os.close(frame.fd)

    def _reopen(self, frame: _Frame, below: int) -> None:
        """Find the way back up. A directory that moved meanwhile ends the walk."""
        descriptor = open_parent(below)
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != frame.identity:
            os.close(descriptor)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        frame.fd = descriptor

    def _descend(self, frame: _Frame) -> _Frame | None:
        """Go into the next directory of the frame's block; None when there is none left."""
        for name in frame.names:
            path = b"%b%b/" % (frame.path, name)
            if len(path) > PATH_BYTES_MAX or self._is_spent():
                self._leave_out(frame)
                continue
            try:
                descriptor = open_beneath(frame.fd, name, OPEN_DIRECTORY)
            except OSError as problem:
                if problem.errno in _GONE:
                    frame.below.append(EMPTY)
                else:
                    self._leave_out(frame)
                continue
            old = UNREAD if frame.old is UNREAD else frame.old.child(name) or EMPTY
            try:
                child = _Frame(descriptor, path, old)
                if self._read(child):
                    return child
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            self._leave_out(frame)
        return None

    def _leave_out(self, frame: _Frame) -> None:
        """The directory is not read: nothing is known of it from here on."""
        self._found.complete = False
        frame.below.append(UNREAD)

    def _is_spent(self) -> bool:
        return (
            self._entries_left < 0 or self._bytes_left < 0 or self._bounds.monotonic() > self._until
        )

    def _settle(self, frame: _Frame) -> None:
        node, shared = frame.settle()
        packed = len(node.packed or b"")
        self._found.tree_bytes += node.size_bytes
        self._bytes_left += packed if shared else packed - node.size_bytes
        if not frame.done:
            frame.begin()

    def _read(self, frame: _Frame) -> bool:
        """Read one directory: one stat for each entry. False when a bound is reached."""
        descriptor = frame.fd
        block = Block()
        (directories, others), (packed_directories, packed) = block.names, block.records
        look, pack, coarsen = os.stat, pack_record, self._clock.coarsen
        young, hidden = self._young_ns, self._hidden
        with os.scandir(descriptor) as entries:
            while names := [entry.name for entry in islice(entries, SPLIT_ENTRIES)]:
                if packed or packed_directories:
                    self._interrupted()
                    frame.split = frame.split or Split()
                    frame.split.add(block)
                    self._charge(len(block), len(block.pack()))
                    for part in (directories, others, packed_directories, packed):
                        part.clear()
                    if self._is_spent():
                        return False
                for name in names:
                    try:
                        status = look(name, dir_fd=descriptor, follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    mode = status.st_mode
                    if mode & 0o170000 == 0o040000:
                        packed_directories.append(pack(0, 0, 0, mode))
                        directories.append(name)
                        continue
                    inode = status.st_ino
                    if inode in hidden:
                        continue
                    ctime = status.st_ctime_ns
                    if coarsen is not None:
                        ctime = coarsen(ctime)
                    packed.append(pack(inode, ctime, status.st_size, mode))
                    others.append(name)
                    if ctime >= young:
                        self._note_racy(frame, name, mode, ctime)
        packed_block = block.pack()
        self._charge(len(block), len(packed_block))
        if frame.split is not None:
            frame.split.add(block)
        else:
            frame.packed = packed_block
        frame.begin()
        return not self._is_spent()

    def _charge(self, entries: int, packed_bytes: int) -> None:
        self._entries_left -= entries
        self._bytes_left -= packed_bytes

    def _note_racy(self, frame: _Frame, name: str, mode: int, ctime: int) -> None:
        self._found.newest_ns = max(self._found.newest_ns, ctime)
        racy = self._found.racy
        if racy is None or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            return
        path = frame.path + os.fsencode(name)
        self._racy_bytes += len(path)
        if len(racy) >= _RACY_MAX or self._racy_bytes > _RACY_BYTES_MAX:
            self._found.racy = None
        else:
            racy.append(path)
