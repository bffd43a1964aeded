"""Every type of event there is: what the catalog, the documentation and the tests go by."""

from sbxd.audit.egress_events import EGRESS_EVENT_TYPES
from sbxd.audit.events import EVENT_TYPES, AuditEvent

ALL_EVENT_TYPES: tuple[type[AuditEvent], ...] = (*EVENT_TYPES, *EGRESS_EVENT_TYPES)
