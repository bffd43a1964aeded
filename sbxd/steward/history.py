"""What a workspace was before a command, and what the command changed.

One walk a command: the tree that was read after one command is the one to compare with after the
next, since between them nothing runs in the sandbox, and what the host writes is entered here.
Only when a comparison was abandoned is the tree read again before a command.

A file whose ctime is no proof yet when a command is about to run (see `tree`) is remembered by
its digest as well; when there is too much of that, the command waits out the clock's two ticks.

What the host writes meanwhile is kept beside the tree, and counts as if it had always been there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from sbxd.steward.changes import Change, Collector, compare
from sbxd.steward.digest import Budget, Digester
from sbxd.steward.frames import Kind
from sbxd.steward.nodes import UNKNOWN, Node, ctime_of, mode_of, size_of
from sbxd.steward.tree import Clock, Interrupted, Walk, Walker

_HASHED_FILES_MAX = 256
_HASHED_BYTES_MAX = 4 * 1024 * 1024
_WAIT_NS_MAX = 1_000_000_000
# How much of what the host writes is kept beside the tree.
_WRITTEN_MAX = 10_000
_WRITTEN_BYTES_MAX = 2 * 1024 * 1024
# How long one comparison may take until what it has not read yet is told without a digest; the
# daemon waits for 60 s.
_CHANGES_SECONDS = 40.0


@dataclass(frozen=True)
class Found:
    """One change and its digest (see `Digester.of`)."""

    change: Change
    digest: bytes | None


class _OutOfTime(Exception):
    """The rest is told without."""


class History:
    """The tree of one workspace, from command to command."""

    def __init__(
        self,
        walker: Walker,
        digester: Digester,
        clock: Clock,
        wait: Callable[[int], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._walker = walker
        self._digester = digester
        self._clock = clock
        self._wait = wait
        self._monotonic = monotonic
        self._tree = Walk()
        self._current = True
        self._stale = False  # the host wrote more than is kept
        self._commands = 0
        self._newest_ns = 0
        self._written: dict[bytes, bytes] = {}
        self._written_bytes = 0
        self._remembered: dict[bytes, bytes | None] = {}
        self._take(self._walker.walk(self._tree, _never))

    @property
    def quiet_since(self) -> int | None:
        """How many commands there have been, when surely none is running."""
        return self._commands if self._current else None

    @property
    def root(self) -> Node:
        """The tree as it was read last."""
        return self._tree.root

    def snapshot(self) -> None:
        """Remember the tree as it is: a command is about to run."""
        if self._stale or not self._current:
            self._take(self._walker.walk(self._tree, _never))
        self._remember_racy()
        self._current = False
        self._commands += 1

    def changes(
        self, maximum: int, budget: Budget, interrupted: Interrupted
    ) -> tuple[list[Found], bool]:
        """What changed since the snapshot, and whether there was more.

        When `interrupted` raises, the snapshot stays what it was.
        """
        until = self._monotonic() + _CHANGES_SECONDS

        def between() -> None:
            interrupted()
            if self._monotonic() > until:
                raise _OutOfTime

        walk = self._walker.walk(self._tree, interrupted)
        into = Collector(maximum, self._written)
        compare(self._tree.root, walk.root, into)
        self._compare_written(walk.root, into)
        truncated = not (walk.complete and self._tree.complete) or self._stale
        try:
            self._compare_remembered(walk.root, into, between)
        except _OutOfTime:
            truncated = True
        found = []
        for change in into.first():
            digest = None
            if change.kind is not Kind.DELETED and self._monotonic() <= until:
                try:
                    digest = self._digester.of(change.path, mode_of(change.record), budget, between)
                except _OutOfTime:
                    truncated = True
            found.append(Found(change, digest))
        truncated = truncated or into.truncated or self._monotonic() > until
        self._take(walk)
        return found, truncated

    def enter(self, path: bytes, record: bytes, digest: bytes | None) -> None:
        """The host put this there: for the commands it has always been there."""
        self._remembered.pop(path, None)
        if path not in self._written:
            self._written_bytes += len(path)
        if len(self._written) >= _WRITTEN_MAX or self._written_bytes > _WRITTEN_BYTES_MAX:
            self._stale = True
            return
        self._written[path] = record
        ctime = ctime_of(record)
        if ctime and ctime >= self._clock.now_ns() - self._clock.racy_ns:
            self._newest_ns = max(self._newest_ns, ctime)
            if not self._current:
                self._remembered[path] = digest
            elif self._tree.racy is not None:
                self._tree.racy.append(path)

    def _take(self, walk: Walk) -> None:
        self._tree, self._newest_ns = walk, walk.newest_ns
        self._current, self._stale = True, False
        self._written, self._written_bytes = {}, 0
        self._remembered = {}

    def _known(self, path: bytes) -> bytes | None:
        """What the next comparison starts from; UNKNOWN where that was not read."""
        return self._written.get(path) or self._tree.root.get(path)

    def _remember_racy(self) -> None:
        self._remembered = {}
        age_ns = self._clock.now_ns() - self._newest_ns
        if age_ns > self._clock.racy_ns or self._tree.racy == []:
            self._tree.racy = []
            return
        young = []
        total = 0
        for path in self._tree.racy or ():
            if record := self._known(path):
                young.append((path, record))
                total += size_of(record)
        affordable = (
            self._tree.racy is not None
            and len(young) <= _HASHED_FILES_MAX
            and total <= _HASHED_BYTES_MAX
        )
        wait_ns = self._clock.racy_ns - age_ns + 1
        if not affordable and wait_ns <= _WAIT_NS_MAX:
            self._wait(wait_ns)
            return
        for path, record in young:  # also when the clock was set back under us: no wait ends that
            self._remembered[path] = self._digester.of(
                path, mode_of(record), Budget(size_of(record)), _never
            )

    def _compare_written(self, new: Node, into: Collector) -> None:
        for path, known in self._written.items():
            record = new.get(path)
            if record is None:
                into.add(Change(path, Kind.DELETED, known))
            elif record not in (UNKNOWN, known):
                into.add(Change(path, Kind.MODIFIED, record))

    def _compare_remembered(self, new: Node, into: Collector, between: Interrupted) -> None:
        for path, digest in self._remembered.items():
            record = new.get(path)
            if not record or record != self._known(path):
                continue  # the comparison of the trees has it
            now = self._digester.of(path, mode_of(record), Budget(size_of(record)), between)
            if now != digest:
                into.add(Change(path, Kind.MODIFIED, record))


def _never() -> None:
    return
