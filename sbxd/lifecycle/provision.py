"""From a specification to an environment that a run has: room, slot, lease, limits, audit.

Places are given to tenants in turn (`sbxd.policy.fairness`).

Invariants: the intent is durable before anything is built; the run's lower epochs are ended once
the new one is claimed, before it is handed out; between any two steps the environment may have
been ended by someone else, and then it is not handed out; whatever fails or is cancelled is ended
in the background, so that no caller waits for it; no request fails for want of disk that slots of
the reserve hold, or, within its start budget, that is being erased.
"""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import trio

from sbxd.audit.events import DestroyReason, EnvironmentProvisioned, SlotOrigin
from sbxd.audit.sink import AuditUnavailable
from sbxd.lifecycle import errors
from sbxd.lifecycle.environments import Peer
from sbxd.lifecycle.journal import EpochTooLow, JournalState, JournalUnwritable, Tenancy
from sbxd.lifecycle.machine import Event
from sbxd.lifecycle.registry import Clock, Registry
from sbxd.lifecycle.stages import Stage, Stages
from sbxd.lifecycle.supervisor import Parts, Supervisor, Tenant
from sbxd.mechanism.protocol import MechanismError, SlotProfile
from sbxd.policy.budgets import Account, effective_budgets
from sbxd.policy.capacity import RETRY_SECONDS_MIN, Held, Room, retry_after_seconds
from sbxd.policy.fairness import FairQueue, QueueIsFull, Ticket
from sbxd.policy.network import network_shape
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    StaleLease,
    UnavailableCode,
)
from sbxd.port.ids import TenantId
from sbxd.port.network import NetworkShape
from sbxd.settings import Settings

# How many requests may wait for a place that is being vacated.
WAITING_MAX = 256
WAITING_OF_TENANT_MAX = 64
# How long a request without room waits before it looks again what the dead have left of it.
ERASING_SECONDS = 0.5
# How a step of a hand-out fails.
_HAND_OUT_FAILURES = (EpochTooLow, JournalUnwritable, MechanismError, AuditUnavailable)
# Ends that come from elsewhere while an environment is made, and of which its caller is told.
_BY_ANOTHER = frozenset(
    {DestroyReason.SUPERSEDED, DestroyReason.STALE_LEASE, DestroyReason.SERVICE_SHUTDOWN}
)


