"""What becomes of an event while the journal takes none, by its type.

Invariant: what has happened is recorded in the spool; what has not happened yet does not happen.
A flood of refusals cannot keep the end of a sandbox from being recorded: the last part of the
spool is not theirs.
"""

from enum import StrEnum
from typing import assert_never

from sbxd.audit.bridge_events import BridgeRefused
from sbxd.audit.counted_events import WorkspaceUsed
from sbxd.audit.egress_events import (
    EgressAllowed,
    EgressFailed,
    EgressRefusalsCounted,
    EgressRefused,
    EgressTunnelClosed,
)
from sbxd.audit.events import (
    AuditEvent,
    CommandStarted,
    EnvironmentProvisioned,
    PeerRefused,
    RequestEvent,
    RequestUnserved,
)
from sbxd.port.errors import UnavailableCode

# Events that a peer or a workload can cause at will.
_MANY: tuple[type[AuditEvent], ...] = (
    BridgeRefused,
    EgressAllowed,
    EgressFailed,
    EgressRefusalsCounted,
    EgressRefused,
    EgressTunnelClosed,
    PeerRefused,
    RequestEvent,
    WorkspaceUsed,
)
_SHARE_OF_MANY = 0.75


class Fate(StrEnum):
    """KEPT: spooled. KEPT_AND_ENDED: spooled, and its emitter is told to end what has begun.
    REFUSED: not recorded, and its emitter is told that it must not happen. COUNTED: one of the
    refusals that the outage itself causes; their number is recorded at its end."""

    KEPT = "KEPT"
    KEPT_AND_ENDED = "KEPT_AND_ENDED"
    REFUSED = "REFUSED"
    COUNTED = "COUNTED"


def fate_of(event: AuditEvent) -> Fate:
    match event:
        case EnvironmentProvisioned():
            return Fate.REFUSED
        case CommandStarted():
            return Fate.KEPT_AND_ENDED
        case RequestUnserved(code=UnavailableCode.AUDIT_UNAVAILABLE):
            return Fate.COUNTED
        case _:
            return Fate.KEPT


def room_for(event: AuditEvent, bytes_max: int) -> int:
    """How large the spool may become with this event."""
    return round(bytes_max * _SHARE_OF_MANY) if isinstance(event, _MANY) else bytes_max


def is_recorded(fate: Fate) -> bool:
    """Whether the event goes to the spool."""
    match fate:
        case Fate.KEPT | Fate.KEPT_AND_ENDED:
            return True
        case Fate.REFUSED | Fate.COUNTED:
            return False
        case _:
            assert_never(fate)
