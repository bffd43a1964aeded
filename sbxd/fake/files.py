"""A workspace as a dictionary: regular files and directories, no links.

Invariants: names are bytes relative to the root, already lexically checked by the caller; every
parent of an entry is a directory; `bytes_used` and the number of entries stay within the limits.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from sbxd.port.command import ChangeKind, FileChange
from sbxd.port.errors import WorkspaceCode, WorkspaceError
from sbxd.port.workspace import LISTING_ENTRIES_MAX, Listing, WorkspaceProvenance

ROOT = b"."


@dataclass(frozen=True)
class FakeFile:
    """content: None for a directory."""

    content: bytes | None
    provenance: WorkspaceProvenance


Snapshot = Mapping[bytes, FakeFile]


class FakeWorkspace:
    """The files of one fake environment."""

    def __init__(self, *, bytes_max: int, inodes_max: int) -> None:
        self._bytes_max = bytes_max
        self._inodes_max = inodes_max
        self._entries: dict[bytes, FakeFile] = {}

    @property
    def bytes_used(self) -> int:
        return sum(len(entry.content or b"") for entry in self._entries.values())

    @property
    def inodes_used(self) -> int:
        return len(self._entries)

    @property
    def bytes_left(self) -> int:
        return self._bytes_max - self.bytes_used

    @property
    def inodes_left(self) -> int:
        return self._inodes_max - self.inodes_used

    def snapshot(self) -> Snapshot:
        """What is there now, unaffected by later changes."""
        return dict(self._entries)

    def files(self) -> dict[str, bytes]:
        """The regular files by name (text with surrogateescape)."""
        return {
            name.decode("utf-8", "surrogateescape"): entry.content
            for name, entry in self._entries.items()
            if entry.content is not None
        }

    def is_directory(self, name: bytes) -> bool:
        if name == ROOT:
            return True
        entry = self._entries.get(name)
        return entry is not None and entry.content is None

    def read(self, name: bytes) -> bytes:
        """Raises WorkspaceError: NOT_FOUND, IS_A_DIRECTORY."""
        if self.is_directory(name):
            raise WorkspaceError(WorkspaceCode.IS_A_DIRECTORY, "a directory, not a file")
        entry = self._entries.get(name)
        if entry is None or entry.content is None:
            raise WorkspaceError(WorkspaceCode.NOT_FOUND, "no such file")
        return entry.content

    def write(self, name: bytes, content: bytes, provenance: WorkspaceProvenance) -> None:
        """Create or replace a file, making its parents; changes nothing when it raises.

        Raises WorkspaceError: IS_A_DIRECTORY, NOT_A_DIRECTORY, NO_SPACE.
        """
        if self.is_directory(name):
            raise WorkspaceError(WorkspaceCode.IS_A_DIRECTORY, "a directory is in the way")
        added: dict[bytes, FakeFile] = {}
        parts = name.split(b"/")
        for depth in range(1, len(parts)):
            parent = b"/".join(parts[:depth])
            entry = self._entries.get(parent)
            if entry is None:
                added[parent] = FakeFile(None, provenance)
            elif entry.content is not None:
                raise WorkspaceError(WorkspaceCode.NOT_A_DIRECTORY, "a file is in the way")
        added[name] = FakeFile(content, provenance)
        previous = self._entries.get(name)
        replaced = 0 if previous is None else len(previous.content or b"")
        if (
            self.bytes_used - replaced + len(content) > self._bytes_max
            or len(self._entries | added) > self._inodes_max
        ):
            raise WorkspaceError(WorkspaceCode.NO_SPACE, "the workspace is full")
        self._entries |= added

    def delete(self, name: bytes) -> None:
        """Remove an entry and all below it; nothing happens when there is none."""
        below = name + b"/"
        for entry in [n for n in self._entries if n == name or n.startswith(below)]:
            del self._entries[entry]

    def listdir(self, name: bytes) -> Listing:
        """The entries of one directory, by their paths relative to the root, sorted.

        Raises WorkspaceError: NOT_FOUND, NOT_A_DIRECTORY.
        """
        if not self.is_directory(name):
            if name in self._entries:
                raise WorkspaceError(WorkspaceCode.NOT_A_DIRECTORY, "a file, not a directory")
            raise WorkspaceError(WorkspaceCode.NOT_FOUND, "no such directory")
        prefix = b"" if name == ROOT else name + b"/"
        names = [
            entry
            for entry in sorted(self._entries)
            if entry.startswith(prefix) and b"/" not in entry[len(prefix) :]
        ]
        return Listing(
            (
                _change(entry, ChangeKind.CREATED, self._entries[entry])
                for entry in names[:LISTING_ENTRIES_MAX]
            ),
            truncated=len(names) > LISTING_ENTRIES_MAX,
        )

    def provenance(self, name: bytes) -> WorkspaceProvenance:
        """UNKNOWN for whatever was never written, and for a directory."""
        entry = self._entries.get(name)
        if entry is None or entry.content is None:
            return WorkspaceProvenance.UNKNOWN
        return entry.provenance

    def changes_since(self, before: Snapshot) -> tuple[FileChange, ...]:
        """What was created, modified or deleted since a snapshot, sorted by name."""
        found = [
            _change(name, ChangeKind.CREATED, entry)
            for name, entry in self._entries.items()
            if name not in before
        ]
        found += [
            _change(name, ChangeKind.MODIFIED, entry)
            for name, entry in self._entries.items()
            if name in before and before[name].content != entry.content
        ]
        found += [
            _change(name, ChangeKind.DELETED, entry)
            for name, entry in before.items()
            if name not in self._entries
        ]
        return tuple(sorted(found, key=lambda change: change.path))


def _change(name: bytes, kind: ChangeKind, entry: FakeFile) -> FileChange:
    sha256 = None
    if entry.content is not None and kind is not ChangeKind.DELETED:
        sha256 = hashlib.sha256(entry.content).hexdigest()
    return FileChange(
        path=name.decode("utf-8", "surrogateescape"),
        change=kind,
        size_bytes=len(entry.content or b""),
        sha256=sha256,
    )
