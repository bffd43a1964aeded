"""The names of one directory in order, page by page, in memory and in scans that are bounded.

A scan reads the whole directory and keeps the smallest names that follow one name: as many as fit
NAMES_BYTES_MAX. They serve the pages that come next too. So a listing costs a scan for each run of
names, not for each page, and its memory does not depend on the directory.

Invariants: the first page is of a new scan, so no listing tells what an earlier one has read; each
name is told once at most, in bytewise order; a name that is in the directory from the first page to
the last is told. What is made or removed in between is told or not, as with readdir(3), and makes
no page read the directory again: a directory that is written all the time costs no more scans.

Source: decision 0218.
"""

import os
from collections.abc import Callable, Container
from itertools import groupby

from sbxd.steward.frames import NAME_BYTES_MAX

NAMES_BYTES_MAX = 2 * 1024 * 1024  # of the objects that a scan holds: 6,900 of the longest names
RUNS_MAX = 4  # listings that are under way at once, each with its run; more scan more often
_OBJECT_BYTES = 56  # of a bytes object and of its place in a list, beside the name
_BETWEEN_ENTRIES = 1024
_SEPARATOR = b"\0"


class Run:
    """Names in order, without a gap, that follow the name `start`; in one block of bytes.

    complete: the directory had no further name. omitted: how many of its names are too long.
    """

    def __init__(self, start: bytes, names: list[bytes], complete: bool, omitted: int) -> None:
        self._start = start
        self._block = _SEPARATOR.join((b"", *names, b""))
        self._complete = complete
        self.omitted = omitted

    def page(self, after: bytes, maximum: int) -> tuple[list[bytes], bool] | None:
        """At most `maximum` names that follow, and whether more do; None where it is not known."""
        if after == self._start:
            begin = 1
        elif (found := self._block.find(_SEPARATOR + after + _SEPARATOR)) >= 0:
            begin = found + len(after) + 2
        else:
            return None
        if begin >= len(self._block) and not self._complete:
            return None
        piece = self._block[begin : begin + maximum * (NAME_BYTES_MAX + 1)]
        names = piece.split(_SEPARATOR, maximum)[:-1]
        end = begin + sum(map(len, names)) + len(names)
        return names, end < len(self._block) or not self._complete


class Names:
    """The runs of the listings that are under way.

    hidden: inodes that are in no listing. between: called while a directory is scanned; may raise.
    """

    def __init__(self, hidden: Container[int], between: Callable[[], None]) -> None:
        self._hidden = hidden
        self._between = between
        self._runs: list[tuple[tuple[int, int, int], Run]] = []

    def page(
        self, directory: int, after: bytes, maximum: int, name_bytes_max: int
    ) -> tuple[list[bytes], bool, int]:
        """At most `maximum` names that follow `after`, whether more do, and how many names of the
        directory are longer than name_bytes_max and are left out. Raises OSError."""
        status = os.fstat(directory)
        key = (status.st_dev, status.st_ino, name_bytes_max)
        if not after:
            self._runs = [item for item in self._runs if item[0] != key]
        for item in self._runs:
            if item[0] == key and (found := item[1].page(after, maximum)):
                return *found, item[1].omitted
        run = self._scan(directory, after, name_bytes_max)
        self._runs = [*self._runs[1 - RUNS_MAX :], (key, run)]
        names, more = run.page(after, maximum) or ([], False)
        return names, more, run.omitted

    def forget(self) -> None:
        """Give the memory back; listings that are under way go on with a new scan."""
        self._runs.clear()

    def _scan(self, directory: int, after: bytes, name_bytes_max: int) -> Run:
        smallest = _Smallest()
        omitted = 0
        with os.scandir(directory) as entries:
            for number, entry in enumerate(entries):
                if number % _BETWEEN_ENTRIES == 0:
                    self._between()
                if entry.inode() in self._hidden:
                    continue
                name = os.fsencode(entry.name)
                if len(name) > name_bytes_max:
                    omitted += 1
                elif name > after:
                    smallest.add(name)
        return Run(after, smallest.sorted(), smallest.complete, omitted)


class _Smallest:
    """The smallest of the names that were added, as many as there is memory for."""

    def __init__(self) -> None:
        self._names: list[bytes] = []
        self._bytes = 0
        self._beyond: bytes | None = None  # the smallest that was dropped

    @property
    def complete(self) -> bool:
        """Nothing was dropped."""
        return self._beyond is None

    def add(self, name: bytes) -> None:
        if self._beyond is not None and name >= self._beyond:
            return
        self._names.append(name)
        self._bytes += _cost(name)
        if self._bytes > NAMES_BYTES_MAX:
            self._names = self.sorted()
            self._bytes = sum(map(_cost, self._names))
            while self._bytes > NAMES_BYTES_MAX * 3 // 4:
                self._beyond = self._names.pop()
                self._bytes -= _cost(self._beyond)

    def sorted(self) -> list[bytes]:
        """Each once: a directory that is written meanwhile may show a name twice."""
        self._names.sort()
        return [name for name, _ in groupby(self._names)]


def _cost(name: bytes) -> int:
    return len(name) + _OBJECT_BYTES
