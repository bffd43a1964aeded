"""The workspace port over the daemon's socket: the files of one environment, nothing else.

The lexical rules of a path are judged here before anything is sent, and again by the daemon; no
symbolic link is judged here. A holder of a RemoteWorkspace cannot run anything with it.
"""

from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import PurePosixPath

from sbxd.client.channel import Call, Channel, chunks_of
from sbxd.client.replies import error_of, file_changes
from sbxd.policy.containment import relative_bytes, resolve
from sbxd.port.artifact import ContentDigest
from sbxd.port.command import FileChange
from sbxd.port.environment import WORKSPACE_ROOT, EnvironmentHandle
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.port.workspace import READ_BYTES_MAX, ContentStream, Listing, WorkspaceProvenance
from sbxd.wire import messages as m
from sbxd.wire.legality import ALL_TERMINAL


class RemoteWorkspace:
    """Implements `sbxd.port.workspace.StreamingWorkspace`.

    Every method raises WorkspaceEscape and WorkspaceError as the port says, and the errors of
    the execution port for the connection and the handle. A cancelled call is cancelled in the
    daemon too; a cancelled write leaves the file as it was.
    """

    def __init__(self, channel: Channel, handle: EnvironmentHandle) -> None:
        """channel: `RemoteExecutionEnvironment.channel`."""
        self._channel = channel
        self._handle = handle

    @property
    def root(self) -> PurePosixPath:
        return WORKSPACE_ROOT

    def resolve(self, path: str | PurePosixPath) -> PurePosixPath:
        """The path inside the environment. Lexical; raises WorkspaceEscape."""
        return resolve(path)

    async def read(self, path: str) -> bytes:
        """A whole file of at most 64 MiB (TOO_LARGE beyond)."""
        pieces: list[bytes] = []
        async with self.read_stream(path, maximum_bytes=READ_BYTES_MAX) as chunks:
            async for piece in chunks:
                pieces.append(piece)
        return b"".join(pieces)

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file; recorded as TOOL_WRITTEN."""
        await self.write_stream(path, size_bytes=len(data), data=chunks_of(data))

    async def listdir(self, path: str) -> Listing:
        """As the port."""
        name = relative_bytes(path)
        prefix = b"" if name == b"." else name + b"/"
        entries: list[FileChange] = []
        async with self._call(
            lambda request_id: m.WorkspaceList(
                request_id=request_id, handle=self._handle, path=name
            )
        ) as call:
            while True:
                message = await call.receive()
                if isinstance(message, m.Entries):
                    entries += file_changes(message.entries, prefix)
                elif isinstance(message, m.Listed):
                    return Listing(entries, truncated=message.truncated)
                elif type(message) in ALL_TERMINAL:
                    _raise_failure(message)

    async def provenance(self, path: str) -> WorkspaceProvenance:
        """Who wrote this file; UNKNOWN for one that never was."""
        name = relative_bytes(path)
        async with self._call(
            lambda request_id: m.WorkspaceProvenanceQuery(
                request_id=request_id, handle=self._handle, path=name
            )
        ) as call:
            reply = await call.receive()
        if isinstance(reply, m.ProvenanceIs):
            return reply.provenance
        _raise_failure(reply)
        raise ExecutionUnavailable(UnavailableCode.UNREACHABLE, "unexpected reply")

    @asynccontextmanager
    async def read_stream(self, path: str, *, maximum_bytes: int) -> AsyncIterator[ContentStream]:
        """The pieces of a file, in order, with flat memory, and then the daemon's digest of them.

            async with workspace.read_stream("a", maximum_bytes=2**30) as content:
                async for piece in content: ...
                content.digest()

        Args:
            maximum_bytes: the daemon refuses a larger file with TOO_LARGE.

        The errors of `read` are raised while iterating. Leaving the block early ends the
        transfer.
        """
        name = relative_bytes(path)
        async with self._call(
            lambda request_id: m.WorkspaceRead(
                request_id=request_id,
                handle=self._handle,
                path=name,
                maximum_bytes=maximum_bytes,
            )
        ) as call:
            yield _Chunks(call)

    async def write_stream(self, path: str, *, size_bytes: int, data: AsyncIterable[bytes]) -> None:
        """Create or replace a file from exactly size_bytes of `data`.

        Raises: ValueError when `data` holds more or fewer bytes; the file is then as it was.
        """
        name = relative_bytes(path)
        async with self._call(
            lambda request_id: m.WorkspaceWrite(
                request_id=request_id,
                handle=self._handle,
                path=name,
                size_bytes=size_bytes,
            )
        ) as call:
            await call.upload(data)
            reply = await call.receive()
        _raise_failure(reply)

    @asynccontextmanager
    async def _call(self, make: Callable[[int], m.Request]) -> AsyncIterator[Call]:
        call = await self._channel.start(make)
        try:
            yield call
        finally:
            call.cancel()
            self._channel.abandon(call, then=_ignore)


class _Chunks:
    """The file's pieces as an async iterator (no generator: nothing to finalise)."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._finished = False
        self._digest: ContentDigest | None = None

    def digest(self) -> ContentDigest:
        """As the port: what the daemon says that it read."""
        if self._digest is None:
            raise ValueError("the stream has not ended")
        return self._digest

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._finished:
            raise StopAsyncIteration
        message = await self._call.receive()
        if isinstance(message, m.Content):
            return message.data
        self._finished = True
        _raise_failure(message)
        if isinstance(message, m.ContentEnd):
            self._digest = ContentDigest(sha256=message.sha256, size_bytes=message.size_bytes)
        raise StopAsyncIteration


def _raise_failure(reply: m.Message) -> None:
    error = error_of(reply)
    if error is not None:
        raise error


def _ignore(reply: m.Message) -> None:
    """The terminal reply of a call that its caller has left."""
