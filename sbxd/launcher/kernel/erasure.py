"""Remove the trees of environments that are proven dead, a little of each in turn.

Nobody races with this: no process of the environment is left, the folder and each volume's own
directory are root's alone, and what the daemon holds of a volume leads nowhere without root's
rights. Names that were read stay what they are.

Invariants: by descriptor, following nothing; at most four descriptors and no list of entries, for
a tree of whatever depth and width; what is nested is moved up, each directory once, so that the
work grows with the number of entries alone.
"""

import errno
import itertools
import os
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from sbxd.jail import syscalls

# One party's turn: so many entries, or so long.
TURN_ENTRIES: Final = 1024
TURN_SECONDS: Final = 0.25
_PARTY: Final = 8  # the characters of a name that say whose it is
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_RESOLVE: Final = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS


@dataclass(frozen=True)
class Round:
    """removed: entries. is_over: nothing is left in the folder. problem: the last failure."""

    removed: int
    is_over: bool
    problem: OSError | None


def work(folder: int, seconds: float) -> Round:
    """Erase what lies in the folder for so long, each party in its turn. What fails is left to
    the next round, and keeps nobody else from being erased."""
    deadline = time.monotonic() + seconds
    parties: dict[str, deque[str]] = {}
    for name in sorted(os.listdir(folder)):
        parties.setdefault(name[:_PARTY], deque()).append(name)
    waiting = deque(parties.values())
    removed, problem = 0, None
    while waiting and time.monotonic() < deadline:
        names = waiting.popleft()
        name = names.popleft()
        turn_over = time.monotonic() + TURN_SECONDS
        try:
            with closing(remove(folder, os.fsencode(name))) as steps:
                for entries, _ in enumerate(steps, 1):
                    removed += 1
                    if entries == TURN_ENTRIES or time.monotonic() >= turn_over:
                        names.appendleft(name)
                        break
        except OSError as failure:
            problem = failure
        if names:
            waiting.append(names)
    return Round(removed, not os.listdir(folder), problem)


def remove(folder: int, name: bytes) -> Generator[None, None, None]:
    """Remove a directory of the folder and all below it; yields after each entry. It may be left
    at any point, and begun again. What is gone already is no error. Raises OSError."""
    try:
        top = _open(folder, name)
    except FileNotFoundError:
        return
    try:
        yield from _empty(top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=folder)
    yield


def _empty(top: int) -> Iterator[None]:
    names = map(str, itertools.count(time.monotonic_ns()))  # not those of an earlier beginning
    is_empty = False
    while not is_empty:
        is_empty = True
        with os.scandir(top) as entries:
            for entry in entries:
                is_empty = False
                if not _unlink(top, entry):
                    yield from _raise_nested(top, entry, names)
                    _unlink(top, entry)
                yield


def _raise_nested(top: int, entry: "os.DirEntry[str]", names: Iterator[str]) -> Iterator[None]:
    """Empty a directory of the top: its own directories become the top's."""
    directory = _open(top, os.fsencode(entry.name))
    try:
        with os.scandir(directory) as nested:
            for each in nested:
                if not _unlink(directory, each):
                    while not _move(directory, each, top, next(names)):
                        pass
                yield
    finally:
        os.close(directory)


def _open(directory: int, name: bytes) -> int:
    return syscalls.openat2(directory, name, _OPEN, _RESOLVE)


def _unlink(directory: int, entry: "os.DirEntry[str]") -> bool:
    """Remove an entry; False when it is a directory that is not empty."""
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.name, dir_fd=directory)
        return True
    try:
        os.rmdir(entry.name, dir_fd=directory)
    except OSError as problem:
        if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _move(source: int, entry: "os.DirEntry[str]", target: int, name: str) -> bool:
    """Move a directory; False when the name is taken."""
    try:
        os.rename(entry.name, name, src_dir_fd=source, dst_dir_fd=target)
    except OSError as problem:
        if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True
