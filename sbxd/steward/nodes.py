"""The tree of a workspace as packed bytes: some 30 bytes and its name for each entry.

A directory is one block of bytes: how many entries and how many of them are directories, a record
of fixed size for each, and their names, directories first. A directory of more than SPLIT_ENTRIES
is FAN blocks, each with the entries whose names hash to it, so that a comparison never unpacks
more than a block. The hash is the interpreter's, with a key that no workload knows.

Invariants: a node never changes, so trees share what is the same; nothing here recurses.
"""

import os
import stat
from collections.abc import Iterator
from struct import Struct

SPLIT_ENTRIES = 4096
FAN = 256
# What the interpreter needs for a node besides its block, and for each directory in it.
NODE_BYTES = 168
BELOW_BYTES = 8

_HEAD = Struct("=II")
_RECORD = Struct("=QqQI")
pack_record = _RECORD.pack


class Node:
    """One directory, or one block of a split one.

    packed: the block; None for a split directory. below: the directories in the order of the
    block, or the FAN blocks.
    """

    __slots__ = ("below", "packed")

    def __init__(self, packed: bytes | None, below: "tuple[Node, ...]" = ()) -> None:
        self.packed = packed
        self.below = below

    @property
    def size_bytes(self) -> int:
        """What it costs in memory, without what is below."""
        return NODE_BYTES + len(self.packed or b"") + BELOW_BYTES * len(self.below)

    def blocks(self) -> "tuple[Node, ...]":
        """Itself, or the blocks of a split directory."""
        return self.below if self.packed is None else (self,)

    def records(self) -> dict[bytes, bytes]:
        """The entries of one block by name."""
        assert self.packed is not None
        count, _ = _HEAD.unpack_from(self.packed)
        names = _names(self.packed, count)
        size, start = _RECORD.size, _HEAD.size
        return {
            name: self.packed[start + size * index : start + size * (index + 1)]
            for index, name in enumerate(names)
        }

    def directory_names(self) -> Iterator[bytes]:
        """The directories of one block, in order; nothing but the next name is made."""
        assert self.packed is not None
        count, directories = _HEAD.unpack_from(self.packed)
        start = _HEAD.size + _RECORD.size * count + 1
        for _ in range(directories):
            end = self.packed.index(b"\0", start)
            yield self.packed[start:end]
            start = end + 1

    def find(self, name: bytes) -> int:
        """The place of a name in one block; -1 when it is not there."""
        assert self.packed is not None
        count, _ = _HEAD.unpack_from(self.packed)
        start = _HEAD.size + _RECORD.size * count
        found = self.packed.find(b"\0" + name + b"\0", start)
        return -1 if found < 0 else self.packed.count(b"\0", start, found)

    def block_of(self, name: bytes) -> "Node":
        """The block that holds this name if any does."""
        return self.below[bucket(name)] if self.packed is None else self

    def child(self, name: bytes) -> "Node | None":
        """The directory of that name."""
        block = self.block_of(name)
        place = block.find(name)
        return block.below[place] if 0 <= place < len(block.below) else None

    def get(self, path: bytes) -> bytes | None:
        """The record at a path: None where there is none, UNKNOWN where that was not read."""
        *parents, name = path.split(b"/")
        node: Node | None = self
        for parent in parents:
            if node is None or node is UNREAD:
                break
            node = node.child(parent)
        if node is UNREAD:
            return UNKNOWN
        if node is None:
            return None
        block = node.block_of(name)
        place = block.find(name)
        if place < 0:
            return None
        assert block.packed is not None
        return block.packed[_HEAD.size + _RECORD.size * place :][: _RECORD.size]


UNKNOWN = b""
NOTHING = _HEAD.pack(0, 0) + b"\0"
EMPTY = Node(NOTHING)
UNREAD = Node(bytes(NOTHING))  # told from EMPTY by identity
assert UNREAD is not EMPTY


def bucket(name: bytes) -> int:
    """Which block of a split directory a name belongs to."""
    return hash(name) % FAN


class Block:
    """The entries of one block while a directory is read."""

    def __init__(self) -> None:
        self.names: tuple[list[str], list[str]] = ([], [])  # directories, others
        self.records: tuple[list[bytes], list[bytes]] = ([], [])

    def __len__(self) -> int:
        return len(self.names[0]) + len(self.names[1])

    def pack(self) -> bytes:
        """The block of bytes."""
        directories, others = self.names
        if not (directories or others):
            return NOTHING
        head = _HEAD.pack(len(self), len(directories))
        names = os.fsencode("\0".join((*directories, *others)))
        return b"".join((head, *self.records[0], *self.records[1], b"\0", names, b"\0"))


class Split:
    """The blocks of a large directory while it is read, packed already."""

    def __init__(self) -> None:
        self._names = [(bytearray(), bytearray()) for _ in range(FAN)]
        self._records = [(bytearray(), bytearray()) for _ in range(FAN)]

    def add(self, block: Block) -> None:
        """Take over what has been read."""
        for place in (0, 1):
            for name, record in zip(block.names[place], block.records[place], strict=True):
                raw = os.fsencode(name)
                index = bucket(raw)
                self._names[index][place].extend(raw + b"\0")
                self._records[index][place].extend(record)

    def take(self, index: int) -> bytes:
        """One block of bytes, which is then forgotten here."""
        names, records = self._names[index], self._records[index]
        directories, others = (len(part) // _RECORD.size for part in records)
        head = _HEAD.pack(directories + others, directories)
        packed = b"".join((head, *records, b"\0", *names))
        for part in (*names, *records):
            part.clear()
        return packed


def _names(packed: bytes, count: int) -> list[bytes]:
    if not count:
        return []
    return packed[_HEAD.size + _RECORD.size * count + 1 : -1].split(b"\0")


def make(entries: dict[bytes, bytes], below: dict[bytes, Node]) -> Node:
    """One directory of these entries; below has its directories."""
    block = Block()
    for name, record in entries.items():
        place = 0 if is_directory(record) else 1
        block.names[place].append(os.fsdecode(name))
        block.records[place].append(record)
    return Node(block.pack(), tuple(below[os.fsencode(name)] for name in block.names[0]))


def split(node: Node) -> Node:
    """A directory as one of FAN blocks, whatever its size."""
    if node.packed is None:
        return node
    entries: list[dict[bytes, bytes]] = [{} for _ in range(FAN)]
    below = dict(zip(node.directory_names(), node.below, strict=True))
    for name, record in node.records().items():
        entries[bucket(name)][name] = record
    return Node(None, tuple(make(each, below) for each in entries))


def ctime_of(record: bytes) -> int:
    """In nanoseconds; 0 for a directory."""
    return int(_RECORD.unpack(record)[1])


def size_of(record: bytes) -> int:
    """0 for a directory."""
    return int(_RECORD.unpack(record)[2])


def mode_of(record: bytes) -> int:
    """As of stat."""
    return int(_RECORD.unpack(record)[3])


def is_directory(record: bytes) -> bool:
    """Whether it is a directory's."""
    return stat.S_ISDIR(mode_of(record))
