"""What bounds how often each type of event is recorded.

Invariant: every type has a bound that neither a peer nor a workload can pass, so that nobody can
fill the journal with records of one kind. A test holds that a new type is put here.
"""

from collections.abc import Mapping
from enum import StrEnum

from sbxd.audit import bridge_events as bridge
from sbxd.audit import confinement, counted_events
from sbxd.audit import egress_events as egress
from sbxd.audit import events as e
from sbxd.audit import lease_events as lease
from sbxd.audit import stream_events as stream
from sbxd.audit.losses import EnvironmentLost


class Bound(StrEnum):
    """START: a few for each start of the daemon, whose restarts systemd limits. WINDOW: the first
    of a uid in each window; the others are counted (`sbxd.audit.counting`). ENVIRONMENT: a few for
    each environment that was built, and building is what the launcher has time for. OPERATION:
    charged to the budget of operations of an environment. TURN: a few for each command with the
    bridge. PACE: as fast as the egress proxy refuses, which it does by a rate; the others are
    counted. OPERATOR: each is one request on the admin socket, and was served. REAPER: one for each
    pass of the reaper. OUTAGE: one for each absence of the journal."""

    START = "START"
    WINDOW = "WINDOW"
    ENVIRONMENT = "ENVIRONMENT"
    OPERATION = "OPERATION"
    TURN = "TURN"
    PACE = "PACE"
    OPERATOR = "OPERATOR"
    REAPER = "REAPER"
    OUTAGE = "OUTAGE"


BOUNDS: Mapping[type[e.AuditEvent], Bound] = {
    e.ServiceStarted: Bound.START,
    e.ServiceStopped: Bound.START,
    e.StartupRefused: Bound.START,
    e.LimitUnenforced: Bound.START,
    e.PeerRefused: Bound.WINDOW,
    e.RequestRejected: Bound.WINDOW,
    e.PathDenied: Bound.WINDOW,
    e.RequestUnserved: Bound.WINDOW,
    e.EnvironmentProvisioned: Bound.ENVIRONMENT,
    e.EnvironmentDestroyed: Bound.ENVIRONMENT,
    e.EnvironmentExpired: Bound.ENVIRONMENT,
    e.BudgetWasExhausted: Bound.ENVIRONMENT,
    e.EnvironmentDestroyFailed: Bound.ENVIRONMENT,
    e.EnvironmentQuarantined: Bound.ENVIRONMENT,
    e.OrphanDestroyed: Bound.ENVIRONMENT,
    e.SlotPreparationFailed: Bound.ENVIRONMENT,
    e.SandboxEscapeWasSuspected: Bound.ENVIRONMENT,
    e.CommandStarted: Bound.OPERATION,
    e.CommandFinished: Bound.OPERATION,
    e.CommandUnfinished: Bound.OPERATION,
    e.ImageImported: Bound.OPERATOR,
    e.ImageRemoved: Bound.OPERATOR,
    e.ImageAliasResolved: Bound.START,
    e.ImageAliasUnresolved: Bound.START,
    bridge.BridgeOpened: Bound.TURN,
    bridge.BridgeRefused: Bound.TURN,
    bridge.BridgeClosed: Bound.TURN,
    egress.EgressAllowed: Bound.OPERATION,
    egress.EgressRefused: Bound.PACE,
    egress.EgressFailed: Bound.PACE,
    egress.EgressTunnelClosed: Bound.OPERATION,
    egress.EgressRefusalsCounted: Bound.PACE,
    confinement.ConfinementMismatched: Bound.ENVIRONMENT,
    confinement.MissingLayerAccepted: Bound.START,
    EnvironmentLost: Bound.ENVIRONMENT,
    lease.StaleLeaseEnded: Bound.ENVIRONMENT,
    lease.LeaseAuthorityMissed: Bound.REAPER,
    lease.JournalWriteFailed: Bound.WINDOW,
    lease.QuarantineCleared: Bound.OPERATOR,
    lease.QuarantineReleased: Bound.ENVIRONMENT,
    stream.AuditOpened: Bound.START,
    stream.AuditRecovered: Bound.OUTAGE,
    counted_events.RefusalsCounted: Bound.WINDOW,
    counted_events.WorkspaceUsed: Bound.ENVIRONMENT,
    counted_events.WorkspaceUsesCounted: Bound.ENVIRONMENT,
}