class Provisioner:
    """Hands environments out of the registry's table and reserve."""

    def __init__(self, registry: Registry, parts: Parts, settings: Settings, clock: Clock) -> None:
        self._registry = registry
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._waiting: FairQueue[tuple[int, TenantId]] = FairQueue(
            total_max=WAITING_MAX, party_max=WAITING_OF_TENANT_MAX
        )
        self._wanted: dict[Ticket[tuple[int, TenantId]], Held] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait for a place."""
        return len(self._waiting)

    async def provision(self, owner: Peer, specification: EnvironmentSpec) -> EnvironmentHandle:
        """As `Environments.provision`; the specification has been admitted."""
        budget_seconds = self._settings.limits.start_budget_seconds
        stages = Stages()
        self._registry.request_begun()
        try:
            with trio.move_on_after(budget_seconds):
                return await self._provision(owner, specification, stages)
        finally:
            self._registry.request_over()
        raise ExecutionUnavailable(
            UnavailableCode.START_BUDGET_EXCEEDED,
            f"the environment was not ready within {budget_seconds} s: {stages.describe()}",
        )

    async def _provision(
        self, owner: Peer, specification: EnvironmentSpec, stages: Stages
    ) -> EnvironmentHandle:
        started_at = trio.current_time()
        profile = SlotProfile(
            specification.image_digest, specification.limits, network_shape(specification.egress)
        )
        reserve = self._registry.reserve
        has_given_way = False
        with ExitStack() as held:
            while True:
                try:
                    return await self._attempt(owner, specification, profile, started_at, stages)
                except MechanismError as problem:
                    if not errors.lacks_room(problem):
                        raise errors.setup_failed(problem) from None
                    held.enter_context(reserve.held())
                    stages.enter(Stage.ROOM)
                    party = (owner.uid, specification.tenant_id)
                    if not await reserve.give_way(profile, party):
                        held.close()  # the pool does not wait for the dead
                        if (await self._parts.mechanism.erasing()).volumes:
                            await trio.sleep(ERASING_SECONDS)
                            continue
                        if has_given_way:
                            reserve.gave_way_in_vain(party)
                        raise errors.setup_failed(problem) from None
                    has_given_way = True

    async def _attempt(
        self,
        owner: Peer,
        specification: EnvironmentSpec,
        profile: SlotProfile,
        started_at: float,
        stages: Stages,
    ) -> EnvironmentHandle:
        """Raises MechanismError for what the mechanism could not do; PortError for the rest."""
        tenancy = Tenancy(
            owner_uid=owner.uid,
            tenant_id=specification.tenant_id,
            run_id=specification.run_id,
            lease_epoch=specification.lease_epoch,
        )
        await self._wait_room(owner, specification)
        try:
            self._parts.journal.refuse_outdated(tenancy)
        except EpochTooLow as problem:
            raise _outdated(tenancy, problem) from None
        stages.enter(Stage.JOURNAL)
        budgets = effective_budgets(specification.budgets, self._settings.limits.budgets)
        tenant = Tenant(tenancy, specification, Account(budgets), taken_at=started_at)
        slot = self._registry.reserve.find(profile)
        origin = SlotOrigin.COLD if slot is None else SlotOrigin.RESERVE
        if slot is None:
            slot = self._registry.new(profile)
        slot.tenant = tenant
        slot.ends_at = float("inf")  # the start budget bounds it until it is handed out
        slot.holders.add(owner.connection_id)
        try:
            if origin is SlotOrigin.RESERVE:
                slot.apply(Event.TAKEN)
            else:
                await self._build_for(slot, tenancy, stages)
            return await self._hand_out(slot, origin, started_at, stages)
        except EpochTooLow as problem:
            slot.request_end(DestroyReason.STALE_LEASE)
            raise _outdated(tenancy, problem) from None
        except JournalUnwritable as problem:
            slot.request_end(DestroyReason.PROVISION_FAILED)
            await self._registry.report_unwritable(slot.environment_id, problem)
            raise errors.journal_unwritable(problem) from None
        except AuditUnavailable:
            slot.request_end(DestroyReason.PROVISION_FAILED)
            raise errors.audit_unavailable() from None
        except MechanismError:
            if slot.end_reason in _BY_ANOTHER:
                _refuse_if_ending(slot)  # why it failed: what it was for had been killed
            slot.request_end(DestroyReason.PROVISION_FAILED)
            raise
        except PortError:
            slot.request_end(DestroyReason.PROVISION_FAILED)
            raise
        except BaseException:
            slot.request_end(DestroyReason.PROVISION_CANCELLED)
            raise

    async def _wait_room(self, owner: Peer, specification: EnvironmentSpec) -> None:
        """Until there is a place and it is this tenant's turn; at once when nobody waits. Raises
        CAPACITY when no place is being vacated at first or too many wait, SHUTTING_DOWN when there
        will be none. The start budget bounds the wait."""
        try:
            ticket = self._waiting.enter((owner.uid, specification.tenant_id))
        except QueueIsFull:
            raise ExecutionUnavailable(
                UnavailableCode.CAPACITY,
                "too many requests wait for a place, in all or of this tenant",
                retry_after_seconds=RETRY_SECONDS_MIN,
            ) from None
        self._wanted[ticket] = Held(owner.uid, specification.limits.memory_bytes)
        try:
            if not self._room()(ticket):
                self._refuse_unless_vacated(self._wanted[ticket])
            while True:
                if self._registry.is_draining:
                    raise errors.shutting_down()
                if self._waiting.turn(self._room()) is ticket:
                    self._waiting.served(ticket)
                    return
                await self._registry.wait_vacated()
        finally:
            self._waiting.leave(ticket)
            del self._wanted[ticket]
            if len(self._waiting):
                # There may be a place for the next one too.
                self._registry.wake_waiting()

    def _room(self) -> Callable[[Ticket[tuple[int, TenantId]]], bool]:
        """Whether a ticket could be served now, for as long as nothing awaits."""
        room = self._taken()
        return lambda ticket: room.has(self._wanted[ticket])

    def _taken(self) -> Room:
        occupying = [each for each in self._registry.supervisors if each.is_occupying]
        return Room(
            self._settings,
            [
                Held(each.tenancy.owner_uid, each.specification.limits.memory_bytes)
                for each in occupying
            ],
        )

    def _refuse_unless_vacated(self, wanted: Held) -> None:
        """Nobody waits for a place that nobody gives up."""
        occupying = [each for each in self._registry.supervisors if each.is_occupying]
        if any(each.is_ending for each in occupying):
            return
        next_end = min((each.ends_at for each in occupying), default=0.0) - trio.current_time()
        raise ExecutionUnavailable(
            UnavailableCode.CAPACITY,
            self._taken().describe(wanted),
            retry_after_seconds=retry_after_seconds(next_end),
        )

    async def _build_for(self, slot: Supervisor, tenancy: Tenancy, stages: Stages) -> None:
        """Build an environment for a run that the reserve has nothing for."""
        await self._registry.begin(slot, tenancy)
        stages.enter(Stage.BUILD)
        self._supersede(slot)
        self._registry.reserve.missed(slot.profile)
        await slot.prepared.wait()
        if slot.preparation_failure is not None:
            raise slot.preparation_failure
        if not slot.is_ending:
            slot.apply(Event.TAKEN)
            stages.enter(Stage.JOURNAL)
            await self._parts.journal.note(slot.environment_id, JournalState.LIVE)

    async def _hand_out(
        self, slot: Supervisor, origin: SlotOrigin, started_at: float, stages: Stages
    ) -> EnvironmentHandle:
        specification = slot.specification
        _refuse_if_ending(slot)
        self._refuse_unenforced(slot)
        if network_shape(specification.egress) is NetworkShape.NONE:
            slot.sandbox.give_up_proxy_port()
        now = self._clock.wall()
        lifetime_seconds = min(
            self._settings.limits.environment_lifetime_seconds,
            slot.account.budgets.wall_seconds_max,
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
        await self._claim_bind_and_record(
            slot,
            stages,
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
            ),
        )
        _refuse_if_ending(slot)
        slot.apply(Event.ASSIGNED)
        self._registry.reaper.wake()
        self._registry.reserve.wake()
        return handle

    async def _claim_bind_and_record(
        self, slot: Supervisor, stages: Stages, event: EnvironmentProvisioned
    ) -> None:
        """What is left of a hand-out, all at once: the run's claim on a slot of the reserve goes
        into the journal, the limits are bound, the record is written. Of one that fails the record
        has the end, too.

        Raises EpochTooLow, JournalUnwritable, MechanismError, AuditUnavailable, the first of these
        in this order, after all three.
        """
        is_claimed = event.origin is SlotOrigin.COLD
        failures: dict[Stage, Exception] = {}
        left = [Stage.JOURNAL, Stage.LIMITS, Stage.AUDIT][1 if is_claimed else 0 :]
        stages.enter(left[0])

        async def attempt(stage: Stage, step: Callable[[], Awaitable[None]]) -> None:
            try:
                await step()
            except _HAND_OUT_FAILURES as problem:
                failures[stage] = problem
            left.remove(stage)
            if left:
                stages.enter(left[0])

        async with trio.open_nursery() as steps:
            if not is_claimed:
                claim = partial(self._parts.journal.assign, slot.environment_id, slot.tenancy)
                steps.start_soon(attempt, Stage.JOURNAL, claim)
            bind = partial(slot.sandbox.assign, slot.specification.limits)
            steps.start_soon(attempt, Stage.LIMITS, bind)
            await attempt(Stage.AUDIT, partial(self._parts.audit.emit, event))
        for stage in (Stage.JOURNAL, Stage.LIMITS, Stage.AUDIT):
            if stage in failures:
                raise failures[stage]
        if not is_claimed:
            self._registry.reserve.handed_out(slot)
            self._supersede(slot)

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
        for other in self._registry.supervisors:
            if other is newer or other.tenant is None or other.is_ending:
                continue
            if other.tenancy.is_of_same_run(newer.tenancy) and (
                other.tenancy.lease_epoch < newer.tenancy.lease_epoch
            ):
                self._registry.remember_superseded(other)
                other.request_end(DestroyReason.SUPERSEDED)


def _outdated(tenancy: Tenancy, problem: EpochTooLow) -> StaleLease:
    return StaleLease(
        f"lease_epoch: {tenancy.lease_epoch} is below {problem.seen}, which has been seen for this "
        "run"
    )


def _refuse_if_ending(slot: Supervisor) -> None:
    """Between two steps of a hand-out, the environment may have been ended."""
    match slot.end_reason:
        case None:
            return
        case DestroyReason.SUPERSEDED:
            raise StaleLease("lease_epoch: a higher epoch of this run was provisioned meanwhile")
        case DestroyReason.STALE_LEASE:
            raise StaleLease("lease_epoch: the lease was found stale while it was provisioned")
        case DestroyReason.SERVICE_SHUTDOWN:
            raise errors.shutting_down()
        case _:
            raise errors.lost()
