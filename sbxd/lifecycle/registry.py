"""All environments of this daemon: who may have one, who has which, and the nursery they live in.

Invariants: every environment that may exist has a supervisor in the table until it is proven over
and audited; an environment is handed out only after its assignment is journaled and audited; a
peer that may not act on an environment learns nothing of it. A caller that goes away cancels its
request, never an environment.

Concurrency: the table is changed only between checkpoints, so that a check and the change that
rests on it are one step.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from sbxd.audit.events import DestroyReason
from sbxd.audit.lease_events import JournalWriteFailed
from sbxd.audit.sink import AuditUnavailable
from sbxd.lifecycle import errors
from sbxd.lifecycle.budgets import WallClock
from sbxd.lifecycle.environments import Peer
from sbxd.lifecycle.journal import JournalUnwritable, Tenancy
from sbxd.lifecycle.machine import HANDED_OUT, State
from sbxd.lifecycle.ownership import Standing, judge
from sbxd.lifecycle.reaper import Reaper, Tenure
from sbxd.lifecycle.reserve import Bounds, Reserve
from sbxd.lifecycle.shares import Shares
from sbxd.lifecycle.supervisor import Parts, Supervisor
from sbxd.mechanism.protocol import SlotProfile
from sbxd.policy.budgets import Budget, overrun
from sbxd.policy.images import default_image
from sbxd.policy.network import network_shape
from sbxd.policy.shares import Claim
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import (
    EscapeCode,
    SandboxEscapeSuspected,
    StaleLease,
)
from sbxd.port.ids import EnvironmentId
from sbxd.settings import Settings

# Handles that a higher epoch, or an overrun budget, ended are told so for as long as they are among
# the latest.
ENDED_KEPT = 4096
# The scope's own limit lies this far beyond anything that the daemon would allow.
BACK_STOP_MARGIN_SECONDS = 600


@dataclass(frozen=True)
class Clock:
    """wall: aware, UTC, for created_at and expires_at. new_id: 32 hex digits, unguessable."""

    wall: WallClock
    new_id: Callable[[], EnvironmentId]


@dataclass(frozen=True)
class _Ended:
    """An environment that is over for a reason that its handle is told: the budget that it
    overran, or None for its lease (a higher epoch, or the authority's word)."""

    tenancy: Tenancy
    budget: Budget | None


def back_stop_seconds(settings: Settings) -> int:
    """How long a scope may exist at the very most: age in the reserve and life after it."""
    return (
        settings.reserve.age_max_seconds
        + settings.limits.environment_lifetime_seconds
        + BACK_STOP_MARGIN_SECONDS
    )


def reserve_profile(settings: Settings, known_images: Sequence[str]) -> SlotProfile | None:
    """What the reserve prepares in any case: the default image with the default limits, which may
    be raised to the ceilings, and the proxy's port where the operator lists destinations; None
    without an image."""
    digest = default_image(settings.images, known_images)
    if digest is None or digest not in known_images or settings.reserve.slots == 0:
        return None
    return SlotProfile(
        image_digest=digest,
        limits=settings.limits.defaults,
        network=network_shape(settings.egress),
        ceilings=settings.limits.ceilings,
    )


class Registry:
    """The table, the reserve and the reaper. `run` is its task."""

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        clock: Clock,
        known_images: Callable[[], Sequence[str]],
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._table: dict[EnvironmentId, Supervisor] = {}
        self._ended: OrderedDict[EnvironmentId, _Ended] = OrderedDict()
        self._nursery: trio.Nursery | None = None
        self._vacated = trio.Event()
        self._is_draining = False
        self._requests = 0
        self.reaper = Reaper(
            self._tenures, self._end, grace_seconds=settings.service.orphan_grace_seconds
        )
        self.shares = Shares(parts.mechanism, self._claims, self._table.__contains__)
        self.reserve = Reserve(
            lambda: reserve_profile(settings, known_images()),
            Bounds(settings.reserve.slots, settings.reserve.most),
            mechanism=parts.mechanism.name,
            limits=settings.limits,
            is_known=lambda digest: digest in known_images(),
            build=self._build_slot,
            is_busy=lambda: self._requests > 0,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the supervisors, the reaper, the reserve and the shares, until cancelled.

        Cancellation: everything in every environment is killed; the next start removes the rest.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.reaper.run)
            nursery.start_soon(self.reserve.run)
            nursery.start_soon(self.shares.run)
            task_status.started()

    async def shut_down(self, reason: DestroyReason) -> int:
        """Take nothing new, end every environment, and return how many there were. One that runs a
        command is ended when that is over, or after `service.shutdown_grace_seconds`.

        Bounded by that and `Budgets.shutdown_seconds`; what is not over by then is left to the next
        start, and so is what cannot be proven because the mechanism went meanwhile (a host that
        shuts down stops both): nothing is quarantined for that. Call it once.
        """
        self._is_draining = True
        self.reserve.discard()
        ended = [each for each in self.handed_out() if each.state is not State.QUARANTINED]
        everything = list(self._table.values())
        for supervisor in everything:
            if supervisor.execution is None:
                supervisor.request_end(reason)
        grace_seconds = self._settings.service.shutdown_grace_seconds
        if all(each.execution is None for each in everything):
            grace_seconds = 0
        with trio.move_on_after(grace_seconds + self._parts.budgets.shutdown_seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._abandon_when_lost, everything, nursery.cancel_scope)
                async with trio.open_nursery() as endings:
                    for supervisor in everything:
                        endings.start_soon(_end_after, grace_seconds, supervisor, reason)
                nursery.cancel_scope.cancel()
        return len(ended)

    async def _abandon_when_lost(
        self, everything: Collection[Supervisor], scope: trio.CancelScope
    ) -> None:
        await self._parts.mechanism.wait_lost()
        for supervisor in everything:
            supervisor.abandon()
        scope.cancel()

    async def abandon(self, *, within_seconds: float) -> int:
        """The mechanism is gone: take nothing new, tell every caller that its environment is
        lost, and return how many there were. Cancel `run` next; the next start removes the rest.
        """
        self._is_draining = True
        ended = [each for each in self.handed_out() if each.state is not State.QUARANTINED]
        for supervisor in list(self._table.values()):
            supervisor.abandon()
        with trio.move_on_after(within_seconds):
            while self._requests > 0:
                await self.wait_vacated()
        return len(ended)

    # --- the table ----------------------------------------------------------------------------

    def find(self, peer: Peer, handle: EnvironmentHandle) -> Supervisor:
        """The environment that a handle names, for a peer that may use it now.

        Raises: ExecutionRejected(ENVIRONMENT_GONE), StaleLease, BudgetExhausted,
        SandboxEscapeSuspected(TENANT_MISMATCH); ServiceShuttingDown instead of the first.
        """
        supervisor = self.find_any(peer, handle)
        if supervisor is not None and supervisor.state in HANDED_OUT:
            if peer.uid == supervisor.tenancy.owner_uid:
                supervisor.holders.add(peer.connection_id)
                supervisor.orphaned_at = None
            return supervisor
        ended = self._ended.get(handle.environment_id)
        if (
            ended is None
            or peer.uid != ended.tenancy.owner_uid
            or handle.tenant_id != ended.tenancy.tenant_id
        ):
            raise errors.shutting_down() if self._is_draining else errors.gone()
        if ended.budget is not None:
            raise overrun(ended.budget)
        raise StaleLease(
            "lease_epoch: the lease of this environment is not held any more, and it has ended"
        )

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
        gone excepted, once that is written down."""
        return frozenset(
            each.environment_id
            for each in self._table.values()
            if each.state is not State.QUARANTINED or not each.over.is_set()
        )

    def images_in_use(self) -> Mapping[str, int]:
        """How many environments stand on each image digest. Slots of the reserve do not count:
        they give way; nor does what is proven gone and not recorded yet (`wait_image_free`)."""
        return Counter(
            each.profile.image_digest
            for each in self._table.values()
            if each.tenant is not None and each.state is not State.GONE
        )

    def images_reserved(self) -> Mapping[str, int]:
        """How many slots that nobody has stand on each image digest."""
        return Counter(
            each.profile.image_digest for each in self._table.values() if each.tenant is None
        )

    async def wait_image_free(self, image_digest: str) -> None:
        """Until nothing stands on an image that is no longer known, not even a slot."""
        self.reserve.wake()
        while any(each.profile.image_digest == image_digest for each in self._table.values()):
            await self._vacated.wait()

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
            self._vacate()

    @property
    def is_draining(self) -> bool:
        """Nothing new is taken: it has not begun to run, or is being shut down."""
        return self._is_draining or self._nursery is None

    @property
    def supervisors(self) -> Collection[Supervisor]:
        """Everything in the table, oldest first."""
        return self._table.values()

    def wake_waiting(self) -> None:
        """Let everybody who waits for a place look again. Never blocks."""
        self._vacate()

    async def wait_vacated(self) -> None:
        """Until an environment has left the table or its place, or no request is served."""
        await self._vacated.wait()

    def remember_superseded(self, supervisor: Supervisor) -> None:
        """Its handle is to be told StaleLease from now on."""
        self._remember(supervisor, None)

    def end_stale(self, supervisor: Supervisor) -> None:
        """End an environment whose lease is not held; its handle is told StaleLease."""
        self._remember(supervisor, None)
        supervisor.request_end(DestroyReason.STALE_LEASE)

    def forget_quarantined(self, environment_id: EnvironmentId) -> None:
        """It was released: it is not shown any more. None of ours is no error."""
        supervisor = self._table.get(environment_id)
        if supervisor is not None and environment_id not in self.owned():
            self._forget(supervisor)

    def enforce_budgets(self, supervisor: Supervisor) -> None:
        """End an environment that has overrun a budget; its handle is told so from now on."""
        budget = supervisor.account.exhausted
        if budget is not None and not supervisor.is_ending:
            self._remember(supervisor, budget)
            supervisor.request_end(DestroyReason.BUDGET_EXHAUSTED)

    def _remember(self, supervisor: Supervisor, budget: Budget | None) -> None:
        self._ended[supervisor.environment_id] = _Ended(supervisor.tenancy, budget)
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    # --- supervisors --------------------------------------------------------------------------

    def new(self, profile: SlotProfile) -> Supervisor:
        """A supervisor in the table, of which nothing exists yet. `begin` it."""
        supervisor = Supervisor(
            self._parts, self._clock.new_id(), profile, created_at=trio.current_time()
        )
        self._table[supervisor.environment_id] = supervisor
        return supervisor

    async def begin(self, supervisor: Supervisor, tenancy: Tenancy | None) -> None:
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
        """Wake everybody who waits for a place, each of whom looks again."""
        self._vacated.set()
        self._vacated = trio.Event()
        self.reserve.wake()

    async def _build_slot(self, profile: SlotProfile) -> Supervisor | None:
        if self._is_draining:
            return None
        slot = self.new(profile)
        slot.ends_at = trio.current_time() + self._settings.reserve.age_max_seconds
        try:
            await self.begin(slot, None)
        except JournalUnwritable as problem:
            await self.report_unwritable(slot.environment_id, problem)
            return None
        self.reaper.wake()
        return slot

    async def report_unwritable(
        self, environment_id: EnvironmentId, problem: JournalUnwritable
    ) -> None:
        """Alert: nothing can be built. An audit log that takes nothing refuses for itself."""
        with suppress(AuditUnavailable):
            await self._parts.audit.emit(
                JournalWriteFailed(environment_id=environment_id, detail=str(problem))
            )

    def _tenures(self) -> list[Tenure]:
        return [
            Tenure(each.environment_id, each.ends_at, each.orphaned_at)
            for each in self._table.values()
            if not each.is_ending
        ]

    def _claims(self) -> dict[EnvironmentId, Claim]:
        """Of the environments that run a command. Two workers' tenants are two, whatever their
        names."""
        return {
            each.environment_id: Claim(
                tenant=(each.tenancy.owner_uid, each.tenancy.tenant_id),
                cpu_millicores=each.specification.limits.cpu_millicores,
            )
            for each in self._table.values()
            if each.tenant is not None and each.execution is not None
        }

    def _end(self, environment_id: EnvironmentId, reason: DestroyReason) -> None:
        supervisor = self._table[environment_id]
        if reason is DestroyReason.EXPIRED and supervisor.tenant is not None:
            wall_seconds = supervisor.account.budgets.wall_seconds_max
            if wall_seconds < self._settings.limits.environment_lifetime_seconds:
                supervisor.account.time_is_up()
                self._remember(supervisor, Budget.WALL)
        supervisor.request_end(reason)


async def _end_after(grace_seconds: float, supervisor: Supervisor, reason: DestroyReason) -> None:
    """Let the command that runs end by itself within the grace; then until it is all over."""
    if supervisor.execution is not None:
        with trio.move_on_after(grace_seconds):
            await supervisor.execution.settled.wait()
    supervisor.request_end(reason)
    await supervisor.over.wait()
