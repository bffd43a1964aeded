"""The adapters that the contract suite runs against, each as the same `Subject`."""

import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import trio

from sbxd.client.admin import connect_admin
from sbxd.client.bridge import BridgeHandler
from sbxd.client.remote import Hooks, RemoteExecutionEnvironment, connect
from sbxd.client.workspace import RemoteWorkspace
from sbxd.fake.environment import FakeExecutionEnvironment
from sbxd.port.command import ChangeKind, ExecutionCommand, ExecutionResult, FileChange
from sbxd.port.egress import DENY_ALL
from sbxd.port.environment import (
    BridgeEndpoint,
    EnvironmentHandle,
    EnvironmentSpec,
    ExecutionEnvironment,
)
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import MIB, ResourceLimits
from sbxd.port.workspace import WorkspaceHandle
from sbxd.settings import DEFAULT_CEILINGS
from sbxd.wire.messages import OutputStream
from tests.contract.commands import Argv, Commands, RealCommands, ScriptedCommands
from tests.service.memory import memory_daemon

WORKER_SOCKET = "/run/sbxd/worker.sock"
ADMIN_SOCKET = "/run/sbxd/admin.sock"
CREDENTIAL_FILE = Path("/etc/sbxd/service-credential")
FAKE_DIGEST = "sha256:" + "a" * 64
OTHER_DIGEST = "sha256:" + "b" * 64

LIMITS = ResourceLimits(
    cpu_millicores=1000,
    memory_bytes=256 * MIB,
    pids_max=64,
    workspace_bytes=64 * MIB,
    inodes_max=5000,
    wall_clock_seconds=60,
)


@dataclass
class Told:
    """What the hooks of an environment were told."""

    output: list[tuple[OutputStream, bytes]] = field(default_factory=list)
    cancelled: list[ExecutionResult] = field(default_factory=list)
    something: trio.Event = field(default_factory=trio.Event)

    async def on_output(self, stream: OutputStream, data: bytes) -> None:
        self.output.append((stream, data))
        self.something.set()

    def of(self, stream: OutputStream) -> bytes:
        return b"".join(data for s, data in self.output if s is stream)


class WorkspaceOf:
    """Opens the workspace port of an environment of either kind."""

    def __init__(self, environment: RemoteExecutionEnvironment | FakeExecutionEnvironment) -> None:
        self._environment = environment

    def __call__(self, handle: EnvironmentHandle) -> WorkspaceHandle:
        if isinstance(self._environment, FakeExecutionEnvironment):
            return self._environment.workspace(handle)
        return RemoteWorkspace(self._environment.channel, handle)


@dataclass
class Subject:
    """An environment under test, and how to ask it for things."""

    environment: ExecutionEnvironment
    workspace: WorkspaceOf
    commands: Commands
    told: Told
    image_digest: str
    ceilings: ResourceLimits
    runs: int = 0
    # A daemon remembers runs and their epochs from one test to the next.
    prefix: str = field(default_factory=lambda: secrets.token_hex(8))

    def specification(
        self,
        *,
        tenant: str = "tenant-a",
        run: str | None = None,
        epoch: int = 1,
        image_digest: str | None = None,
        bridge: BridgeEndpoint | None = None,
    ) -> EnvironmentSpec:
        """A specification of a run of its own."""
        self.runs += 1
        return EnvironmentSpec(
            tenant_id=TenantId(tenant),
            run_id=RunId(f"{self.prefix}-{run or self.runs}"),
            lease_epoch=epoch,
            image_digest=image_digest or self.image_digest,
            limits=LIMITS,
            egress=DENY_ALL,
            environment={},
            bridge=bridge,
        )

    def with_bridge(self, handler: BridgeHandler) -> "Subject":
        """The same subject; what it executes has the bridge, with this handler."""
        environment = self.environment
        if isinstance(environment, FakeExecutionEnvironment):
            return replace(self, environment=environment.with_bridge(handler))
        assert isinstance(environment, RemoteExecutionEnvironment)
        hooks = replace(environment.hooks, bridge=handler)
        return replace(self, environment=environment.with_hooks(hooks))

    @asynccontextmanager
    async def provisioned(self) -> AsyncIterator[EnvironmentHandle]:
        """An environment that is destroyed when the block ends."""
        handle = await self.environment.provision(self.specification())
        try:
            yield handle
        finally:
            await self.environment.destroy(handle)

    async def run(
        self,
        handle: EnvironmentHandle,
        argv: Argv,
        *,
        stdin: bytes | None = None,
        timeout_seconds: int = 30,
        maximum_output_bytes: int = MIB,
        working_directory: str = ".",
    ) -> ExecutionResult:
        return await self.environment.execute(
            handle,
            ExecutionCommand(
                argv=argv,
                working_directory=working_directory,
                timeout_seconds=timeout_seconds,
                stdin=stdin,
                maximum_output_bytes=maximum_output_bytes,
            ),
        )


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def created(path: str, text: str) -> FileChange:
    return FileChange(
        path=path, change=ChangeKind.CREATED, size_bytes=len(text), sha256=sha256(text)
    )


def with_handle(handle: EnvironmentHandle, **fields: object) -> EnvironmentHandle:
    """The handle with other fields, as a buggy or hostile worker would present it."""
    return msgspec.structs.replace(handle, **fields)


@asynccontextmanager
async def fake_in_process() -> AsyncIterator[Subject]:
    commands, told = ScriptedCommands(), Told()
    environment = FakeExecutionEnvironment(
        commands.script(),
        known_digests={FAKE_DIGEST},
        on_output=told.on_output,
        on_cancelled=told.cancelled.append,
    )
    yield Subject(
        environment, WorkspaceOf(environment), commands, told, FAKE_DIGEST, DEFAULT_CEILINGS
    )


@asynccontextmanager
async def fake_behind_a_daemon() -> AsyncIterator[Subject]:
    commands, told = ScriptedCommands(), Told()
    async with (
        memory_daemon(commands.script(), known_digests=frozenset({FAKE_DIGEST})) as daemon,
        daemon.channel() as channel,
    ):
        environment = RemoteExecutionEnvironment(
            channel, hooks=Hooks(on_output=told.on_output, on_cancelled=told.cancelled.append)
        )
        yield Subject(
            environment, WorkspaceOf(environment), commands, told, FAKE_DIGEST, DEFAULT_CEILINGS
        )


def service_credential() -> bytes | None:
    """The lane's credential, which a worker there would be given; None where there is none."""
    return CREDENTIAL_FILE.read_bytes().strip() if CREDENTIAL_FILE.exists() else None


@asynccontextmanager
async def real_daemon() -> AsyncIterator[Subject]:
    """The daemon of this lane, through its worker socket."""
    async with connect_admin(ADMIN_SOCKET) as admin:
        described = await admin.describe()
    assert described.mechanism not in ("", "fake")
    assert described.default_image is not None, "the lane's daemon has no default image"
    told = Told()
    credential = service_credential()
    async with connect(
        WORKER_SOCKET,
        credential=credential,
        client_name="contract",
        hooks=Hooks(on_output=told.on_output, on_cancelled=told.cancelled.append),
    ) as environment:
        yield Subject(
            environment,
            WorkspaceOf(environment),
            RealCommands(),
            told,
            described.default_image,
            described.ceilings,
        )
