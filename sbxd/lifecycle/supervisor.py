"""One environment, from the intent to its end. Its task belongs to the registry's nursery.

Invariants: `request_end` never blocks and the first reason stands; after it nothing new starts
here. The task ends only when the environment is proven gone and that is audited, or when it is
quarantined and that is audited: until then it keeps its place in the registry, so that an audit
log that takes nothing holds new work back instead of losing an event.

A failure to destroy is repeated a fixed number of times and is then a quarantine with an alert.
If this task itself is cancelled (the daemon is being ended by force), everything in the
environment is killed and the journal still names it: the next start removes the rest.
"""

import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from sbxd.audit.events import (
    AuditEvent,
    DestroyReason,
    EnvironmentDestroyed,
    EnvironmentDestroyFailed,
    EnvironmentQuarantined,
)
from sbxd.audit.losses import LostPart
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.lifecycle.budgets import Budgets
from sbxd.lifecycle.end_records import Escape, Identity, preparation_failed, reasons
from sbxd.lifecycle.execution import Execution
from sbxd.lifecycle.finalize import BudgetSpent, within
from sbxd.lifecycle.journal import Journal, JournalState, JournalUnwritable, Tenancy
from sbxd.lifecycle.machine import Event, State, transition
from sbxd.lifecycle.network import EnvironmentNetwork
from sbxd.lifecycle.verdict import Lost, command_end
from sbxd.mechanism.protocol import (
    BridgeDoor,
    Mechanism,
    MechanismError,
    ProcessSurvived,
    Sandbox,
    SlotProfile,
)
from sbxd.policy.budgets import Account
from sbxd.port.command import ExecutionResult, Usage
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import EscapeCode
from sbxd.port.ids import EnvironmentId


@dataclass(frozen=True)
class Parts:
    """What every supervisor of a daemon shares."""

    mechanism: Mechanism
    journal: Journal
    audit: AuditSink
    budgets: Budgets
    back_stop_seconds: int


@dataclass(frozen=True)
class Tenant:
    """Who has the environment, since when (trio's clock), and until when."""

    tenancy: Tenancy
    specification: EnvironmentSpec
    account: Account
    taken_at: float


