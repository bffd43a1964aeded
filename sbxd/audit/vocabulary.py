"""Every type of event that the daemon records, from the modules that define them."""

from sbxd.audit import events
from sbxd.audit.bridge_events import BRIDGE_EVENT_TYPES
from sbxd.audit.confinement import ConfinementMismatched, MissingLayerAccepted
from sbxd.audit.counted_events import COUNTED_EVENT_TYPES
from sbxd.audit.egress_events import EGRESS_EVENT_TYPES
from sbxd.audit.events import AuditEvent
from sbxd.audit.lease_events import LEASE_EVENT_TYPES
from sbxd.audit.losses import EnvironmentLost
from sbxd.audit.stream_events import STREAM_EVENT_TYPES

EVENT_TYPES: tuple[type[AuditEvent], ...] = (
    *events.EVENT_TYPES,
    *BRIDGE_EVENT_TYPES,
    *EGRESS_EVENT_TYPES,
    ConfinementMismatched,
    MissingLayerAccepted,
    EnvironmentLost,
    *LEASE_EVENT_TYPES,
    *STREAM_EVENT_TYPES,
    *COUNTED_EVENT_TYPES,
)
