"""The workspace port over a plain directory of this host (S1's Milestone 4).

    async with open_local_workspace(directory) as workspace:
        await workspace.write("note.txt", b"...")

For workers that run no code yet, and for tests. Runs under asyncio and trio; the file system is
touched in threads.

Invariants: `sbxd.client.beneath` opens everything, so no path leaves the directory whatever
changes in it; FIFOs, sockets and devices are never opened; a file with a second name is neither
read nor replaced. Provenance is a map in memory that `write` alone writes: TOOL_WRITTEN while the
file is that one with those bytes, else UNKNOWN. SANDBOX_WRITTEN is never said here, since nothing
runs in a plain directory. Deliberately absent: a quota of the whole (only of each file), and
isolation of any kind.
"""

import hashlib
import os
import stat
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar, final

import anyio
import anyio.to_thread

from sbxd.client.beneath import (
    OPEN_DIRECTORY,
    OPEN_PATH,
    open_beneath,
    open_regular,
    probe,
    refusal,
)
from sbxd.client.channel import chunks_of
from sbxd.client.local_writing import Placed, Unfinished
from sbxd.policy.containment import PATH_BYTES_MAX, relative_bytes, resolve
from sbxd.port.artifact import ContentDigest
from sbxd.port.command import ChangeKind, FileChange
from sbxd.port.environment import WORKSPACE_ROOT
from sbxd.port.errors import WorkspaceCode, WorkspaceError, WorkspaceEscape
from sbxd.port.limits import GIB
from sbxd.port.workspace import (
    LISTING_ENTRIES_MAX,
    LISTING_HASH_BYTES_MAX,
    READ_BYTES_MAX,
    ContentStream,
    Listing,
    WorkspaceProvenance,
)

PIECE_BYTES = 256 * 1024
THREADS = 4
CLEANUP_SECONDS = 10
RECORDS_MAX = 100_000

ResultT = TypeVar("ResultT")


@asynccontextmanager
async def open_local_workspace(
    directory: Path, *, file_bytes_max: int = 4 * GIB
) -> AsyncIterator["LocalWorkspace"]:
    """The directory as a workspace, until the block ends.

    Raises: ContainmentUnavailable where the kernel has no openat2; OSError when the directory
    cannot be opened.
    """
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        probe(root)
        yield LocalWorkspace(root, file_bytes_max=file_bytes_max)
    finally:
        os.close(root)


