"""The difference of two trees, bounded and in bytewise order of the paths."""

import os
from dataclasses import dataclass

from sbxd.steward.frames import PATH_BYTES_MAX, Kind
from sbxd.steward.tree import EMPTY, Node

_SLACK = 10_000


@dataclass(frozen=True, order=True)
class Change:
    """record: what is remembered of the entry now (before its deletion for DELETED)."""

    path: bytes
    kind: Kind
    record: bytes


class Collector:
    """Keeps the first `maximum` changes of any number, in memory for a few more."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._changes: list[Change] = []
        self.truncated = False

    def add(self, change: Change) -> None:
        if len(change.path) > PATH_BYTES_MAX:
            self.truncated = True  # deeper than anybody can name it
            return
        self._changes.append(change)
        if len(self._changes) > self._maximum + _SLACK:
            self._cut()

    def first(self) -> list[Change]:
        """The changes that are kept."""
        self._cut()
        return self._changes

    def _cut(self) -> None:
        self._changes.sort()
        if len(self._changes) > self._maximum:
            self.truncated = True
            del self._changes[self._maximum :]


def compare(old: Node, new: Node, into: Collector) -> None:
    """Every entry that is in one tree only, or differs. Shared parts cost nothing."""
    stack = [(b"", old, new)]
    while stack:
        prefix, before, after = stack.pop()
        if before is after:
            continue
        if len(prefix) > PATH_BYTES_MAX:
            into.truncated = True
            continue
        if before.entries is not after.entries:
            _compare_entries(prefix, before.entries, after.entries, into)
        for name in before.directories.keys() | after.directories.keys():
            stack.append(
                (
                    prefix + os.fsencode(name) + b"/",
                    before.directories.get(name, EMPTY),
                    after.directories.get(name, EMPTY),
                )
            )


def _compare_entries(
    prefix: bytes, before: dict[str, bytes], after: dict[str, bytes], into: Collector
) -> None:
    for name, record in after.items():
        known = before.get(name)
        if known != record:
            kind = Kind.CREATED if known is None else Kind.MODIFIED
            into.add(Change(prefix + os.fsencode(name), kind, record))
    for name in before.keys() - after.keys():
        into.add(Change(prefix + os.fsencode(name), Kind.DELETED, before[name]))
