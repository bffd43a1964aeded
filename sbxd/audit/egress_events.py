"""What the egress proxy decided, as events: the one answer to "what did that run talk to".

Invariants: as `sbxd.audit.events`; every connection of a sandbox that asked the proxy for something
is in exactly one of `EgressAllowed`, `EgressRefused`, `EgressFailed`, or one count of an
`EgressRefusalsCounted`; a tunnel's end has the number of its connection. A host is what a strict
grammar let through, or an escaped line; no byte that went through a tunnel is kept.
"""

from typing import ClassVar

from sbxd.audit.events import AuditEvent, EnvironmentEvent, Priority
from sbxd.policy.violations import ViolationCode


class EgressAllowed(EnvironmentEvent, frozen=True, kw_only=True):
    """A tunnel was opened. address: the connected one. rule: the destination that covers it.
    decided_us: from the end of the request to here, resolution and dial included."""

    MESSAGE_ID: ClassVar[str] = "0086aa261a7a4b2797afa47db2048092"
    SUMMARY: ClassVar[str] = (
        "Connection {connection} of command {command_number} to {host}:{port} ({address}) "
        "allowed by {rule}"
    )

    command_number: int
    connection: int
    host: str
    port: int
    address: str
    rule: str | None
    decided_us: int


class EgressRefused(EnvironmentEvent, frozen=True, kw_only=True):
    """A rule refused a connection. host, port: absent when the request was not read that far.
    address: the refused one, where an address was the reason; the connected one, where a tunnel was
    refused for its first bytes. reason: `sbxd.policy.egress` and `sbxd.egress.decisions` list
    them."""

    MESSAGE_ID: ClassVar[str] = "6c242bc6a00c4e849d9180a395376c23"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = (
        "Connection {connection} of command {command_number} to {host}:{port} refused: {reason}"
    )

    command_number: int
    connection: int
    host: str | None
    port: int | None
    address: str | None
    reason: str
    rule: str | None
    decided_us: int
    violation: ViolationCode = ViolationCode.EGRESS_DENIED


class EgressFailed(EnvironmentEvent, frozen=True, kw_only=True):
    """Every rule allowed a connection, and the destination was not reached. addresses: what its
    name stood for, judged and allowed; they were dialled in this order, up to address, the last.
    Both are absent where the name could not be resolved."""

    MESSAGE_ID: ClassVar[str] = "43d0393635744777944462175be34123"
    SUMMARY: ClassVar[str] = (
        "Connection {connection} of command {command_number} to {host}:{port} ({address}) failed: "
        "{reason}"
    )

    command_number: int
    connection: int
    host: str | None
    port: int | None
    address: str | None
    reason: str
    rule: str | None
    decided_us: int
    addresses: tuple[str, ...] = ()


class EgressTunnelClosed(EnvironmentEvent, frozen=True, kw_only=True):
    """The end of a tunnel. up_bytes: from the sandbox. down_bytes: to it. end: what ended it
    (`sbxd.egress.decisions.TunnelEnd`)."""

    MESSAGE_ID: ClassVar[str] = "c319041341e54e4a86abaa5dcc41019c"
    SUMMARY: ClassVar[str] = (
        "Connection {connection} of command {command_number} to {host}:{port} closed: {end}, "
        "{up_bytes} bytes up, {down_bytes} down"
    )

    command_number: int
    connection: int
    host: str
    port: int
    address: str
    up_bytes: int
    down_bytes: int
    duration_ms: int
    end: str


class EgressRefusalsCounted(EnvironmentEvent, frozen=True, kw_only=True):
    """Refusals beyond the rate at which they are recorded one by one. counts: "reason=number"."""

    MESSAGE_ID: ClassVar[str] = "f28fcdcd88494c70bc81ebb1723c0a6b"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = (
        "{total} more connections of command {command_number} refused: {counts}"
    )

    command_number: int
    total: int
    counts: tuple[str, ...]
    violation: ViolationCode = ViolationCode.EGRESS_DENIED


EGRESS_EVENT_TYPES: tuple[type[AuditEvent], ...] = (
    EgressAllowed,
    EgressRefused,
    EgressFailed,
    EgressTunnelClosed,
    EgressRefusalsCounted,
)
