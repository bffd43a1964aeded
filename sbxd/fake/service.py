"""The fake behind a real daemon: `sandbox = "fake"`.

Implements `sbxd.lifecycle.environments.Environments` over the engine, with the ownership rules
that the daemon's lifecycle has. The only module of this package that imports the daemon's side.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime

import msgspec
import trio

from sbxd.audit.lease_events import ClearingProof
from sbxd.fake.engine import FakeEngine, Record, Stop, gone
from sbxd.lifecycle.environments import (
    LIST_PAGE_ENTRIES,
    BridgeWorker,
    Census,
    ContentSink,
    Description,
    EntriesSink,
    OutputSink,
    Peer,
    PeerRole,
    PoolCensus,
    Quarantined,
    ReapReport,
    ReconcileReport,
)
from sbxd.policy.containment import relative_bytes
from sbxd.port.command import ExecutionCommand, ExecutionResult, Usage
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import (
    ExecutionRejected,
    PortError,
    RejectedCode,
    WorkspaceCode,
    WorkspaceError,
)
from sbxd.port.ids import EnvironmentId
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.wire.descriptions import EnvironmentInfo
from sbxd.wire.messages import CHUNK_BYTES_MAX
from sbxd.wire.observing import PROGRAM_BYTES_MAX, EnvironmentMeter
from sbxd.wire.repair import ClearingWord


class FakeEnvironments:
    """All environments of a daemon that runs nothing."""

    def __init__(self, engine: FakeEngine, nursery: trio.Nursery, *, grace_seconds: float) -> None:
        """nursery: outlives every connection; waits out the grace of orphans there.
        grace_seconds: `service.orphan_grace_seconds`."""
        self._engine = engine
        self._nursery = nursery
        self._grace_seconds = grace_seconds

    async def provision(self, owner: Peer, specification: EnvironmentSpec) -> EnvironmentHandle:
        """As the protocol."""
        await trio.lowlevel.checkpoint()
        return self._engine.provision(
            specification, owner_uid=owner.uid, connection_id=owner.connection_id
        )

    def attempt(self, owner: Peer, handle: EnvironmentHandle) -> None:
        """As the protocol."""
        self._engine.attempt(self._find(owner, handle))

    async def execute(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        command: ExecutionCommand,
        *,
        cancelled: trio.Event,
        on_output: OutputSink | None = None,
        bridge: BridgeWorker | None = None,
    ) -> ExecutionResult:
        """As the protocol."""
        record = self._find(owner, handle)

        async def cancel_when_told() -> None:
            await cancelled.wait()
            record.end_command(Stop.CANCELLED)

        result: ExecutionResult | PortError
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_when_told)
            try:
                result = await self._engine.execute(
                    record, command, on_output=on_output, bridge=bridge
                )
            except PortError as error:
                result = error
            nursery.cancel_scope.cancel()
        if isinstance(result, PortError):
            raise result
        if on_output is None:
            return result
        return msgspec.structs.replace(result, stdout=b"", stderr=b"")

    async def destroy(self, owner: Peer, handle: EnvironmentHandle) -> None:
        """As the protocol."""
        await trio.lowlevel.checkpoint()
        record = self._engine.get(handle.environment_id)
        if record is not None and _may_use(owner, record):
            self._engine.remove(self._engine.find(handle))

    async def read(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        path: bytes,
        *,
        maximum_bytes: int,
        on_content: ContentSink,
    ) -> None:
        """As the protocol."""
        record, name = self._find(owner, handle), relative_bytes(path)
        if len(record.workspace.read(name)) > maximum_bytes:
            raise WorkspaceError(WorkspaceCode.TOO_LARGE, "larger than what was asked for")
        content = self._engine.read(record, name)
        for start in range(0, len(content), CHUNK_BYTES_MAX):
            await on_content(content[start : start + CHUNK_BYTES_MAX])

    async def write(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        path: bytes,
        *,
        size_bytes: int,
        data: AsyncIterator[bytes],
    ) -> None:
        """As the protocol."""
        record = self._find(owner, handle)
        name = relative_bytes(path)
        if size_bytes > record.specification.limits.workspace_bytes:
            raise WorkspaceError(WorkspaceCode.NO_SPACE, "larger than the workspace")
        content = b"".join([piece async for piece in data])
        self._engine.write(self._find(owner, handle), name, content)

    async def listdir(
        self, owner: Peer, handle: EnvironmentHandle, path: bytes, *, on_entries: EntriesSink
    ) -> bool:
        """As the protocol."""
        await trio.lowlevel.checkpoint()
        found = self._find(owner, handle).workspace.listdir(relative_bytes(path))
        for start in range(0, len(found), LIST_PAGE_ENTRIES):
            page = found[start : start + LIST_PAGE_ENTRIES]
            await on_entries(
                [msgspec.structs.replace(each, path=each.path.split("/")[-1]) for each in page]
            )
        return found.truncated

    async def provenance(
        self, owner: Peer, handle: EnvironmentHandle, path: bytes
    ) -> WorkspaceProvenance:
        """As the protocol."""
        await trio.lowlevel.checkpoint()
        return self._find(owner, handle).workspace.provenance(relative_bytes(path))

    async def describe(self) -> Description:
        """As the protocol; a fake has no reserve and nothing to check."""
        await trio.lowlevel.checkpoint()
        return Description(
            mechanism="fake",
            environments=len(self._engine.records()),
            quarantined=(),
            reserve_ready=0,
            reserve_target=0,
            posture=(),
        )

    def census(self) -> Census:
        """As the protocol."""
        states = Counter(_state(record) for record in self._engine.records())
        pool = PoolCensus(building=0, target=0, ages_seconds=())
        return Census(states=dict(states), waiting=0, pool=pool)

    async def meters(
        self, denials_of: Callable[[EnvironmentId], int]
    ) -> tuple[EnvironmentMeter, ...]:
        """As the protocol; in memory nothing uses a processor."""
        await trio.lowlevel.checkpoint()
        return tuple(
            _meter(record, denials_of(record.handle.environment_id))
            for record in self._engine.records()
        )

    async def list(self) -> tuple[EnvironmentInfo, ...]:
        """As the protocol."""
        await trio.lowlevel.checkpoint()
        return tuple(_info(record) for record in self._engine.records())

    async def inspect(self, environment_id: EnvironmentId) -> EnvironmentInfo:
        """As the protocol."""
        await trio.lowlevel.checkpoint()
        record = self._engine.get(environment_id)
        if record is None:
            raise gone()
        return _info(record)

    async def reconcile(self) -> ReconcileReport:
        """As the protocol; nothing outlives a fake."""
        await trio.lowlevel.checkpoint()
        return ReconcileReport(destroyed=(), quarantined=())

    async def reap(self) -> ReapReport:
        """As the protocol; a fake asks no authority."""
        await trio.lowlevel.checkpoint()
        return ReapReport(asked=0, stale=(), unknown=0, unanswered=())

    async def quarantine(self) -> tuple[Quarantined, ...]:
        """As the protocol; nothing outlives a fake."""
        await trio.lowlevel.checkpoint()
        return ()

    async def clear_quarantine(self, peer: Peer, name: str, word: ClearingWord) -> ClearingProof:
        """As the protocol; nothing is quarantined."""
        await trio.lowlevel.checkpoint()
        raise ExecutionRejected(
            RejectedCode.ENVIRONMENT_GONE, "nothing of that name is quarantined", field="name"
        )

    def images_in_use(self) -> Mapping[str, int]:
        """As the protocol."""
        return Counter(record.specification.image_digest for record in self._engine.records())

    def release_owner(self, connection_id: int) -> None:
        """As the protocol."""
        for record in self._engine.records():
            if record.connection_id == connection_id:
                self._nursery.start_soon(self._destroy_orphan, record, connection_id)

    async def _destroy_orphan(self, record: Record, connection_id: int) -> None:
        await trio.sleep(self._grace_seconds)
        if record.connection_id == connection_id:
            self._engine.remove(record)

    def _find(self, owner: Peer, handle: EnvironmentHandle) -> Record:
        record = self._engine.get(handle.environment_id)
        if record is None:
            self._engine.refuse_over_budget(handle)
        if record is None or not _may_use(owner, record):
            raise gone()
        found = self._engine.find(handle)
        if owner.role is PeerRole.WORKER:
            found.connection_id = owner.connection_id
        return found


def _may_use(owner: Peer, record: Record) -> bool:
    return owner.role is PeerRole.ADMIN or owner.uid == record.owner_uid


def _state(record: Record) -> str:
    return "LIVE" if record.running is None else "RUNNING"


def _meter(record: Record, denials: int) -> EnvironmentMeter:
    handle, limits = record.handle, record.specification.limits
    program = None if record.running is None else record.running[0]
    return EnvironmentMeter(
        environment_id=handle.environment_id,
        tenant_id=handle.tenant_id,
        run_id=handle.run_id,
        state=_state(record),
        age_ms=max(0, round((datetime.now(UTC) - handle.created_at).total_seconds() * 1000)),
        commands_run=record.commands_run,
        cpu_ms=None,
        cpu_millicores=limits.cpu_millicores,
        memory_bytes=None,
        memory_max_bytes=limits.memory_bytes,
        denials=denials,
        program=None
        if program is None
        else program.encode("utf-8", "surrogateescape")[:PROGRAM_BYTES_MAX],
    )


def _info(record: Record) -> EnvironmentInfo:
    return EnvironmentInfo(
        handle=record.handle,
        state=_state(record),
        image_digest=record.specification.image_digest,
        limits=record.specification.limits,
        owner_uid=record.owner_uid,
        commands_run=record.commands_run,
        running_argv=None
        if record.running is None
        else tuple(word.encode("utf-8", "surrogateescape") for word in record.running),
        usage=Usage(
            workspace_bytes=record.workspace.bytes_used,
            workspace_inodes=record.workspace.inodes_used,
        ),
        scope="",
    )