@final
class LocalWorkspace:
    """Implements `sbxd.port.workspace.StreamingWorkspace`. Made by `open_local_workspace`."""

    def __init__(self, root: int, *, file_bytes_max: int) -> None:
        self._root = root
        self._file_bytes_max = file_bytes_max
        self._placed: dict[bytes, Placed] = {}
        self._hidden: set[int] = set()
        self._threads = anyio.CapacityLimiter(THREADS)

    @property
    def root(self) -> PurePosixPath:
        return WORKSPACE_ROOT

    def resolve(self, path: str | PurePosixPath) -> PurePosixPath:
        """As the port: lexical. Raises WorkspaceEscape."""
        return resolve(path)

    async def read(self, path: str) -> bytes:
        """As the port."""
        data = bytearray()
        async with self.read_stream(path, maximum_bytes=READ_BYTES_MAX) as content:
            async for piece in content:
                data += piece
        return bytes(data)

    async def write(self, path: str, data: bytes) -> None:
        """As the port; recorded as TOOL_WRITTEN."""
        await self.write_stream(path, size_bytes=len(data), data=chunks_of(data))

    async def listdir(self, path: str) -> Listing:
        """As the port."""
        name = relative_bytes(path)
        return await self._in_thread(lambda: self._list(name))

    async def provenance(self, path: str) -> WorkspaceProvenance:
        """As the port. Reads the file when a tool wrote one there."""
        name = relative_bytes(path)
        placed = self._placed.get(name)
        if placed is not None and await self._in_thread(lambda: self._is_still(name, placed)):
            return WorkspaceProvenance.TOOL_WRITTEN
        return WorkspaceProvenance.UNKNOWN

    @asynccontextmanager
    async def read_stream(self, path: str, *, maximum_bytes: int) -> AsyncIterator[ContentStream]:
        """As the port."""
        name = relative_bytes(path)
        descriptor, status = await self._in_thread(lambda: open_regular(self._root, name))
        try:
            if status.st_size > maximum_bytes:
                raise WorkspaceError(WorkspaceCode.TOO_LARGE, "the file is larger than the maximum")
            yield _Stream(self._in_thread_reading, descriptor, status)
        finally:
            os.close(descriptor)

    async def write_stream(self, path: str, *, size_bytes: int, data: AsyncIterable[bytes]) -> None:
        """As the port."""
        name = relative_bytes(path)
        if size_bytes > self._file_bytes_max:
            raise WorkspaceError(WorkspaceCode.NO_SPACE, "larger than a file here may be")
        unfinished = await self._in_thread(lambda: Unfinished(self._root, name))
        self._hidden.add(unfinished.inode)
        try:
            left = size_bytes
            async for piece in data:
                left -= len(piece)
                if left < 0:
                    raise ValueError("more bytes were given than announced")
                await self._in_thread(partial(unfinished.add, piece))
            if left:
                raise ValueError("fewer bytes were given than announced")
            placed = await self._in_thread(unfinished.place)
            self._placed.pop(name, None)
            if len(self._placed) >= RECORDS_MAX:
                del self._placed[next(iter(self._placed))]
            self._placed[name] = placed
        finally:
            with anyio.move_on_after(CLEANUP_SECONDS, shield=True):
                await self._in_thread(unfinished.abandon)
            self._hidden.discard(unfinished.inode)

    def _list(self, path: bytes) -> Listing:
        prefix = b"" if path == b"." else path + b"/"
        directory = self._open_directory(path)
        try:
            names = sorted(os.fsencode(name) for name in os.listdir(directory))
            nameable = [name for name in names if len(prefix + name) <= PATH_BYTES_MAX]
            found = Listing(truncated=len(nameable) < len(names))
            left = LISTING_HASH_BYTES_MAX
            for name in nameable:
                try:
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if status.st_ino in self._hidden:
                    continue
                if len(found) == LISTING_ENTRIES_MAX:
                    found.truncated = True
                    break
                digest = None
                if stat.S_ISREG(status.st_mode) and status.st_size <= left:
                    left -= status.st_size
                    digest = self._digest(prefix + name)
                elif stat.S_ISLNK(status.st_mode):
                    with suppress(OSError):  # it may have gone
                        digest = hashlib.sha256(os.readlink(name, dir_fd=directory)).digest()
                found.append(
                    FileChange(
                        path=(prefix + name).decode("utf-8", "surrogateescape"),
                        change=ChangeKind.CREATED,
                        size_bytes=status.st_size,
                        sha256=None if digest is None else digest.hex(),
                    )
                )
            return found
        finally:
            os.close(directory)

    def _open_directory(self, path: bytes) -> int:
        try:
            found = open_beneath(self._root, path, OPEN_PATH)
            try:
                if not stat.S_ISDIR(os.fstat(found).st_mode):
                    raise WorkspaceError(WorkspaceCode.NOT_A_DIRECTORY, "not a directory")
            finally:
                os.close(found)
            return open_beneath(self._root, path, OPEN_DIRECTORY)
        except OSError as problem:
            raise refusal(problem) from None

    def _is_still(self, path: bytes, placed: Placed) -> bool:
        try:
            found = open_beneath(self._root, path, OPEN_PATH)
        except OSError as problem:
            refused = refusal(problem)
            if isinstance(refused, WorkspaceEscape):
                raise refused from None
            return False
        try:
            status = os.fstat(found)
        finally:
            os.close(found)
        same = (status.st_dev, status.st_ino) == (placed.device, placed.inode)
        return same and self._digest(path) == placed.digest

    def _digest(self, path: bytes) -> bytes | None:
        try:
            descriptor, status = open_regular(self._root, path)
        except (WorkspaceError, WorkspaceEscape):
            return None
        try:
            digest = hashlib.sha256()
            left = status.st_size
            while left:
                data = os.read(descriptor, min(left, PIECE_BYTES))
                if not data:
                    return None
                digest.update(data)
                left -= len(data)
            return digest.digest()
        finally:
            os.close(descriptor)

    async def _in_thread_reading(self, work: Callable[[], bytes]) -> bytes:
        return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await anyio.to_thread.run_sync(work, limiter=self._threads)


class _Stream:
    """The pieces of one open file: exactly its size, and refused when it did not hold still."""

    def __init__(
        self,
        in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]],
        descriptor: int,
        status: os.stat_result,
    ) -> None:
        self._in_thread = in_thread
        self._descriptor = descriptor
        self._seen = _stamp(status)
        self._left = status.st_size
        self._size = status.st_size
        self._digest = hashlib.sha256()
        self._ended = False

    def digest(self) -> ContentDigest:
        """As the port."""
        if not self._ended:
            raise ValueError("the stream has not ended")
        return ContentDigest(sha256=self._digest.hexdigest(), size_bytes=self._size)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        piece = await self._in_thread(self._next)
        if not piece:
            self._ended = True
            raise StopAsyncIteration
        return piece

    def _next(self) -> bytes:
        if not self._left:
            if _stamp(os.fstat(self._descriptor)) != self._seen:
                raise _changed()
            return b""
        piece = os.read(self._descriptor, min(self._left, PIECE_BYTES))
        if not piece:
            raise _changed()
        self._left -= len(piece)
        self._digest.update(piece)
        return piece


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_nlink,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _changed() -> WorkspaceError:
    return WorkspaceError(WorkspaceCode.CHANGED_DURING_READ, "the file changed while it was read")
