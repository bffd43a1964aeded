"""The port in memory: for a worker's tests, and for development without a daemon.

    environment = FakeExecutionEnvironment(Script(by_argv={("true",): Outcome()}))

Executes nothing, records what it was asked, and answers from a script. Needs neither a daemon nor
trio: runs in the caller's event loop, asyncio or trio.
"""

import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import PurePosixPath

from sbxd.fake.bridge import BridgeHandler, HandledBridge
from sbxd.fake.engine import FAKE_SETTINGS, FakeEngine, OutputSink, Record, WallClock, utc_now
from sbxd.fake.script import Script
from sbxd.policy.containment import relative_bytes, resolve
from sbxd.policy.network import network_grant
from sbxd.port.artifact import ContentDigest
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.egress import EgressPolicy
from sbxd.port.environment import WORKSPACE_ROOT, EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import WorkspaceCode, WorkspaceError
from sbxd.port.workspace import READ_BYTES_MAX, ContentStream, Listing, WorkspaceProvenance
from sbxd.settings import Settings

PIECE_BYTES = 256 * 1024


@dataclass(frozen=True)
class ProvisionCall:
    specification: EnvironmentSpec


@dataclass(frozen=True)
class ExecuteCall:
    handle: EnvironmentHandle
    command: ExecutionCommand


@dataclass(frozen=True)
class DestroyCall:
    handle: EnvironmentHandle


RecordedCall = ProvisionCall | ExecuteCall | DestroyCall


class FakeExecutionEnvironment:
    """Implements `sbxd.port.environment.ExecutionEnvironment`.

    calls: everything that was asked, in order, also what was refused.
    """

    def __init__(
        self,
        script: Script,
        *,
        settings: Settings = FAKE_SETTINGS,
        known_digests: Container[str] | None = None,
        wall_clock: WallClock = utc_now,
        on_output: OutputSink | None = None,
        on_cancelled: Callable[[ExecutionResult], None] | None = None,
    ) -> None:
        """known_digests: None accepts every image. on_output: is awaited with each piece of
        output. on_cancelled: is told the CANCELLED result of an `execute` that was cancelled."""
        self._engine = FakeEngine(
            script, settings=settings, known_digests=known_digests, wall_clock=wall_clock
        )
        self._settings = settings
        self._on_output = on_output
        self._on_cancelled = on_cancelled
        self._bridge: BridgeHandler | None = None
        self.calls: list[RecordedCall] = []

    def with_bridge(self, handler: BridgeHandler) -> "FakeExecutionEnvironment":
        """The same environments; what is executed through this view has the bridge."""
        view = copy(self)
        view._bridge = handler
        return view

    async def provision(self, specification: EnvironmentSpec) -> EnvironmentHandle:
        """As the port."""
        self.calls.append(ProvisionCall(specification))
        return self._engine.provision(specification)

    async def execute(
        self, environment: EnvironmentHandle, command: ExecutionCommand
    ) -> ExecutionResult:
        """As the port: plays the script's answer."""
        self.calls.append(ExecuteCall(environment, command))
        record = self._engine.find(environment)
        self._engine.attempt(record)
        finished = False
        try:
            result = await self._engine.execute(
                record,
                command,
                on_output=self._on_output,
                bridge=None if self._bridge is None else HandledBridge(self._bridge),
            )
            finished = True
        finally:
            cancelled = record.cancelled_result
            if not finished and cancelled is not None and self._on_cancelled is not None:
                self._on_cancelled(cancelled)
        return result

    async def network_grant(self) -> EgressPolicy:
        """What `network_enabled` grants under this fake's settings."""
        return network_grant(self._settings.egress)

    async def destroy(self, environment: EnvironmentHandle) -> None:
        """As the port: idempotent."""
        self.calls.append(DestroyCall(environment))
        record = self._engine.get(environment.environment_id)
        if record is not None:
            self._engine.remove(self._engine.find(environment))

    def workspace(self, handle: EnvironmentHandle) -> "FakeWorkspaceHandle":
        """The files of one environment."""
        return FakeWorkspaceHandle(self._engine, handle)


class FakeWorkspaceHandle:
    """Implements `sbxd.port.workspace.StreamingWorkspace` over a dictionary."""

    def __init__(self, engine: FakeEngine, handle: EnvironmentHandle) -> None:
        self._engine = engine
        self._handle = handle

    @property
    def root(self) -> PurePosixPath:
        return WORKSPACE_ROOT

    def resolve(self, path: str | PurePosixPath) -> PurePosixPath:
        """The path inside the environment. Raises WorkspaceEscape."""
        return resolve(path)

    async def read(self, path: str) -> bytes:
        """As the port."""
        return self._content(path, READ_BYTES_MAX)

    async def write(self, path: str, data: bytes) -> None:
        """As the port; recorded as TOOL_WRITTEN."""
        self._engine.write(self._record(), relative_bytes(path), data)

    async def listdir(self, path: str) -> Listing:
        """As the port."""
        return self._record().workspace.listdir(relative_bytes(path))

    async def provenance(self, path: str) -> WorkspaceProvenance:
        """As the port."""
        return self._record().workspace.provenance(relative_bytes(path))

    @asynccontextmanager
    async def read_stream(self, path: str, *, maximum_bytes: int) -> AsyncIterator[ContentStream]:
        """As the port."""
        yield _FakeStream(self._content(path, maximum_bytes))

    async def write_stream(self, path: str, *, size_bytes: int, data: AsyncIterable[bytes]) -> None:
        """As the port."""
        name = relative_bytes(path)
        record = self._record()
        if size_bytes > record.specification.limits.workspace_bytes:
            raise WorkspaceError(WorkspaceCode.NO_SPACE, "larger than the workspace")
        content = bytearray()
        async for piece in data:
            content += piece
            if len(content) > size_bytes:
                raise ValueError("more bytes were given than announced")
        if len(content) < size_bytes:
            raise ValueError("fewer bytes were given than announced")
        self._engine.write(self._engine.find(self._handle), name, bytes(content))

    def _content(self, path: str, maximum_bytes: int) -> bytes:
        record, name = self._record(), relative_bytes(path)
        if len(record.workspace.read(name)) > maximum_bytes:
            raise WorkspaceError(WorkspaceCode.TOO_LARGE, "larger than what was asked for")
        return self._engine.read(record, name)

    def _record(self) -> Record:
        record = self._engine.find(self._handle)
        self._engine.attempt(record)
        return record


class _FakeStream:
    """The pieces of a content at hand."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._offset = 0
        self._ended = False

    def digest(self) -> ContentDigest:
        if not self._ended:
            raise ValueError("the stream has not ended")
        return ContentDigest(
            sha256=hashlib.sha256(self._content).hexdigest(), size_bytes=len(self._content)
        )

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece = self._content[self._offset : self._offset + PIECE_BYTES]
        self._offset += len(piece)
        if not piece:
            self._ended = True
            raise StopAsyncIteration
        return piece
