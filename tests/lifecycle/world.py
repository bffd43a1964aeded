"""A whole lifecycle over the double: what a test of it starts with."""

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import trio

from sbxd.audit.events import AuditEvent, DestroyReason, EnvironmentDestroyed
from sbxd.audit.losses import EnvironmentLost
from sbxd.audit.sink import AuditUnavailable, MemorySink
from sbxd.lifecycle.budgets import Budgets, budgets_of
from sbxd.lifecycle.commands import CommandRules
from sbxd.lifecycle.environments import BridgeWorker, OutputSink, Peer, PeerRole
from sbxd.lifecycle.journal import Durability, Journal, JournalStore, JournalUnwritable
from sbxd.lifecycle.leases import LeaseAuthority, LeaseReaper
from sbxd.lifecycle.local import LocalEnvironments
from sbxd.lifecycle.provision import Provisioner
from sbxd.lifecycle.reconcile import Reconciler
from sbxd.lifecycle.registry import Clock, Registry, back_stop_seconds
from sbxd.lifecycle.supervisor import Parts
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.egress import DENY_ALL, EgressPolicy
from sbxd.port.environment import BridgeEndpoint, EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.limits import MIB, ResourceLimits
from sbxd.settings import (
    AuthMode,
    DeploymentMode,
    ImageSettings,
    LimitSettings,
    ReserveSettings,
    SandboxMechanism,
    ServiceSettings,
    Settings,
)
from tests.lifecycle.double import Behaviour, MechanismDouble, Script
from tests.lifecycle.egress_double import EgressDouble

ResultT = TypeVar("ResultT")

IMAGE = "sha256:" + "a" * 64
WORKER = Peer(uid=1000, connection_id=1, role=PeerRole.WORKER)
OTHER_WORKER = Peer(uid=2000, connection_id=2, role=PeerRole.WORKER)
ADMIN = Peer(uid=0, connection_id=3, role=PeerRole.ADMIN)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = ResourceLimits(
    cpu_millicores=1000,
    memory_bytes=64 * MIB,
    pids_max=64,
    workspace_bytes=64 * MIB,
    inodes_max=1000,
    wall_clock_seconds=60,
)
DEFAULT = Settings(
    deployment_mode=DeploymentMode.DEVELOPMENT,
    auth_mode=AuthMode.DEV,
    sandbox=SandboxMechanism.NAMESPACES,
    images=ImageSettings(aliases={"default": IMAGE}, default="default"),
    limits=LimitSettings(
        defaults=LIMITS,
        environments_max=8,
        environments_per_peer_max=6,
        pids_refusals_max=1000,
        pids_refusals_window_seconds=2,
    ),
    reserve=ReserveSettings(slots=0),
    service=ServiceSettings(orphan_grace_seconds=60),
)
# As many slots whatever is asked for: tests of the pool's size say so.
WITH_RESERVE = msgspec.structs.replace(DEFAULT, reserve=ReserveSettings(slots=2, slots_max=2))


def spec(
    *,
    tenant: str = "tenant",
    run: str = "run",
    epoch: int = 1,
    limits: ResourceLimits = LIMITS,
    egress: EgressPolicy = DENY_ALL,
    bridge: BridgeEndpoint | None = None,
) -> EnvironmentSpec:
    return EnvironmentSpec(
        tenant_id=TenantId(tenant),
        run_id=RunId(run),
        lease_epoch=epoch,
        image_digest=IMAGE,
        limits=limits,
        egress=egress,
        environment={},
        bridge=bridge,
    )


def command(
    *argv: str, timeout_seconds: int = 30, maximum_output_bytes: int = 1000, stdin: bytes = b""
) -> ExecutionCommand:
    return ExecutionCommand(
        argv=argv or ("true",),
        working_directory=".",
        timeout_seconds=timeout_seconds,
        stdin=stdin,
        maximum_output_bytes=maximum_output_bytes,
    )


async def inline(operation: Callable[[], ResultT]) -> ResultT:
    """The journal's runner without a thread, which the mock clock would not wait for."""
    await trio.lowlevel.checkpoint()
    return operation()


class FlakyStore(JournalStore):
    """Its n-th transaction fails."""

    fail_at: int | None = None
    writes = 0

    def _transact(self, durability: Durability, write: Callable[..., None]) -> None:
        self.writes += 1
        if self.writes == self.fail_at:
            raise JournalUnwritable("told to")
        super()._transact(durability, write)


