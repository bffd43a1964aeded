"""The port in memory: for a worker's tests, and for development without a daemon.

    environment = FakeExecutionEnvironment(Script(by_argv={("true",): Outcome()}))

Executes nothing, records what it was asked, and answers from a script. Needs neither a daemon nor
trio: runs in the caller's event loop, asyncio or trio.
"""

from collections.abc import Callable, Container
from copy import copy
from dataclasses import dataclass
from pathlib import PurePosixPath

from sbxd.fake.bridge import BridgeHandler, HandledBridge
from sbxd.fake.engine import FAKE_SETTINGS, FakeEngine, OutputSink, Record, WallClock, utc_now
from sbxd.fake.script import Script
from sbxd.policy.containment import relative_bytes, resolve
from sbxd.policy.network import network_grant
from sbxd.port.command import ExecutionCommand, ExecutionResult, FileChange
from sbxd.port.egress import EgressPolicy
from sbxd.port.environment import WORKSPACE_ROOT, EnvironmentHandle, EnvironmentSpec
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.settings import Settings


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
    """Implements `sbxd.port.workspace.WorkspaceHandle` over a dictionary."""

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
        return self._engine.read(self._record(), relative_bytes(path))

    async def write(self, path: str, data: bytes) -> None:
        """As the port; recorded as TOOL_WRITTEN."""
        self._engine.write(self._record(), relative_bytes(path), data)

    async def listdir(self, path: str) -> tuple[FileChange, ...]:
        """As the port."""
        return self._record().workspace.listdir(relative_bytes(path))

    async def provenance(self, path: str) -> WorkspaceProvenance:
        """As the port."""
        return self._record().workspace.provenance(relative_bytes(path))

    def _record(self) -> Record:
        record = self._engine.find(self._handle)
        self._engine.attempt(record)
        return record
