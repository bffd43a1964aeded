"""The proxy's records as audit events of one command.

Invariant: total; each record is one event, and what it does not hold is not added.
"""

from typing import TypedDict

from sbxd.audit.egress_events import (
    EgressAllowed,
    EgressFailed,
    EgressRefusalsCounted,
    EgressRefused,
    EgressTunnelClosed,
)
from sbxd.audit.events import AuditEvent
from sbxd.egress.decisions import Decision, DenialsCounted, Outcome, Record, TunnelClosed
from sbxd.port.ids import EnvironmentId, RunId, TenantId


class Origin(TypedDict):
    """Whose connections these are."""

    environment_id: EnvironmentId
    tenant_id: TenantId
    run_id: RunId
    lease_epoch: int
    command_number: int


def event_of(record: Record, origin: Origin) -> AuditEvent:
    """The event of one record."""
    match record:
        case Decision(outcome=Outcome.ALLOWED):
            assert record.host is not None
            assert record.port is not None
            assert record.address is not None
            return EgressAllowed(
                **origin,
                connection=record.connection,
                host=record.host,
                port=record.port,
                address=record.address,
                rule=record.rule,
                decided_us=record.decided_us,
            )
        case Decision():
            assert record.reason is not None
            kind = EgressRefused if record.outcome is Outcome.REFUSED else EgressFailed
            return kind(
                **origin,
                connection=record.connection,
                host=record.host,
                port=record.port,
                address=record.address,
                reason=record.reason,
                rule=record.rule,
                decided_us=record.decided_us,
            )
        case TunnelClosed():
            return EgressTunnelClosed(
                **origin,
                connection=record.connection,
                host=record.host,
                port=record.port,
                address=record.address,
                up_bytes=record.up_bytes,
                down_bytes=record.down_bytes,
                duration_ms=record.duration_ms,
                end=record.end.value,
            )
        case DenialsCounted():
            return EgressRefusalsCounted(
                **origin,
                total=record.total,
                counts=tuple(f"{reason}={count}" for reason, count in record.counts),
            )
