"""All environments of this daemon: who may have one, who has which, and the nursery they live in.

Invariants: every environment that may exist has a supervisor in the table until it is proven over
and audited; an environment is handed out only after its assignment is journaled and audited; a
peer that may not act on an environment learns nothing of it. A caller that goes away cancels its
request, never an environment.

Concurrency: the table is changed only between checkpoints, so that a check and the change that
rests on it are one step.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import trio

from sbxd.audit.events import DestroyReason, EnvironmentProvisioned, SlotOrigin
from sbxd.audit.sink import AuditUnavailable
from sbxd.lifecycle import errors
from sbxd.lifecycle.budgets import WallClock
from sbxd.lifecycle.environments import Peer
from sbxd.lifecycle.journal import EpochTooLow, JournalState, JournalUnwritable, Tenancy
from sbxd.lifecycle.machine import HANDED_OUT, Event, State
from sbxd.lifecycle.ownership import Standing, judge
from sbxd.lifecycle.reaper import Reaper, Tenure
from sbxd.lifecycle.reserve import Reserve
from sbxd.lifecycle.supervisor import Parts, Supervisor, Tenant
from sbxd.mechanism.protocol import MechanismError, SlotProfile
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import (
    EscapeCode,
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    SandboxEscapeSuspected,
    StaleLease,
    UnavailableCode,
)
from sbxd.port.ids import EnvironmentId
from sbxd.settings import ReserveSettings, Settings

# Handles that a higher epoch ended are told StaleLease for as long as they are among the latest.
SUPERSEDED_KEPT = 4096
# The scope's own limit lies this far beyond anything that the daemon would allow.
BACK_STOP_MARGIN_SECONDS = 600


@dataclass(frozen=True)
class Clock:
    """wall: aware, UTC, for created_at and expires_at. new_id: 32 hex digits, unguessable."""

    wall: WallClock
    new_id: Callable[[], EnvironmentId]


def back_stop_seconds(settings: Settings) -> int:
    """How long a scope may exist at the very most: age in the reserve and life after it."""
    return (
        settings.reserve.age_max_seconds
        + settings.limits.environment_lifetime_seconds
        + BACK_STOP_MARGIN_SECONDS
    )


def reserve_profile(settings: Settings) -> SlotProfile | None:
    """What the reserve prepares: the default image with the default limits; None without one."""
    digest = settings.images.aliases.get(settings.images.default or "")
    if digest is None or settings.reserve.slots == 0:
        return None
    return SlotProfile(image_digest=digest, limits=settings.limits.defaults)


class Registry:
    """The table, the reserve and the reaper. `run` is its task."""

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        clock: Clock,
        known_images: Callable[[], frozenset[str]],
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._known_images = known_images
        self._table: dict[EnvironmentId, Supervisor] = {}
        self._superseded: OrderedDict[EnvironmentId, Tenancy] = OrderedDict()
        self._nursery: trio.Nursery | None = None
        self._vacated = trio.Event()
        self._is_draining = False
        self._requests = 0
        self.reaper = Reaper(
            self._tenures, self._end, grace_seconds=settings.service.orphan_grace_seconds
        )
        reserve: ReserveSettings = settings.reserve
        self.reserve = Reserve(
            reserve_profile(settings),
            reserve.slots,
            build=self._build_slot,
            is_busy=lambda: self._requests > 0,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the supervisors, the reaper and the reserve, until cancelled.

        Cancellation: everything in every environment is killed; the next start removes the rest.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.reaper.run)
            nursery.start_soon(self.reserve.run)
            task_status.started()

    async def shut_down(self, reason: DestroyReason) -> int:
        """Take nothing new, end every environment, and return how many there were.

        Bounded by `Budgets.shutdown_seconds`; what is not over by then is left to the next
        start. Call it once.
        """
        self._is_draining = True
        self.reserve.discard()
        ended = [each for each in self._table.values() if each.state in HANDED_OUT]
        everything = list(self._table.values())
        for supervisor in everything:
            supervisor.request_end(reason)
        with trio.move_on_after(self._parts.budgets.shutdown_seconds):
            for supervisor in everything:
                await supervisor.over.wait()
        return len(ended)

    # --- provision ----------------------------------------------------------------------------

    async def provision(self, owner: Peer, specification: EnvironmentSpec) -> EnvironmentHandle:
        """As `Environments.provision`; the specification has been admitted."""
        budget_seconds = self._settings.limits.start_budget_seconds
        self._requests += 1
        try:
            with trio.move_on_after(budget_seconds):
                return await self._provision(owner, specification)
        finally:
            self.request_over()
        raise ExecutionUnavailable(
            UnavailableCode.START_BUDGET_EXCEEDED,
            f"the environment was not ready within {budget_seconds} s",
        )

    async def _provision(self, owner: Peer, specification: EnvironmentSpec) -> EnvironmentHandle:
        started_at = trio.current_time()
        tenancy = Tenancy(
            owner_uid=owner.uid,
            tenant_id=specification.tenant_id,
            run_id=specification.run_id,
            lease_epoch=specification.lease_epoch,
        )
        await self._wait_room(owner)
        profile = SlotProfile(specification.image_digest, specification.limits)
        tenant = Tenant(tenancy, specification, taken_at=started_at)
        slot = self.reserve.take(profile)
        origin = SlotOrigin.COLD if slot is None else SlotOrigin.RESERVE
        if slot is None:
            slot = self._new(profile)
        slot.tenant = tenant
        slot.ends_at = float("inf")  # the start budget bounds it until it is handed out
        slot.holders.add(owner.connection_id)
        try:
            if origin is SlotOrigin.RESERVE:
                slot.apply(Event.TAKEN)
                try:
                    await self._parts.journal.assign(slot.environment_id, tenancy)
                except EpochTooLow:
                    self._return_untouched(slot)
                    raise
                self._supersede(slot)
            else:
                await self._build_for(slot, tenancy)
            return await self._hand_out(slot, origin, started_at)
        except EpochTooLow as problem:
            raise StaleLease(
                f"lease_epoch: {tenancy.lease_epoch} is below {problem.seen}, which has been seen "
                "for this run"
            ) from None
        except JournalUnwritable:
            slot.request_end(DestroyReason.PROVISION_FAILED)
            raise ExecutionUnavailable(
                UnavailableCode.SETUP_FAILED, "the creation journal takes no record"
            ) from None
        except MechanismError as problem:
            slot.request_end(DestroyReason.PROVISION_FAILED)
            raise errors.setup_failed(problem) from None
        except AuditUnavailable:
            slot.request_end(DestroyReason.PROVISION_FAILED)
            raise errors.audit_unavailable() from None
        except PortError:
            slot.request_end(DestroyReason.PROVISION_FAILED)
            raise
        except BaseException:
            slot.request_end(DestroyReason.PROVISION_CANCELLED)
            raise

    async def _wait_room(self, owner: Peer) -> None:
        """Until there is a place; at once when there is one. Raises CAPACITY when none is being
        vacated, SHUTTING_DOWN when there will be none."""
        limits = self._settings.limits
        while True:
            if self._is_draining or self._nursery is None:
                raise errors.shutting_down()
            occupying = [each for each in self._table.values() if each.is_occupying]
            own = [each for each in occupying if each.tenancy.owner_uid == owner.uid]
            if (
                len(occupying) < limits.environments_max
                and len(own) < limits.environments_per_peer_max
            ):
                return
            if not any(each.is_ending for each in occupying):
                raise ExecutionUnavailable(
                    UnavailableCode.CAPACITY,
                    f"{len(occupying)} environments are live (at most {limits.environments_max}), "
                    f"{len(own)} of this peer (at most {limits.environments_per_peer_max})",
                )
            self._vacated = trio.Event()
            await self._vacated.wait()

    async def _build_for(self, slot: Supervisor, tenancy: Tenancy) -> None:
        """Build an environment for a run that the reserve has nothing for."""
        await self._begin(slot, tenancy)
        self._supersede(slot)
        await slot.prepared.wait()
        if slot.preparation_failure is not None:
            raise slot.preparation_failure
        if not slot.is_ending:
            slot.apply(Event.TAKEN)
            await self._parts.journal.note(slot.environment_id, JournalState.LIVE)

    async def _hand_out(
        self, slot: Supervisor, origin: SlotOrigin, started_at: float
    ) -> EnvironmentHandle:
        specification = slot.specification
        _refuse_if_ending(slot)
        self._refuse_unenforced(slot)
        await slot.sandbox.assign(specification.limits)
        _refuse_if_ending(slot)
        now, lifetime_seconds = (
            self._clock.wall(),
            self._settings.limits.environment_lifetime_seconds,
        )
        handle = EnvironmentHandle(
            environment_id=slot.environment_id,
            tenant_id=specification.tenant_id,
            run_id=specification.run_id,
            lease_epoch=specification.lease_epoch,
            created_at=now,
            expires_at=now + timedelta(seconds=lifetime_seconds),
        )
        slot.handle = handle
        slot.ends_at = trio.current_time() + lifetime_seconds
        await self._parts.audit.emit(
            EnvironmentProvisioned(
                **slot.identity(),
                mechanism=self._parts.mechanism.name,
                image_digest=specification.image_digest,
                limits=specification.limits,
                egress_mode=specification.egress.mode,
                egress_destinations=tuple(
                    f"{each.host}:{','.join(str(port) for port in each.ports)}"
                    for each in specification.egress.destinations
                ),
                origin=origin,
                duration_ms=round((trio.current_time() - started_at) * 1000),
                expires_at=handle.expires_at,
                owner_uid=slot.tenancy.owner_uid,
                unenforced_limits=slot.sandbox.unenforced_limits,
            )
        )
        _refuse_if_ending(slot)
        slot.apply(Event.ASSIGNED)
        self.reaper.wake()
        return handle

    def _refuse_unenforced(self, slot: Supervisor) -> None:
        allowed = self._settings.limits.allow_unenforced_limits
        missing = [name for name in slot.sandbox.unenforced_limits if name not in allowed]
        if missing:
            raise ExecutionRejected(
                RejectedCode.LIMIT_NOT_ENFORCEABLE,
                f"limits: this host cannot enforce {', '.join(missing)} (`sbxctl doctor` says "
                "why), and limits.allow_unenforced_limits does not list it",
                field="limits",
            )

    def _supersede(self, newer: Supervisor) -> None:
        """A run's new epoch ends what the run has under lower ones."""
        for other in self._table.values():
            if other is newer or other.tenant is None or other.is_ending:
                continue
            if other.tenancy.is_of_same_run(newer.tenancy) and (
                other.tenancy.lease_epoch < newer.tenancy.lease_epoch
            ):
                self._superseded[other.environment_id] = other.tenancy
                other.request_end(DestroyReason.SUPERSEDED)
        while len(self._superseded) > SUPERSEDED_KEPT:
            self._superseded.popitem(last=False)

    def _return_untouched(self, slot: Supervisor) -> None:
        if slot.state is State.ASSIGNING:
            slot.apply(Event.RETURNED)
            slot.tenant = None
            slot.holders.clear()
            self.reserve.give_back(slot)

    # --- the table ----------------------------------------------------------------------------

    def find(self, peer: Peer, handle: EnvironmentHandle) -> Supervisor:
        """The environment that a handle names, for a peer that may use it now.

        Raises: ExecutionRejected(ENVIRONMENT_GONE), StaleLease,
        SandboxEscapeSuspected(TENANT_MISMATCH).
        """
        supervisor = self.find_any(peer, handle)
        if supervisor is not None and supervisor.state in HANDED_OUT:
            if peer.uid == supervisor.tenancy.owner_uid:
                supervisor.holders.add(peer.connection_id)
                supervisor.orphaned_at = None
            return supervisor
        tenancy = self._superseded.get(handle.environment_id)
        if (
            tenancy is not None
            and peer.uid == tenancy.owner_uid
            and handle.tenant_id == tenancy.tenant_id
        ):
            raise StaleLease("lease_epoch: a higher epoch of this run has ended this environment")
        raise errors.gone()

    def find_any(self, peer: Peer, handle: EnvironmentHandle) -> Supervisor | None:
        """As `find`, for an environment in whatever state; None when there is none for this
        peer."""
        supervisor = self._table.get(handle.environment_id)
        if supervisor is None or supervisor.handle is None:
            return None
        standing = judge(
            peer,
            owner_uid=supervisor.tenancy.owner_uid,
            record=supervisor.handle,
            presented=handle,
        )
        match standing:
            case Standing.GRANTED:
                return supervisor
            case Standing.FOREIGN:
                return None
            case Standing.STALE:
                raise StaleLease("the handle's run or lease_epoch is not the environment's")
            case Standing.TENANT_MISMATCH:
                detail = "a handle was presented under another tenant than the environment's"
                supervisor.suspect_escape(EscapeCode.TENANT_MISMATCH, detail)
                raise SandboxEscapeSuspected(EscapeCode.TENANT_MISMATCH, detail)

    def handed_out(self) -> list[Supervisor]:
        """Every environment that has a handle and is not gone, oldest first."""
        return [
            each
            for each in self._table.values()
            if each.handle is not None and each.state is not State.GONE
        ]

    def owned(self) -> frozenset[EnvironmentId]:
        """Every environment and slot of this run of the daemon, ended ones that were not proven
        gone excepted."""
        return frozenset(
            each.environment_id
            for each in self._table.values()
            if each.state is not State.QUARANTINED
        )

    def images_in_use(self) -> Mapping[str, int]:
        """How many environments and slots stand on each image digest."""
        counted: dict[str, int] = {}
        for each in self._table.values():
            digest = each.profile.image_digest
            counted[digest] = counted.get(digest, 0) + 1
        return counted

    def release_owner(self, connection_id: int) -> None:
        """A connection ended: what only it held is an orphan from now on."""
        for each in self._table.values():
            if connection_id in each.holders:
                each.holders.remove(connection_id)
                if not each.holders:
                    each.orphaned_at = trio.current_time()
        self.reaper.wake()

    def request_begun(self) -> None:
        """A request is being served: the reserve is not refilled meanwhile."""
        self._requests += 1

    def request_over(self) -> None:
        """The counterpart of request_begun."""
        self._requests -= 1
        if self._requests == 0:
            self.reserve.pause_over()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    # --- supervisors --------------------------------------------------------------------------

    def _new(self, profile: SlotProfile) -> Supervisor:
        supervisor = Supervisor(
            self._parts, self._clock.new_id(), profile, created_at=trio.current_time()
        )
        self._table[supervisor.environment_id] = supervisor
        return supervisor

    async def _begin(self, supervisor: Supervisor, tenancy: Tenancy | None) -> None:
        """Journal the intent, then start the supervisor. Raises EpochTooLow, JournalUnwritable."""
        try:
            await self._parts.journal.intend(supervisor.environment_id, tenancy)
        except BaseException:
            self._forget(supervisor)
            raise
        assert self._nursery is not None
        self._nursery.start_soon(self._supervise, supervisor)

    async def _supervise(self, supervisor: Supervisor) -> None:
        await supervisor.run()
        # A quarantined environment stays in the table: an operator must see it.
        if supervisor.state is State.GONE:
            self._forget(supervisor)
        else:
            self._vacate()

    def _forget(self, supervisor: Supervisor) -> None:
        del self._table[supervisor.environment_id]
        supervisor.over.set()
        self._vacate()

    def _vacate(self) -> None:
        self._vacated.set()
        self.reserve.wake()

    async def _build_slot(self, profile: SlotProfile) -> Supervisor | None:
        if self._is_draining or profile.image_digest not in self._known_images():
            return None
        slot = self._new(profile)
        slot.ends_at = trio.current_time() + self._settings.reserve.age_max_seconds
        try:
            await self._begin(slot, None)
        except JournalUnwritable:
            return None
        self.reaper.wake()
        return slot

    def _tenures(self) -> list[Tenure]:
        return [
            Tenure(each.environment_id, each.ends_at, each.orphaned_at)
            for each in self._table.values()
            if not each.is_ending
        ]

    def _end(self, environment_id: EnvironmentId, reason: DestroyReason) -> None:
        self._table[environment_id].request_end(reason)


def _refuse_if_ending(slot: Supervisor) -> None:
    """Between two steps of a hand-out, the environment may have been ended."""
    match slot.end_reason:
        case None:
            return
        case DestroyReason.SUPERSEDED:
            raise StaleLease("lease_epoch: a higher epoch of this run was provisioned meanwhile")
        case DestroyReason.SERVICE_SHUTDOWN:
            raise errors.shutting_down()
        case _:
            raise errors.lost()
