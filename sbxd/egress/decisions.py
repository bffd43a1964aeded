"""What the proxy decided, as data: for the audit, and for whatever is counted from it.

Invariants: every connection that asked for something gives exactly one `Decision`, or one count of
a `DenialsCounted`; a decision ALLOWED is followed by exactly one `TunnelClosed` with the same
number. Nothing here holds a byte that went through a tunnel.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum

from msgspec import Struct

from sbxd.policy.egress import EgressRefusal


class Outcome(StrEnum):
    """ALLOWED: a tunnel. REFUSED: by a rule. FAILED: allowed by every rule, and not reached."""

    ALLOWED = "ALLOWED"
    REFUSED = "REFUSED"
    FAILED = "FAILED"


class ProxyReason(StrEnum):
    """Why the proxy itself made no tunnel; none is also a reason of the policy (EgressRefusal)."""

    MALFORMED = "malformed"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    HEAD_TOO_LARGE = "head_too_large"
    HEAD_TOO_LATE = "head_too_late"
    TOO_MANY_TUNNELS = "too_many_tunnels"
    BUDGET_EXHAUSTED = "budget_exhausted"
    DIAL_FAILED = "dial_failed"
    DIAL_TOO_LATE = "dial_too_late"
    PEER_MISMATCH = "peer_mismatch"
    SNI_ABSENT = "sni_absent"
    SNI_MISMATCH = "sni_mismatch"


Reason = ProxyReason | EgressRefusal


class TunnelEnd(StrEnum):
    """What ended a tunnel.

    FINISHED: both sides sent their end. CLIENT_FAILED, SERVER_FAILED: that side's connection
    broke. IDLE: no byte either way for the idle time. SNI_REFUSED: the first bytes were not a
    ClientHello for the requested name. STOPPED: the proxy stopped listening (the command or the
    environment ended).
    """

    FINISHED = "FINISHED"
    CLIENT_FAILED = "CLIENT_FAILED"
    SERVER_FAILED = "SERVER_FAILED"
    IDLE = "IDLE"
    SNI_REFUSED = "SNI_REFUSED"
    STOPPED = "STOPPED"


class Decision(Struct, frozen=True, kw_only=True):
    """One answer to one connection.

    connection: its number, from 1, within one proxy. host, port: None when the request was not
    read that far; canonical. address: the connected one for ALLOWED, the refused one where an
    address was the reason, the last one dialled where a dial failed, else None. addresses: those
    that were judged and allowed, in the order of the dials, where none could be used. reason: None
    exactly for ALLOWED. rule: the destination of the policy that covered the request, where one
    did. decided_us: microseconds from the end of the head to this decision, resolution and dial
    included.
    """

    connection: int
    outcome: Outcome
    host: str | None
    port: int | None
    address: str | None
    reason: Reason | None
    rule: str | None
    decided_us: int
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.reason is None) is not (self.outcome is Outcome.ALLOWED):
            raise ValueError("a reason is given exactly when there is no tunnel")


class TunnelClosed(Struct, frozen=True, kw_only=True):
    """The end of one tunnel. up_bytes: to the server. down_bytes: to the sandbox."""

    connection: int
    host: str
    port: int
    address: str
    up_bytes: int
    down_bytes: int
    duration_ms: int
    end: TunnelEnd


class DenialsCounted(Struct, frozen=True, kw_only=True):
    """Denials beyond the rate, by reason, that no Decision was made for. Each is in one count."""

    counts: tuple[tuple[Reason, int], ...]

    @property
    def total(self) -> int:
        """How many denials these are."""
        return sum(count for _, count in self.counts)


Record = Decision | TunnelClosed | DenialsCounted
Recorder = Callable[[Record], Awaitable[None]]


class RecordUnavailable(Exception):
    """A record cannot be kept. A `Recorder` raises it; nothing that needs the record goes on."""


class EgressCounts:
    """Counters that are derived from the records, and from nothing else.

    A daemon has one for all its environments; `observe` is called for each record that was kept.
    """

    def __init__(self) -> None:
        self.allowed = 0
        self.up_bytes = 0
        self.down_bytes = 0
        self.refusals: Counter[Reason] = Counter()  # by reason; REFUSED and FAILED
        self.ends: Counter[TunnelEnd] = Counter()

    def observe(self, record: Record) -> None:
        """Count one record."""
        match record:
            case Decision():
                if record.reason is None:
                    self.allowed += 1
                else:
                    self.refusals[record.reason] += 1
            case TunnelClosed():
                self.ends[record.end] += 1
                self.up_bytes += record.up_bytes
                self.down_bytes += record.down_bytes
            case DenialsCounted():
                self.refusals.update(dict(record.counts))