def open_store(directory: Path, fail_at: int | None = None) -> FlakyStore:
    directory.mkdir(exist_ok=True)
    store = FlakyStore(directory, "boot", lambda: 0.0)
    store.fail_at = fail_at
    return store


class FlakySink(MemorySink):
    """Its n-th event is not taken."""

    def __init__(self, fail_at: int | None) -> None:
        super().__init__()
        self.emits = 0
        self._fail_at = fail_at

    async def emit(self, event: AuditEvent) -> None:
        self.emits += 1
        await trio.lowlevel.checkpoint()
        if self.emits == self._fail_at:
            raise AuditUnavailable("told to")
        await super().emit(event)


@dataclass
class World:
    """What a test looks at and speaks to."""

    mechanism: MechanismDouble
    store: FlakyStore
    sink: FlakySink
    registry: Registry
    environments: LocalEnvironments
    reconciler: Reconciler
    egress: EgressDouble

    async def destroy_unproven(self, handle: EnvironmentHandle, peer: Peer = WORKER) -> None:
        """Ask for the end of one that cannot be proven gone, and be told so."""
        with pytest.raises(ExecutionUnavailable, match="not proven yet") as caught:
            await self.environments.destroy(peer, handle)
        assert caught.value.code is UnavailableCode.SETUP_FAILED

    async def run(
        self,
        handle: EnvironmentHandle,
        behaviour: Behaviour | None = None,
        *,
        ask: ExecutionCommand | None = None,
        cancelled: trio.Event | None = None,
        on_output: OutputSink | None = None,
        bridge: BridgeWorker | None = None,
        peer: Peer = WORKER,
    ) -> ExecutionResult:
        """Execute one command that behaves so."""
        if behaviour is not None:
            self.mechanism.script.behaviours.append(behaviour)
        return await self.environments.execute(
            peer,
            handle,
            ask if ask is not None else command(),
            cancelled=cancelled if cancelled is not None else trio.Event(),
            on_output=on_output,
            bridge=bridge,
        )

    def consistent_and_empty(self) -> bool:
        """Whether nothing is left: not in the kernel, not in the books, not in the journal; and
        what ended as lost is told to have been (decision 0178)."""
        ended = [
            each.environment_id
            for each in self.sink.of(EnvironmentDestroyed)
            if each.reason is DestroyReason.ENVIRONMENT_LOST
        ]
        told = Counter(each.environment_id for each in self.sink.of(EnvironmentLost))
        return (
            not self.mechanism.existing
            and not self.registry.owned()
            and not self.store.states()
            and all(told[each] == 1 for each in ended)
        )


@asynccontextmanager
async def open_world(
    directory: Path,
    *,
    settings: Settings = DEFAULT,
    script: Script | None = None,
    budgets: Budgets | None = None,
    known_images: Callable[[], Sequence[str]] = lambda: (IMAGE,),
    fail_write_at: int | None = None,
    fail_emit_at: int | None = None,
    authorities: Sequence[LeaseAuthority] = (),
) -> AsyncIterator[World]:
    mechanism = MechanismDouble(script)
    store = open_store(directory, fail_write_at)
    sink = FlakySink(fail_emit_at)
    journal = Journal(store, inline)
    budgets = budgets if budgets is not None else budgets_of(settings.limits)
    numbers = itertools.count(1)
    parts = Parts(
        mechanism=mechanism,
        journal=journal,
        audit=sink,
        budgets=budgets,
        back_stop_seconds=back_stop_seconds(settings),
    )
    clock = Clock(wall=lambda: NOW, new_id=lambda: EnvironmentId(f"{next(numbers):032x}"))
    registry = Registry(parts, settings, clock, known_images)
    reconciler = Reconciler(mechanism, journal, sink, budgets)
    egress = EgressDouble(mechanism)
    rules = CommandRules(settings, budgets, sink, egress, on_command=registry.shares.wake)
    environments = LocalEnvironments(
        registry,
        Provisioner(registry, parts, settings, clock),
        rules,
        mechanism,
        reconciler,
        LeaseReaper(
            authorities=authorities,
            handed_out=registry.handed_out,
            end=registry.end_stale,
            audit=sink,
            interval_seconds=settings.leases.interval_seconds,
        ),
        known_images,
    )
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(registry.run)
            yield World(mechanism, store, sink, registry, environments, reconciler, egress)
            nursery.cancel_scope.cancel()
    finally:
        store.close()
