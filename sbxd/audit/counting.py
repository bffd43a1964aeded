"""What is counted instead of being recorded one by one, so that nobody can fill the journal. Pure.

Invariants: each refusal is recorded by itself or is in exactly one count, by uid and reason; each
workspace operation is in exactly one count of its environment. What is kept here is bounded: uids
by `sbxd.policy.by_uid`, environments by `ENVIRONMENTS_MAX`, reasons by closed sets. Times are
given, in seconds, never going back.

Deliberately absent: recording (`sbxd.metrics.sink`), and making a peer wait
(`sbxd.service.session`).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from sbxd.audit.counted_events import RefusalsCounted, WorkspaceUsed, WorkspaceUsesCounted
from sbxd.audit.events import (
    AuditEvent,
    PathDenied,
    PeerRefused,
    RequestEvent,
    RequestRejected,
    RequestUnserved,
)
from sbxd.audit.lease_events import JournalWriteFailed
from sbxd.policy.by_uid import ByUid
from sbxd.policy.denials import Bucket
from sbxd.port.errors import UnavailableCode
from sbxd.port.ids import EnvironmentId

# Refusals of one uid and type that are recorded one by one: so many at once, and so many in each
# `RECORDED_SECONDS` from then on.
RECORDED_MAX = 200
RECORDED_SECONDS = 1200.0
# Refusals of one uid that cost it nothing: so many at once, and so many in each `FREE_SECONDS`.
FREE_MAX = 100
FREE_SECONDS = 10.0
# How often counts are recorded.
WINDOW_SECONDS = 60.0
# Environments whose counts are kept at once; more than a host has.
ENVIRONMENTS_MAX = 4096

Refusal = PeerRefused | RequestEvent | JournalWriteFailed


def as_refusal(event: AuditEvent) -> Refusal | None:
    """The event, if a peer can cause any number of its kind; None for any other.

    What the absence of the journal itself refuses is none: it is counted with that
    (`sbxd.audit.outage`).
    """
    if isinstance(event, RequestUnserved) and event.code is UnavailableCode.AUDIT_UNAVAILABLE:
        return None
    if isinstance(event, PeerRefused | RequestEvent | JournalWriteFailed):
        return event
    return None


def _reason(event: Refusal) -> str:
    name = type(event).__name__
    match event:
        case PeerRefused():
            return f"{name}.{event.reason.value}"
        case RequestRejected() | RequestUnserved():
            return f"{name}.{event.code.value}"
        case PathDenied():
            return f"{name}.{event.violation.value}"
        case _:
            return name


class Refusals:
    """The refusals of every uid, within one run of the daemon."""

    def __init__(self) -> None:
        self._uids = ByUid(_OfUid)

    def take(self, event: Refusal, now: float) -> bool:
        """Whether this one is recorded by itself. If not, `count` it."""
        return self._of(event, now).take(event, now)

    def count(self, event: Refusal, now: float) -> None:
        """One that is not recorded."""
        self._of(event, now).count(event, now)

    def is_beyond(self, uid: int, now: float) -> bool:
        """Whether refusals of this uid come so fast that each is to cost it time."""
        known = self._uids.known(uid)
        return known is not None and known.free.is_empty(now)

    def counted(self, now: float) -> Iterator[RefusalsCounted]:
        """Everything counted so far. `put_back` what could not be recorded."""
        for uid, of in self._uids.items():
            counts = of.free.take_counts()
            if counts:
                yield RefusalsCounted(
                    peer_uid=uid,
                    total=sum(number for _, number in counts),
                    counts=tuple(f"{reason}={number}" for reason, number in counts),
                    over_ms=round((now - of.since) * 1000),
                )
            of.has_counts = False

    def put_back(self, event: RefusalsCounted, now: float) -> None:
        """These were not recorded."""
        of = self._uids.of(event.peer_uid, now)
        of.since, of.has_counts = now - event.over_ms / 1000, True
        split = (each.rpartition("=") for each in event.counts)
        of.free.put_counts_back((reason, int(number)) for reason, _, number in split)

    def _of(self, event: Refusal, now: float) -> "_OfUid":
        uid = None if isinstance(event, JournalWriteFailed) else event.peer_uid
        return self._uids.of(uid, now)


class _OfUid:
    """Those of one uid. since: of the first that is counted."""

    def __init__(self, now: float) -> None:
        self.free: Bucket[str] = Bucket(most=FREE_MAX, now=now, seconds=FREE_SECONDS)
        self.since = now
        self.has_counts = False
        self._recorded: dict[type[AuditEvent], Bucket[str]] = {}

    def take(self, event: Refusal, now: float) -> bool:
        self.free.take(now)
        recorded = self._recorded.get(type(event))
        if recorded is None:
            recorded = Bucket(most=RECORDED_MAX, now=now, seconds=RECORDED_SECONDS)
            self._recorded[type(event)] = recorded
        return recorded.take(now)

    def count(self, event: Refusal, now: float) -> None:
        if not self.has_counts:
            self.since, self.has_counts = now, True
        self.free.count(_reason(event))

    def is_idle(self, now: float) -> bool:
        return self.free.is_idle(now) and all(e.is_idle(now) for e in self._recorded.values())


class WorkspaceUses:
    """The workspace operations of every environment."""

    def __init__(self) -> None:
        self._of: OrderedDict[EnvironmentId, _Uses] = OrderedDict()

    def take(self, event: WorkspaceUsed) -> bool:
        """Count one, and say whether it is the first of its kind, which is recorded by itself."""
        kind = event.verb if event.code is None else f"{event.verb}.{event.code.value}"
        uses = self._of.setdefault(event.environment_id, _Uses(event))
        uses.counts[kind] += 1
        return uses.counts[kind] == 1

    def overflow(self) -> WorkspaceUsesCounted | None:
        """The counts of the oldest environment, where there are more than are kept."""
        if len(self._of) <= ENVIRONMENTS_MAX:
            return None
        return self.of_environment(next(iter(self._of)))

    def of_environment(self, environment_id: EnvironmentId) -> WorkspaceUsesCounted | None:
        """The counts of one, which are not kept any more; None where it has none."""
        uses = self._of.pop(environment_id, None)
        return None if uses is None else uses.event()

    def environments(self) -> list[EnvironmentId]:
        """Those that have counts."""
        return list(self._of)

    def put_back(self, event: WorkspaceUsesCounted) -> None:
        """These were not recorded."""
        uses = self._of.setdefault(event.environment_id, _Uses(event))
        for each in event.counts:
            kind, _, number = each.rpartition("=")
            uses.counts[kind] += int(number)


class _Uses:
    """Those of one environment."""

    def __init__(self, whose: WorkspaceUsed | WorkspaceUsesCounted) -> None:
        self._whose = whose
        self.counts: Counter[str] = Counter()

    def event(self) -> WorkspaceUsesCounted:
        return WorkspaceUsesCounted(
            environment_id=self._whose.environment_id,
            tenant_id=self._whose.tenant_id,
            run_id=self._whose.run_id,
            lease_epoch=self._whose.lease_epoch,
            total=self.counts.total(),
            counts=tuple(f"{kind}={number}" for kind, number in sorted(self.counts.items())),
        )