class Supervisor:
    """Holds one environment's state; `run` is its task."""

    def __init__(
        self,
        parts: Parts,
        environment_id: EnvironmentId,
        profile: SlotProfile,
        *,
        created_at: float,
    ) -> None:
        self.environment_id = environment_id
        self.profile = profile
        self.created_at = created_at
        self.state = State.PREPARING
        self.tenant: Tenant | None = None
        self.handle: EnvironmentHandle | None = None
        self.ends_at = float("inf")  # trio's clock
        self.holders: set[int] = set()  # connection ids of the owner
        self.orphaned_at: float | None = None
        self.execution: Execution | None = None
        self.network: EnvironmentNetwork | None = None  # of commands with both yeses
        self.running_argv: tuple[bytes, ...] | None = None
        self.commands_run = 0
        self.executing_seconds = 0.0
        self.cpu_ms: int | None = None  # of the commands that are over
        self.bridge_door: BridgeDoor | None = None
        self.turn_is_over = False  # of the bridge
        self.usage = Usage()
        self.end_reason: DestroyReason | None = None
        self.preparation_failure: MechanismError | None = None
        self.prepared = trio.Event()  # it is READY, or never will be
        self.first_attempt_over = trio.Event()  # destroyed, quarantined, or to be repeated
        self.last_attempt_over = trio.Event()  # destroyed, given up, or never to be known
        self.over = trio.Event()  # gone or quarantined, and audited
        self._parts = parts
        self._sandbox: Sandbox | None = None
        self._end_requested = trio.Event()
        self._escape: Escape | None = None
        self._lost_part: LostPart | None = None
        self._is_abandoned = False
        self._is_tree_unproven = False
        self._ended_at = self._gone_at = created_at

    @property
    def sandbox(self) -> Sandbox:
        """Only of an environment that has been prepared."""
        assert self._sandbox is not None
        return self._sandbox

    @property
    def tenancy(self) -> Tenancy:
        """Only of an environment that a tenant has."""
        assert self.tenant is not None
        return self.tenant.tenancy

    @property
    def specification(self) -> EnvironmentSpec:
        """Only of an environment that a tenant has."""
        assert self.tenant is not None
        return self.tenant.specification

    @property
    def account(self) -> Account:
        """What its tenant has been charged. Only of an environment that a tenant has."""
        assert self.tenant is not None
        return self.tenant.account

    @property
    def is_occupying(self) -> bool:
        """Whether it takes a place of `environments_max`: from the request to the audited end. A
        slot of the reserve does not, nor what is quarantined."""
        return self.tenant is not None and self.state is not State.QUARANTINED

    @property
    def is_ending(self) -> bool:
        return self.end_reason is not None

    def apply(self, event: Event) -> None:
        self.state = transition(self.state, event)

    def request_end(self, reason: DestroyReason) -> None:
        """End the environment, now and in the background. Never blocks; the first reason stands."""
        if self.end_reason is not None:
            return
        self.end_reason = reason
        self._ended_at = trio.current_time()
        self.apply(Event.END)
        if self.execution is not None:
            self.execution.end_with_environment(command_end(reason))
        # Otherwise the command's leaf dies first, so that its last words and its changes are kept.
        if self.execution is None or reason in _AT_ONCE:
            self._kill()
        self._end_requested.set()

    def abandon(self) -> None:
        """The mechanism is gone, so nothing can be proven any more in this run of the daemon.

        Everything is killed as far as that goes, callers are told, and nothing is quarantined:
        the journal's intent stands and the next start resolves it. Never blocks.
        """
        self._is_abandoned = True
        self.last_attempt_over.set()
        if self.end_reason is None:
            self._lost_part = LostPart.LAUNCHER
        self.request_end(DestroyReason.ENVIRONMENT_LOST)
        if self.execution is not None:
            self.execution.end_with_environment(Lost())
        self._kill()

    def suspect_escape(self, code: EscapeCode, detail: str) -> None:
        """End the environment because an invariant of the isolation was violated."""
        if self._escape is None:
            self._escape = Escape(code, detail)
        self.request_end(DestroyReason.ESCAPE_SUSPECTED)

    def doubt_tree(self) -> None:
        """End the environment because a command's tree was not proven dead in time: its destruction
        is to be the proof, and if that is given up, an escape is suspected. Never blocks."""
        self._is_tree_unproven = True
        self.request_end(DestroyReason.ENVIRONMENT_LOST)

    async def wait_tree_dead(self) -> Escape | None:
        """As `doubt_tree`, until there is that proof (None), or what is suspected.

        A process that a busy host is slow to end is thereby told from one that survives. Bounded
        by the budgets of a destruction; None at once when the mechanism is gone.
        """
        self.doubt_tree()
        await self.last_attempt_over.wait()
        return self._escape

    def begin_command(self, execution: Execution, argv: tuple[bytes, ...]) -> int:
        """A command takes the environment. Returns its number, from 1."""
        self.apply(Event.COMMAND_STARTED)
        self.execution = execution
        self.running_argv = argv
        self.commands_run += 1
        return self.commands_run

    def finish_command(self, result: ExecutionResult | None) -> None:
        """The command that ran is over. None: it never started, or its end is not known."""
        self.apply(Event.COMMAND_FINISHED)
        self.execution = None
        self.running_argv = None
        if result is not None:
            self.executing_seconds += result.duration_ms / 1000
            self.usage = result.usage
            if result.usage.cpu_ms is not None:
                self.cpu_ms = (self.cpu_ms or 0) + result.usage.cpu_ms

    def open_bridge(self, *, waiting_max: int) -> BridgeDoor:
        """The door that the turn's programs connect to. Raises MechanismError."""
        if self.bridge_door is None:
            self.bridge_door = self.sandbox.open_bridge(waiting_max=waiting_max)
        return self.bridge_door

    def end_turn(self) -> None:
        """The bridge's turn is over: nobody listens any more. Never blocks."""
        self.turn_is_over = True
        if self.bridge_door is not None:
            self.bridge_door.close()

    async def run(self) -> None:
        """Prepare, watch, end. Returns when the environment is over.

        Cancellation: everything in it is killed; nothing is awaited.
        """
        try:
            await self._prepare()
            if not self._end_requested.is_set():
                await self._watch()
            await self._settle_command()
            await self._audit_reason()
            problem = await self._destroy()
            await self._conclude(problem)
            self.over.set()
        finally:
            if not self.over.is_set():
                self._kill()

    def _kill(self) -> None:
        """Kill everything in it. What the kill does not reach, the destruction's proof finds."""
        if self._sandbox is not None:
            with suppress(MechanismError):
                self._sandbox.kill()

    async def _prepare(self) -> None:
        """Build the slot, unless the end is requested first."""
        try:
            if self._end_requested.is_set():
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_on_end, nursery.cancel_scope)
                try:
                    self._sandbox = await self._parts.mechanism.prepare(
                        self.environment_id,
                        self.profile,
                        back_stop_seconds=self._parts.back_stop_seconds,
                    )
                except MechanismError as problem:
                    self.preparation_failure = problem
                nursery.cancel_scope.cancel()
            if self._end_requested.is_set():
                return
            if self.preparation_failure is not None:
                self.request_end(DestroyReason.PROVISION_FAILED)
                return
            self.apply(Event.PREPARED)
        finally:
            self.prepared.set()

    async def _cancel_on_end(self, scope: trio.CancelScope) -> None:
        await self._end_requested.wait()
        scope.cancel()

    async def _watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_loss)
            await self._end_requested.wait()
            nursery.cancel_scope.cancel()

    async def _watch_loss(self) -> None:
        try:
            self._lost_part = LostPart(await self.sandbox.wait_lost())
        except MechanismError:
            self._lost_part = LostPart.LAUNCHER
        self.request_end(DestroyReason.ENVIRONMENT_LOST)

    async def _settle_command(self) -> None:
        """Let the command that was running when the end came die, and tell what it did."""
        execution = self.execution
        if execution is not None:
            budgets = self._parts.budgets
            with trio.move_on_after(budgets.quiet_seconds + budgets.settle_seconds):
                await execution.settled.wait()
        self._kill()
        if self.network is not None:
            with suppress(BudgetSpent):
                await within(self._parts.budgets.release_seconds, self.network.close)

    async def _destroy(self) -> MechanismError | None:
        """Destroy until it is proven. Returns the last failure when it was never."""
        attempt = 1
        while True:
            problem = await self._try_to_destroy()
            if problem is None:
                self._gone_at = trio.current_time()
                self.apply(Event.DESTROYED)
                self.last_attempt_over.set()
                return None
            self.apply(Event.DESTROY_FAILED)
            self.first_attempt_over.set()
            await self._note(JournalState.DESTROYING)
            if self._is_abandoned:
                await trio.sleep_forever()
            pauses = self._parts.budgets.destroy_retry_seconds
            is_last = attempt > len(pauses)
            if is_last:
                await self._give_up(problem)
            await self._emit_surely(
                EnvironmentDestroyFailed(
                    environment_id=self.environment_id,
                    step=problem.step,
                    errno=problem.errno,
                    attempt=attempt,
                )
            )
            if is_last:
                return problem
            await trio.sleep(pauses[attempt - 1])
            attempt += 1

    async def _give_up(self, problem: MechanismError) -> None:
        """Alert, once, when a process has outlived every attempt: a slow host only takes some."""
        survived = self._is_tree_unproven or isinstance(problem, ProcessSurvived)
        if not survived or self.handle is None or self._escape is not None:
            self.last_attempt_over.set()
            return
        self._escape = Escape(
            EscapeCode.PROCESS_SURVIVED, "a process outlived the destruction of its environment"
        )
        self.last_attempt_over.set()  # whoever waits for the proof need not wait for the record
        await self._emit_surely(self._escape.event(self.identity()))

    async def _try_to_destroy(self) -> MechanismError | None:
        if self._sandbox is not None:
            operation = partial(self._sandbox.destroy, party=self._party())
        else:
            # A preparation that failed or was cancelled left nothing, and this proves it.
            operation = partial(self._parts.mechanism.destroy_orphan, self.environment_id)
        try:
            await within(self._parts.budgets.destroy_seconds, operation)
        except MechanismError as problem:
            return problem
        except BudgetSpent:
            return MechanismError("destroy", 0, "not finished in time")
        return None

    def _party(self) -> int:
        """Whose workspace it is, as a number: tenants of two workers are two. A collision makes
        two of them take one turn at the erasing."""
        if self.tenant is None:
            return 0
        tenancy = self.tenancy
        return zlib.crc32(f"{tenancy.owner_uid} {tenancy.tenant_id}".encode())

    async def _conclude(self, problem: MechanismError | None) -> None:
        """Write down and audit what the end was."""
        if problem is None:
            # Whoever asked for the end has the proof and need not wait for the record.
            self.first_attempt_over.set()
            await self._note(JournalState.GONE)
            await self._settle_network()
            destroyed = self._destroyed_event()
            if destroyed is not None:
                await self._emit_surely(destroyed)
            return
        self.apply(Event.GIVEN_UP)
        # When neither database nor marker takes it, the last word is the audit's: the intent is
        # still there, so the next start tries to remove it and quarantines it if it cannot.
        with suppress(JournalUnwritable):
            await self._parts.journal.quarantine(self.environment_id)
        self.first_attempt_over.set()
        await self._settle_network()
        await self._emit_surely(
            EnvironmentQuarantined(
                environment_id=self.environment_id, step=problem.step, errno=problem.errno
            )
        )

    async def _settle_network(self) -> None:
        """Until what its connections did is recorded, as `_emit_surely`."""
        if self.network is not None:
            await self.network.settle()

    def _destroyed_event(self) -> EnvironmentDestroyed | None:
        """None for a slot that no tenant got."""
        if self.tenant is None or self.handle is None or self.end_reason is None:
            return None
        return EnvironmentDestroyed(
            **self.identity(),
            reason=self.end_reason,
            commands_run=self.commands_run,
            lifetime_ms=round((trio.current_time() - self.tenant.taken_at) * 1000),
            executing_ms=round(self.executing_seconds * 1000),
            destroying_ms=round((self._gone_at - self._ended_at) * 1000),
            operations=self.account.operations,
            returned_bytes=self.account.returned_bytes,
            written_bytes=self.account.written_bytes,
        )

    async def _audit_reason(self) -> None:
        """What the end's reason adds to the record before the destruction."""
        if self.preparation_failure is not None:
            failed = preparation_failed(self.environment_id, self.preparation_failure)
            await self._emit_surely(failed)
        if self.handle is None:
            return
        for event in reasons(
            self.identity(),
            self.handle,
            reason=self.end_reason,
            escape=self._escape,
            budget=self.account.exhausted,
            lost_part=self._lost_part,
        ):
            await self._emit_surely(event)

    def identity(self) -> Identity:
        """The fields of an EnvironmentEvent. Only of an environment that a tenant has."""
        tenancy = self.tenancy
        return {
            "environment_id": self.environment_id,
            "tenant_id": tenancy.tenant_id,
            "run_id": tenancy.run_id,
            "lease_epoch": tenancy.lease_epoch,
        }

    async def _note(self, state: JournalState) -> None:
        """Keep the journal up to date; a record that is not taken leaves the intent standing,
        which the next start resolves."""
        with suppress(JournalUnwritable):
            await self._parts.journal.note(self.environment_id, state)

    async def _emit_surely(self, event: AuditEvent) -> None:
        """Record an event of an ending, however long the audit log takes nothing."""
        while True:
            try:
                return await self._parts.audit.emit(event)
            except AuditUnavailable:
                await trio.sleep(self._parts.budgets.audit_retry_seconds)


_AT_ONCE = frozenset({DestroyReason.ENVIRONMENT_LOST, DestroyReason.ESCAPE_SUSPECTED})
