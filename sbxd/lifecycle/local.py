"""The environments of this daemon, behind the service's port (`sbxd.lifecycle.environments`).

Joins what the port promises: admission before anything is touched, ownership before anything is
done, the audit and the consequences around every command. Holds no state of its own.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import trio

from sbxd.audit.events import DestroyReason
from sbxd.audit.lease_events import ClearingProof
from sbxd.audit.sink import AuditUnavailable
from sbxd.lifecycle import commands, errors, observing
from sbxd.lifecycle.commands import CommandRules
from sbxd.lifecycle.environments import (
    BridgeWorker,
    Census,
    ContentSink,
    Description,
    EntriesSink,
    OutputSink,
    Peer,
    Quarantined,
    ReapReport,
    ReconcileReport,
)
from sbxd.lifecycle.journal import JournalUnwritable
from sbxd.lifecycle.leases import LeaseReaper
from sbxd.lifecycle.listing import list_pages
from sbxd.lifecycle.machine import State
from sbxd.lifecycle.provision import Provisioner
from sbxd.lifecycle.reconcile import Reconciler
from sbxd.lifecycle.registry import Registry
from sbxd.lifecycle.supervisor import Supervisor
from sbxd.mechanism.protocol import Mechanism, MechanismError, SandboxLost
from sbxd.policy.admission import admit
from sbxd.policy.containment import relative_bytes
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.ids import EnvironmentId
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.wire.descriptions import EnvironmentInfo
from sbxd.wire.observing import EnvironmentMeter
from sbxd.wire.repair import ClearingWord


class LocalEnvironments:
    """Implements `sbxd.lifecycle.environments.Environments` over a registry that runs."""

    def __init__(
        self,
        registry: Registry,
        provisioner: Provisioner,
        rules: CommandRules,
        mechanism: Mechanism,
        reconciler: Reconciler,
        lease_reaper: LeaseReaper,
        known_images: Callable[[], Collection[str]],
    ) -> None:
        self._registry = registry
        self._provisioner = provisioner
        self._rules = rules
        self._mechanism = mechanism
        self._reconciler = reconciler
        self._lease_reaper = lease_reaper
        self._known_images = known_images

    async def provision(self, owner: Peer, specification: EnvironmentSpec) -> EnvironmentHandle:
        if self._registry.is_draining:
            raise errors.shutting_down()
        admit(specification, self._rules.settings, self._known_images())
        return await self._provisioner.provision(owner, specification)

    def attempt(self, owner: Peer, handle: EnvironmentHandle) -> None:
        supervisor = self._find(owner, handle)
        try:
            supervisor.account.charge_operation()
        finally:
            self._registry.enforce_budgets(supervisor)

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
        supervisor = self._find(owner, handle)
        if self._registry.is_draining:
            raise errors.shutting_down()
        with self._serving():
            try:
                return await commands.execute(
                    supervisor,
                    command,
                    self._rules,
                    cancelled=cancelled,
                    on_output=on_output,
                    overrun=lambda: self._registry.enforce_budgets(supervisor),
                    bridge=bridge,
                )
            finally:
                self._registry.enforce_budgets(supervisor)

    async def destroy(self, owner: Peer, handle: EnvironmentHandle) -> None:
        supervisor = self._registry.find_any(owner, handle)
        if supervisor is None:
            return
        with self._serving():
            supervisor.request_end(DestroyReason.REQUESTED)
            await supervisor.first_attempt_over.wait()
        if supervisor.state is not State.GONE:
            raise errors.not_proven_stopped()

    async def read(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        path: bytes,
        *,
        maximum_bytes: int,
        on_content: ContentSink,
    ) -> None:
        with self._using(owner, handle) as supervisor:
            chunks = await supervisor.sandbox.read(relative_bytes(path), maximum_bytes)
            try:
                async for chunk in chunks:
                    if supervisor.account.grant_returned(len(chunk)) < len(chunk):
                        supervisor.account.check()
                    await on_content(chunk)
            finally:
                if isinstance(chunks, AsyncGenerator):
                    await chunks.aclose()

    async def write(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        path: bytes,
        *,
        size_bytes: int,
        data: AsyncIterator[bytes],
    ) -> None:
        with self._using(owner, handle) as supervisor:
            supervisor.account.meter_written(size_bytes)
            await supervisor.sandbox.write(relative_bytes(path), size_bytes, data)

    async def listdir(
        self, owner: Peer, handle: EnvironmentHandle, path: bytes, *, on_entries: EntriesSink
    ) -> bool:
        with self._using(owner, handle) as supervisor:
            return await list_pages(supervisor.sandbox, relative_bytes(path), on_entries)

    async def provenance(
        self, owner: Peer, handle: EnvironmentHandle, path: bytes
    ) -> WorkspaceProvenance:
        with self._using(owner, handle) as supervisor:
            return await supervisor.sandbox.provenance(relative_bytes(path))

    async def describe(self) -> Description:
        return Description(
            mechanism=self._mechanism.name,
            environments=len(self._registry.handed_out()),
            quarantined=await self._reconciler.quarantined(),
            erasing=await self._mechanism.erasing(),
            reserve_ready=self._registry.reserve.ready,
            reserve_target=self._registry.reserve.target,
            posture=(*await self._mechanism.posture(), *self._rules.egress.posture()),
        )

    def census(self) -> Census:
        return observing.census(self._registry, waiting=self._provisioner.waiting)

    async def meters(
        self, denials_of: Callable[[EnvironmentId], int]
    ) -> tuple[EnvironmentMeter, ...]:
        return await observing.meters(self._registry, denials_of)

    async def list(self) -> tuple[EnvironmentInfo, ...]:
        return tuple(_info(each) for each in self._registry.handed_out())

    async def inspect(self, environment_id: EnvironmentId) -> EnvironmentInfo:
        for each in self._registry.handed_out():
            if each.environment_id == environment_id:
                return _info(each)
        raise errors.gone()

    async def reconcile(self) -> ReconcileReport:
        try:
            report = await self._reconciler.run(self._registry.owned)
        except MechanismError as problem:
            raise errors.setup_failed(problem) from None
        for each in report.destroyed:
            self._registry.forget_quarantined(EnvironmentId(each))
        return replace(report, released=await self._retry_quarantined())

    async def reap(self) -> ReapReport:
        report = await self._lease_reaper.reap()
        with suppress(MechanismError):
            await self._mechanism.erasing()  # the question is what begins it again
        return replace(report, released=await self._retry_quarantined())

    async def _retry_quarantined(self) -> tuple[EnvironmentId, ...]:
        released = await self._reconciler.retry_quarantined(self._registry.owned)
        for each in released:
            self._registry.forget_quarantined(each)
        return released

    async def quarantine(self) -> tuple[Quarantined, ...]:
        try:
            return await self._reconciler.quarantine()
        except MechanismError as problem:
            raise errors.setup_failed(problem) from None

    async def clear_quarantine(self, peer: Peer, name: str, word: ClearingWord) -> ClearingProof:
        try:
            proof = await self._reconciler.clear(name, word, peer.uid)
        except KeyError:
            raise errors.not_quarantined() from None
        except MechanismError as problem:
            raise errors.setup_failed(problem) from None
        except AuditUnavailable:
            raise errors.audit_unavailable() from None
        except JournalUnwritable as problem:
            raise errors.journal_unwritable(problem) from None
        if proof is None:
            raise errors.not_proven_gone()
        self._registry.forget_quarantined(EnvironmentId(name))
        return proof

    def images_in_use(self) -> Mapping[str, int]:
        return self._registry.images_in_use()

    def release_owner(self, connection_id: int) -> None:
        self._registry.release_owner(connection_id)

    def _find(self, owner: Peer, handle: EnvironmentHandle) -> Supervisor:
        if self._registry.is_draining:
            raise errors.shutting_down()
        return self._registry.find(owner, handle)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        self._registry.request_begun()
        try:
            yield
        finally:
            self._registry.request_over()

    @contextmanager
    def _using(self, owner: Peer, handle: EnvironmentHandle) -> Iterator[Supervisor]:
        """A workspace operation: the mechanism's failures become the port's."""
        supervisor = self._find(owner, handle)
        try:
            yield supervisor
        except SandboxLost as problem:
            supervisor.request_end(DestroyReason.ENVIRONMENT_LOST)
            raise errors.setup_failed(problem) from None
        except MechanismError as problem:
            raise errors.setup_failed(problem) from None
        finally:
            self._registry.enforce_budgets(supervisor)


def _info(supervisor: Supervisor) -> EnvironmentInfo:
    assert supervisor.handle is not None
    running = supervisor.running_argv if supervisor.state is State.RUNNING else None
    return EnvironmentInfo(
        handle=supervisor.handle,
        state=supervisor.state.value,
        image_digest=supervisor.profile.image_digest,
        limits=supervisor.specification.limits,
        owner_uid=supervisor.tenancy.owner_uid,
        commands_run=supervisor.commands_run,
        running_argv=running,
        usage=supervisor.usage,
        scope=supervisor.sandbox.scope,
    )
