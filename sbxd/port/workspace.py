"""The workspace port: access to the files of one environment and to nothing else.

Separate from ExecutionEnvironment on purpose: who may read a file may not thereby run code.
The rules for paths are `sbxd.policy.containment`; the containment against the real file system
is the steward's.
"""

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Protocol

from sbxd.port.artifact import ContentDigest
from sbxd.port.command import FileChange

READ_BYTES_MAX = 64 * 1024 * 1024
LISTING_ENTRIES_MAX = 100_000
LISTING_HASH_BYTES_MAX = 64 * 1024 * 1024


class WorkspaceProvenance(StrEnum):
    UNKNOWN = "unknown"
    TOOL_WRITTEN = "tool_written"
    SANDBOX_WRITTEN = "sandbox_written"


class Listing(list[FileChange]):
    """The entries of one directory by name, each as CREATED: LISTING_ENTRIES_MAX at most. Files
    are digested up to LISTING_HASH_BYTES_MAX in all; what does not fit has no digest.

    truncated: the directory holds more: it is longer than that, or an entry's path is too long for
    the service."""

    def __init__(self, entries: Iterable[FileChange] = (), *, truncated: bool = False) -> None:
        super().__init__(entries)
        self.truncated = truncated


class WorkspaceHandle(Protocol):
    """S1's narrow port. Paths are relative to /workspace.

    Each method raises WorkspaceEscape for a path that leaves the workspace or breaks the lexical
    rules, and WorkspaceError (with a closed code) for what the file system refuses.
    """

    @property
    def root(self) -> PurePosixPath: ...

    def resolve(self, path: str | PurePosixPath) -> PurePosixPath: ...

    async def read(self, path: str) -> bytes:
        """A whole file of at most READ_BYTES_MAX (TOO_LARGE beyond)."""
        ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def listdir(self, path: str) -> Listing:
        """The whole directory, or its first entries and `truncated`."""
        ...

    async def provenance(self, path: str) -> WorkspaceProvenance: ...


class ContentStream(Protocol):
    """The pieces of a file, in order, iterated once; then what the service read."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    def digest(self) -> ContentDigest:
        """Size and SHA-256 as the service computed them over the bytes that it read.

        Raises: ValueError before the stream has ended.
        """
        ...


class StreamingWorkspace(WorkspaceHandle, Protocol):
    """The port for files that are larger than memory; both adapters have it."""

    def read_stream(
        self, path: str, *, maximum_bytes: int
    ) -> AbstractAsyncContextManager[ContentStream]:
        """The pieces of a file, with flat memory; TOO_LARGE for a file above maximum_bytes.

        The errors of `read` are raised on entering or while iterating. Leaving the block early
        ends the transfer.
        """
        ...

    async def write_stream(self, path: str, *, size_bytes: int, data: AsyncIterable[bytes]) -> None:
        """Create or replace a file from exactly size_bytes of `data`, all at once or not at all.

        Raises: ValueError when `data` holds more or fewer bytes; the file is then as it was.

        Cancellation: the file is as it was.
        """
        ...
