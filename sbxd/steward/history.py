"""What a workspace was before a command, and what the command changed.

One walk a command: the tree that was read after one command is the one to compare with after the
next, since between them nothing runs in the sandbox, and what the host writes is entered here.
Only when a comparison was abandoned is the tree read again before a command.

A file whose ctime is no proof yet when a command is about to run (see `tree`) is remembered by
its digest as well; when there is too much of that, the command waits out the clock's two ticks.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from sbxd.steward.changes import Change, Collector, compare
from sbxd.steward.digest import Budget, Digester
from sbxd.steward.frames import Kind
from sbxd.steward.tree import Clock, Interrupted, Node, Walker, ctime_of, mode_of, size_of

_HASHED_FILES_MAX = 256
_HASHED_BYTES_MAX = 4 * 1024 * 1024
_WAIT_NS_MAX = 1_000_000_000


@dataclass(frozen=True)
class Found:
    """One change and its digest (see `Digester.of`)."""

    change: Change
    digest: bytes | None


class History:
    """The tree of one workspace, from command to command."""

    def __init__(
        self, walker: Walker, digester: Digester, clock: Clock, wait: Callable[[int], None]
    ) -> None:
        self._walker = walker
        self._digester = digester
        self._clock = clock
        self._wait = wait
        self._tree = Node()
        self._complete = True
        self._current = True
        self._commands = 0
        self._racy: list[str] | None = []
        self._newest_ns = 0
        self._remembered: dict[str, bytes | None] = {}
        self._read(_never)

    @property
    def quiet_since(self) -> int | None:
        """How many commands there have been, when surely none is running."""
        return self._commands if self._current else None

    def snapshot(self) -> None:
        """Remember the tree as it is: a command is about to run."""
        if not self._current:
            self._read(_never)
        self._remember_racy()
        self._current = False
        self._commands += 1

    def changes(
        self, maximum: int, budget: Budget, interrupted: Interrupted
    ) -> tuple[list[Found], bool]:
        """What changed since the snapshot, and whether there was more.

        When `interrupted` raises, the snapshot stays what it was.
        """
        walk = self._walker.walk(self._tree, interrupted)
        into = Collector(maximum)
        compare(self._tree, walk.root, into)
        self._compare_remembered(walk.root, into, interrupted)
        found = []
        for change in into.first():
            digest = None
            if change.kind is not Kind.DELETED:
                digest = self._digester.of(change.path, mode_of(change.record), budget, interrupted)
            found.append(Found(change, digest))
        truncated = into.truncated or not (walk.complete and self._complete)
        self._tree, self._complete = walk.root, walk.complete
        self._racy, self._newest_ns = walk.racy, walk.newest_ns
        self._remembered = {}
        self._current = True
        return found, truncated

    def enter(self, path: bytes, record: bytes, digest: bytes | None) -> None:
        """The host put this there: for the commands it has always been there."""
        name = os.fsdecode(path)
        self._tree.put(name, record)
        self._remembered.pop(name, None)
        ctime = ctime_of(record)
        if ctime and ctime >= self._clock.now_ns() - self._clock.racy_ns:
            self._newest_ns = max(self._newest_ns, ctime)
            if self._current and self._racy is not None:
                self._racy.append(name)
            elif not self._current:
                self._remembered[name] = digest

    def _read(self, interrupted: Interrupted) -> None:
        walk = self._walker.walk(self._tree, interrupted)
        self._tree, self._complete = walk.root, walk.complete
        self._racy, self._newest_ns = walk.racy, walk.newest_ns

    def _remember_racy(self) -> None:
        self._remembered = {}
        age_ns = self._clock.now_ns() - self._newest_ns
        if age_ns > self._clock.racy_ns or self._racy == []:
            self._racy = []
            return
        young = []
        total = 0
        for name in self._racy or ():
            record = self._tree.get(name)
            if record is not None:
                young.append((name, record))
                total += size_of(record)
        affordable = (
            self._racy is not None
            and len(young) <= _HASHED_FILES_MAX
            and total <= _HASHED_BYTES_MAX
        )
        wait_ns = self._clock.racy_ns - age_ns + 1
        if not affordable and wait_ns <= _WAIT_NS_MAX:
            self._wait(wait_ns)
            return
        for name, record in young:  # also when the clock was set back under us: no wait ends that
            self._remembered[name] = self._digester.of(
                os.fsencode(name), mode_of(record), Budget(size_of(record)), _never
            )

    def _compare_remembered(self, new: Node, into: Collector, interrupted: Interrupted) -> None:
        for name, digest in self._remembered.items():
            record = new.get(name)
            if record is None or record != self._tree.get(name):
                continue  # the comparison of the trees has it
            path = os.fsencode(name)
            now = self._digester.of(path, mode_of(record), Budget(size_of(record)), interrupted)
            if now != digest:
                into.add(Change(path, Kind.MODIFIED, record))


def _never() -> None:
    return
