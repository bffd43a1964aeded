"""Every type of event that the daemon may emit, from wherever it is defined."""

from sbxd.audit.events import EVENT_TYPES as _EVENT_TYPES
from sbxd.audit.events import AuditEvent
from sbxd.audit.lease_events import LEASE_EVENT_TYPES

EVENT_TYPES: tuple[type[AuditEvent], ...] = (*_EVENT_TYPES, *LEASE_EVENT_TYPES)
