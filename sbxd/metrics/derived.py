"""What the audit's events say, counted: the only reader of events that counts.

Invariants: an event is observed once, after it was recorded, so that a metric and the journal
never disagree by more than what is under way; observing is a few additions, awaits nothing and
raises nothing. A family that a rule or a dashboard divides or compares begins with all its series
at 0. Every family of S1's tracked metrics carries the mechanism.

Deliberately absent: what is read at the time of a question instead of counted
(`sbxd.metrics.readings`), and artifacts, which the daemon does not know (`sbxd.artifacts.metrics`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sbxd.audit import egress_events as egress
from sbxd.audit import events as e
from sbxd.audit import lease_events as lease
from sbxd.audit.bridge_events import BridgeClosed, BridgeRefused
from sbxd.audit.confinement import ConfinementMismatched
from sbxd.audit.events import AuditEvent
from sbxd.audit.losses import EnvironmentLost, LostPart
from sbxd.metrics.denials import Denials
from sbxd.metrics.families import Counter, Family, Histogram, Unit
from sbxd.metrics.recent import Recent
from sbxd.policy.budgets import Budget
from sbxd.policy.violations import ViolationCode
from sbxd.port.command import KillReason
from sbxd.port.errors import EscapeCode, UnavailableCode
from sbxd.port.ids import EnvironmentId

# Hand-outs of the reserve take milliseconds, cold ones hundreds; the start budget ends at 60 s.
PROVISION_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
EXECUTE_BOUNDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0)
DESTROY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
DECISION_BOUNDS = (0.0001, 0.0005, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0)

# `sbxd.egress.decisions.TunnelEnd`, as an event has it.
TUNNEL_ENDS = ("FINISHED", "CLIENT_FAILED", "SERVER_FAILED", "IDLE", "SNI_REFUSED", "STOPPED")

# What a command that ended by itself, and one whose end is not known, has for a kill reason.
BY_ITSELF = "NONE"
UNKNOWN = "UNKNOWN"
# Ends of environments that nobody asked for because their worker was dead or fenced.
_REAPED = frozenset(
    {e.DestroyReason.ORPHANED, e.DestroyReason.PEER_GONE, e.DestroyReason.STALE_LEASE}
)
# Something of ours that the kernel held and no environment of this daemon.
_UNOWNED = "UNOWNED"


class Happening(StrEnum):
    """What an operator is told of for some minutes after it happened."""

    POOL_HIT = "pool_hit"
    POOL_MISS = "pool_miss"
    UNRECORDED = "unrecorded"
    JOURNAL_REFUSED = "journal_refused"
    AUTHORITY_MISSED = "authority_missed"
    DESTROY_FAILED = "destroy_failed"
    ESCAPE_SUSPECTED = "escape_suspected"


@dataclass
class _Live:
    """One environment that a tenant has. bridge_refusals: those with an event of their own."""

    denials: int = 0
    bridge_refusals: int = 0


class DerivedMetrics:
    """Counts every event. One for the daemon; `observe` is called after each is recorded.

    mechanism: of every environment of this daemon. now: seconds, never going back.
    """

    def __init__(self, mechanism: str, now: Callable[[], float]) -> None:
        self._mechanism = mechanism
        self._now = now
        self._live: dict[EnvironmentId, _Live] = {}
        self.denials = Denials()
        self._recent: Recent[tuple[Happening, str]] = Recent()
        self._handlers = self._table()
        m = mechanism
        origins = [(m, origin.value) for origin in e.SlotOrigin]
        self.provision = Histogram(
            "sbxd_provision_seconds",
            "From the request for an environment to its hand-out, by where its slot came from.",
            *("mechanism", "origin"),
            bounds=PROVISION_BOUNDS,
        ).declare(*origins)
        self.execute = Histogram(
            "sbxd_execute_seconds",
            "From the start of a command to its end.",
            "mechanism",
            bounds=EXECUTE_BOUNDS,
        ).declare((m,))
        self.destroy = Histogram(
            "sbxd_destroy_seconds",
            "From the end of an environment to the proof that nothing of it is left.",
            "mechanism",
            bounds=DESTROY_BOUNDS,
        ).declare((m,))
        self.egress_decision = Histogram(
            "sbxd_egress_decision_seconds",
            "From the end of a CONNECT to its answer, resolution and dial included.",
            bounds=DECISION_BOUNDS,
        )
        self.lifetime = Counter(
            "sbxd_environment_lifetime_seconds",
            "Lifetimes of destroyed environments.",
            "mechanism",
            unit=Unit.SECONDS,
        ).declare((m,))
        self.executing = Counter(
            "sbxd_environment_executing_seconds",
            "The parts of their lifetimes that destroyed environments spent in commands.",
            "mechanism",
            unit=Unit.SECONDS,
        ).declare((m,))
        self.destroyed = Counter(
            "sbxd_environments_destroyed",
            "Environments that were proven gone, by why they ended.",
            *("mechanism", "reason"),
        ).declare(*((m, each.value) for each in e.DestroyReason))
        self.commands = Counter(
            "sbxd_commands",
            "Commands that ended, by what killed them (NONE: they ended by themselves).",
            *("mechanism", "killed_by"),
        ).declare(*((m, each) for each in (*KillReason, BY_ITSELF, UNKNOWN)))
        self.reaped = Counter(
            "sbxd_orphans_reaped",
            "What was removed because whoever it belonged to was gone, by how that was known.",
            *("mechanism", "cause"),
        ).declare(*((m, each.value) for each in sorted(_REAPED)), (m, _UNOWNED))
        self.connections = Counter(
            "sbxd_egress_connections",
            "Connections that asked the proxy for something, by what was decided and why.",
            *("mechanism", "outcome", "reason"),
        ).declare((m, "allowed", ""))
        self.tunnels_closed = Counter(
            "sbxd_proxy_tunnels_closed", "Tunnels that ended, by what ended them.", "end"
        ).declare(*((each,) for each in TUNNEL_ENDS))
        self.proxy_bytes = Counter(
            "sbxd_proxy_bytes",
            "Bytes that went through tunnels that ended (up: from the sandbox).",
            "direction",
            unit=Unit.BYTES,
        ).declare(("up",), ("down",))
        self.pool_hits = Counter("sbxd_pool_hits", "Hand-outs of a prepared slot.")
        self.pool_misses = Counter("sbxd_pool_misses", "Hand-outs that had to be built.")
        self.pool_failures = Counter(
            "sbxd_pool_slot_failures", "Slots that could not be built, by why.", "cause"
        ).declare(("preparation",), ("confinement",))
        self.budgets = Counter(
            "sbxd_budgets_exhausted", "Environments that overran a budget.", "budget"
        ).declare(*((each.value,) for each in Budget))
        self.lost = Counter(
            "sbxd_environments_lost",
            "Environments that ended by themselves, by what was missing first.",
            "part",
        ).declare(*((each.value,) for each in LostPart))
        self.escapes = Counter(
            "sbxd_escapes_suspected", "Invariants of the isolation that were violated.", "code"
        ).declare(*((each.value,) for each in EscapeCode))
        self.destroy_failures = Counter(
            "sbxd_destroy_failures", "Attempts to destroy an environment that failed."
        )
        self.quarantines = Counter(
            "sbxd_quarantines", "Environments that could not be proven stopped."
        )
        self.authority_unreachable = Counter(
            "sbxd_lease_authority_unreachable",
            "Passes of the reaper to which a lease authority gave no answer.",
            "authority",
        )
        self.journal_failures = Counter(
            "sbxd_journal_write_failures", "Records that the creation journal did not take."
        )
        self.unserved = Counter(
            "sbxd_requests_unserved", "Right requests that could not be served then.", "code"
        ).declare(*((each.value,) for each in UnavailableCode))
        self.peers_refused = Counter(
            "sbxd_peers_refused", "Connections that were closed, by why.", "door", "reason"
        ).declare(*((door.value, each.value) for door in e.Door for each in e.PeerRefusal))
        self.records = Counter(
            "sbxd_audit_records", "Events that were recorded.", "event", series_max=128
        )
        self.unrecorded = Counter(
            "sbxd_audit_unrecorded", "Times that the audit did not take an event."
        )

    def observe(self, event: AuditEvent) -> None:
        """Count one event that was recorded."""
        self.records.add(type(event).__name__)
        self.observe_counted(event)

    def observe_counted(self, event: AuditEvent) -> None:
        """Count one event that has no record of its own: a record of counts says it."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def observe_unrecorded(self) -> None:
        """Count one attempt to record that failed."""
        self.unrecorded.add()
        self._happened(Happening.UNRECORDED)

    def recent(self) -> Mapping[tuple[Happening, str], int]:
        """What happened within the last minutes, and to what (an authority's name, a code)."""
        return self._recent.counts(self._now())

    def recent_denials(self) -> Mapping[tuple[str, ViolationCode], int]:
        """Denials within the last minutes by tenant and violation, most first."""
        return self.denials.recent(self._now())

    @property
    def tunnels_open(self) -> int:
        """Tunnels whose end was not recorded yet."""
        opened = self.connections.value(self._mechanism, "allowed", "")
        return max(0, round(opened - self.tunnels_closed.total))

    def denials_of(self, environment_id: EnvironmentId) -> int:
        """How much one live environment was denied."""
        live = self._live.get(environment_id)
        return 0 if live is None else live.denials

    def families(self) -> Sequence[Family]:
        """All that was counted."""
        instruments = [
            each for each in vars(self).values() if isinstance(each, Counter | Histogram)
        ]
        return (*(each.family() for each in instruments), *self.denials.families())

    # --- events ------------------------------------------------------------------------------

    def _table(self) -> Mapping[type[AuditEvent], Callable[[Any], None]]:
        return {
            e.PeerRefused: lambda it: self.peers_refused.add(it.door.value, it.reason.value),
            e.RequestRejected: self._denied_request,
            e.PathDenied: self._denied_request,
            e.RequestUnserved: lambda it: self.unserved.add(it.code.value),
            e.EnvironmentProvisioned: self._provisioned,
            e.EnvironmentDestroyed: self._destroyed,
            e.BudgetWasExhausted: lambda it: self.budgets.add(it.budget.value),
            EnvironmentLost: lambda it: self.lost.add(it.part.value),
            e.EnvironmentDestroyFailed: self._destroy_failed,
            e.EnvironmentQuarantined: self._quarantined,
            e.OrphanDestroyed: lambda it: self.reaped.add(self._mechanism, _UNOWNED),
            e.SlotPreparationFailed: lambda it: self.pool_failures.add("preparation"),
            ConfinementMismatched: lambda it: self.pool_failures.add("confinement"),
            e.SandboxEscapeWasSuspected: self._escape_suspected,
            e.CommandFinished: self._finished,
            e.CommandUnfinished: lambda it: self.commands.add(self._mechanism, UNKNOWN),
            egress.EgressAllowed: lambda it: self._connected(it, "allowed", ""),
            egress.EgressRefused: self._egress_refused,
            egress.EgressFailed: lambda it: self._connected(it, "failed", it.reason),
            egress.EgressTunnelClosed: self._tunnel_closed,
            egress.EgressRefusalsCounted: self._refusals_counted,
            BridgeRefused: self._bridge_refused,
            BridgeClosed: self._bridge_closed,
            lease.LeaseAuthorityMissed: self._authority_missed,
            lease.JournalWriteFailed: self._journal_refused,
        }

    def _provisioned(self, event: e.EnvironmentProvisioned) -> None:
        self._live[event.environment_id] = _Live()
        self.provision.observe(event.duration_ms / 1000, self._mechanism, event.origin.value)
        is_hit = event.origin is e.SlotOrigin.RESERVE
        (self.pool_hits if is_hit else self.pool_misses).add()
        self._happened(Happening.POOL_HIT if is_hit else Happening.POOL_MISS)

    def _destroyed(self, event: e.EnvironmentDestroyed) -> None:
        self._live.pop(event.environment_id, None)
        self.destroyed.add(self._mechanism, event.reason.value)
        self.lifetime.add(self._mechanism, by=event.lifetime_ms / 1000)
        self.executing.add(self._mechanism, by=event.executing_ms / 1000)
        self.destroy.observe(event.destroying_ms / 1000, self._mechanism)
        if event.reason in _REAPED:
            self.reaped.add(self._mechanism, event.reason.value)

    def _destroy_failed(self, event: e.EnvironmentDestroyFailed) -> None:
        self.destroy_failures.add()
        self._happened(Happening.DESTROY_FAILED)

    def _escape_suspected(self, event: e.SandboxEscapeWasSuspected) -> None:
        self.escapes.add(event.code.value)
        self._happened(Happening.ESCAPE_SUSPECTED, event.code.value)

    def _authority_missed(self, event: lease.LeaseAuthorityMissed) -> None:
        self.authority_unreachable.add(event.authority)
        self._happened(Happening.AUTHORITY_MISSED, event.authority)

    def _journal_refused(self, event: lease.JournalWriteFailed) -> None:
        self.journal_failures.add()
        self._happened(Happening.JOURNAL_REFUSED)

    def _quarantined(self, event: e.EnvironmentQuarantined) -> None:
        self._live.pop(event.environment_id, None)
        self.quarantines.add()

    def _finished(self, event: e.CommandFinished) -> None:
        killed_by = BY_ITSELF if event.killed_by is None else event.killed_by.value
        self.commands.add(self._mechanism, killed_by)
        self.execute.observe(event.duration_ms / 1000, self._mechanism)

    def _connected(
        self, event: egress.EgressAllowed | egress.EgressFailed, outcome: str, reason: str
    ) -> None:
        self.connections.add(self._mechanism, outcome, reason)
        self.egress_decision.observe(event.decided_us / 1_000_000)

    def _egress_refused(self, event: egress.EgressRefused) -> None:
        self.connections.add(self._mechanism, "refused", event.reason)
        self.egress_decision.observe(event.decided_us / 1_000_000)
        self._deny(event, event.violation)

    def _refusals_counted(self, event: egress.EgressRefusalsCounted) -> None:
        for each in event.counts:
            reason, _, count = each.rpartition("=")
            self.connections.add(self._mechanism, "refused", reason, by=int(count))
        self._deny(event, event.violation, count=event.total)

    def _tunnel_closed(self, event: egress.EgressTunnelClosed) -> None:
        self.tunnels_closed.add(event.end)
        self.proxy_bytes.add("up", by=event.up_bytes)
        self.proxy_bytes.add("down", by=event.down_bytes)

    def _bridge_refused(self, event: BridgeRefused) -> None:
        live = self._live.get(event.environment_id)
        if live is not None:
            live.bridge_refusals += 1
        self._deny(event, event.violation)

    def _bridge_closed(self, event: BridgeClosed) -> None:
        """The refusals that had no event of their own."""
        live = self._live.get(event.environment_id)
        more = event.refused - (0 if live is None else live.bridge_refusals)
        if more > 0:
            self._deny(event, ViolationCode.BRIDGE_DENIED, count=more)

    def _denied_request(self, event: e.RequestRejected | e.PathDenied) -> None:
        self._deny(event, event.violation)

    def _happened(self, what: Happening, which: str = "") -> None:
        self._recent.add((what, which), self._now())

    def _deny(
        self,
        event: e.EnvironmentEvent | e.RequestEvent,
        violation: ViolationCode,
        *,
        count: int = 1,
    ) -> None:
        self.denials.note(event.tenant_id, violation, self._now(), count=count)
        live = None if event.environment_id is None else self._live.get(event.environment_id)
        if live is not None:
            live.denials += count
