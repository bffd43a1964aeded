"""The difference of two trees, bounded and in bytewise order of the paths.

Invariants: linear in the entries of what the trees do not share; at most one frame for each level
that can be named; the paths that are kept are bounded in number and in bytes.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from sbxd.steward.frames import PATH_BYTES_MAX, Kind
from sbxd.steward.nodes import EMPTY, UNREAD, Node, split

PATHS_BYTES_MAX = 2 * 1024 * 1024
_SLACK = 10_000


@dataclass(frozen=True, order=True, slots=True)
class Change:
    """record: what is remembered of the entry now (before its deletion for DELETED)."""

    path: bytes
    kind: Kind
    record: bytes


class Collector:
    """Keeps the first changes of any number, in memory for a few more: at most `maximum`, and
    PATHS_BYTES_MAX bytes of paths. What is at a path of `without` is not taken from `compare`."""

    def __init__(self, maximum: int, without: Container[bytes] = ()) -> None:
        self._maximum = maximum
        self.without = without
        self._changes: list[Change] = []
        self._bytes = 0
        self.truncated = False

    def add(self, change: Change) -> None:
        """Take one in."""
        if len(change.path) > PATH_BYTES_MAX:
            self.truncated = True  # deeper than anybody can name it
            return
        self._changes.append(change)
        self._bytes += len(change.path)
        if len(self._changes) > self._maximum + _SLACK or self._bytes > 2 * PATHS_BYTES_MAX:
            self._cut()

    def first(self) -> list[Change]:
        """The changes that are kept."""
        self._cut()
        return self._changes

    def _cut(self) -> None:
        self._changes.sort()
        kept = self._bytes = 0
        for change in self._changes[: self._maximum]:
            if self._bytes + len(change.path) > PATHS_BYTES_MAX:
                break
            self._bytes += len(change.path)
            kept += 1
        if len(self._changes) > kept:
            self.truncated = True
            del self._changes[kept:]


@dataclass(slots=True)
class _Pair:
    """Two directories of one path, and what of them is to be compared yet."""

    prefix: bytes
    blocks: list[tuple[Node, Node]]
    below: list[tuple[bytes, Node, Node]] = field(default_factory=list)


def compare(old: Node, new: Node, into: Collector) -> None:
    """Every entry that is in one tree only, or differs. Shared parts cost nothing; of what one of
    them has not read nothing is said but that it is missing."""
    stack = [_Pair(b"", _blocks(old, new, into))]
    while stack:
        pair = stack[-1]
        if pair.below:
            name, before, after = pair.below.pop()
            prefix = b"%b%b/" % (pair.prefix, name)
            if len(prefix) > PATH_BYTES_MAX:
                into.truncated = True
            else:
                stack.append(_Pair(prefix, _blocks(before, after, into)))
        elif pair.blocks:
            before, after = pair.blocks.pop()
            _compare_entries(pair.prefix, before, after, into)
            pair.below = _differing(before, after)
        else:
            stack.pop()


def _blocks(old: Node, new: Node, into: Collector) -> list[tuple[Node, Node]]:
    """The blocks that differ, with the same names in both of a pair."""
    if old is UNREAD or new is UNREAD:
        into.truncated = True
        return []
    if old is new:
        return []
    if old.packed is not None and new.packed is not None:
        return [(old, new)]
    pairs = zip(split(old).below, split(new).below, strict=True)
    return [(before, after) for before, after in pairs if before is not after]


def _compare_entries(prefix: bytes, old: Node, new: Node, into: Collector) -> None:
    if old.packed == new.packed:
        return
    before, after, without = old.records(), new.records(), into.without
    for name, record in after.items():
        known = before.get(name)
        if known != record:
            kind = Kind.CREATED if known is None else Kind.MODIFIED
            if (path := prefix + name) not in without:
                into.add(Change(path, kind, record))
    for name in before.keys() - after.keys():
        if (path := prefix + name) not in without:
            into.add(Change(path, Kind.DELETED, before[name]))


def _differing(old: Node, new: Node) -> list[tuple[bytes, Node, Node]]:
    """The directories of two blocks that are not shared."""
    before = dict(zip(old.directory_names(), old.below, strict=True))
    after = dict(zip(new.directory_names(), new.below, strict=True))
    pairs = (
        (name, before.get(name, EMPTY), after.get(name, EMPTY)) for name in before.keys() | after
    )
    return [(name, one, other) for name, one, other in pairs if one is not other]
