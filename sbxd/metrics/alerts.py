"""What is wrong now, judged by the daemon itself: for `sbxctl status`, where nobody has Prometheus.

Invariants: pure; every alert here has the name of a rule of docs/monitoring/sbxd.rules.yml that
speaks of the same, and the thresholds are these constants in both (a test holds that). A rule may
look further back than this does; what only a rule can see (the daemon is down, the textfile is
old) is not here.
"""

from collections.abc import Mapping, Sequence

from sbxd.metrics.denials import NOBODY
from sbxd.metrics.derived import Happening
from sbxd.metrics.families import OTHERS
from sbxd.metrics.readings import Reading, Store
from sbxd.metrics.recent import RECENT_SECONDS
from sbxd.policy.violations import ViolationCode
from sbxd.wire.observing import AlertInfo, Severity

# Of one tenant within RECENT_SECONDS.
DENIALS_OF_TENANT = 50
# Hand-outs within RECENT_SECONDS that the pool had nothing for, and their share of all.
POOL_MISSES = 5
POOL_MISS_SHARE = 0.5
LAG_SECONDS = 0.25
STORE_FREE_SHARE = 0.1

_MINUTES = f"{RECENT_SECONDS / 60:g} minutes"


def standing(
    reading: Reading,
    recent: Mapping[tuple[Happening, str], int],
    denials: Mapping[tuple[str, ViolationCode], int],
    *,
    lag_worst_seconds: float,
) -> tuple[AlertInfo, ...]:
    """Everything that is wrong, most severe first."""
    found = [
        *_escapes(recent),
        *_quarantine(reading),
        *_audit(reading, recent),
        *_journal(recent),
        *_denials(denials),
        *_authorities(recent),
        *_pool(reading, recent),
        *_lag(lag_worst_seconds),
        *_store(reading.store),
    ]
    return tuple(sorted(found, key=lambda each: each.severity is not Severity.PAGE))


def _escapes(recent: Mapping[tuple[Happening, str], int]) -> Sequence[AlertInfo]:
    codes = [code for what, code in recent if what is Happening.ESCAPE_SUSPECTED]
    return [
        AlertInfo(
            name="SbxdEscapeSuspected",
            severity=Severity.PAGE,
            detail=f"an escape is suspected: {code}",
            fix="journalctl SBX_EVENT=SandboxEscapeWasSuspected; run nothing untrusted until then",
        )
        for code in codes
    ]


def _quarantine(reading: Reading) -> Sequence[AlertInfo]:
    if not reading.quarantined:
        return []
    return [
        AlertInfo(
            name="SbxdQuarantineNotEmpty",
            severity=Severity.PAGE,
            detail=f"not proven stopped: {', '.join(reading.quarantined[:8])}",
            fix="sbxctl quarantine ls; find out why, then sbxctl quarantine clear",
        )
    ]


def _audit(reading: Reading, recent: Mapping[tuple[Happening, str], int]) -> Sequence[AlertInfo]:
    unrecorded, waiting = recent.get((Happening.UNRECORDED, ""), 0), reading.backlog.waiting
    if not unrecorded and not waiting:
        return []
    return [
        AlertInfo(
            name="SbxdAuditNotRecording",
            severity=Severity.PAGE,
            detail=f"the journal did not take {unrecorded} records within the last {_MINUTES}; "
            f"{waiting} wait",
            fix="systemctl status systemd-journald; df of its storage; new work is refused so long",
        )
    ]


def _journal(recent: Mapping[tuple[Happening, str], int]) -> Sequence[AlertInfo]:
    refused = recent.get((Happening.JOURNAL_REFUSED, ""), 0)
    if not refused:
        return []
    return [
        AlertInfo(
            name="SbxdCreationJournalRefuses",
            severity=Severity.PAGE,
            detail=f"the creation journal took no record, {refused} times: nothing new is built",
            fix="df of the state directory; journalctl SBX_EVENT=JournalWriteFailed",
        )
    ]


def _denials(denials: Mapping[tuple[str, ViolationCode], int]) -> Sequence[AlertInfo]:
    of_tenant: dict[str, int] = {}
    for (tenant, _violation), count in denials.items():
        of_tenant[tenant] = of_tenant.get(tenant, 0) + count
    return [
        AlertInfo(
            name="SbxdDenialSpike",
            severity=Severity.PAGE,
            detail=f"tenant {tenant}: {count} denials within the last {_MINUTES}, most of them "
            f"{_kind_of(tenant, denials)}",
            fix=_search(tenant, _kind_of(tenant, denials)),
        )
        for tenant, count in of_tenant.items()
        if count >= DENIALS_OF_TENANT
    ]


def _kind_of(tenant: str, denials: Mapping[tuple[str, ViolationCode], int]) -> ViolationCode:
    own = {violation: count for (each, violation), count in denials.items() if each == tenant}
    return max(own, key=lambda violation: own[violation])


def _search(tenant: str, violation: ViolationCode) -> str:
    of_tenant = "" if tenant in (OTHERS, NOBODY) else f" SBX_TENANT_ID={tenant}"
    return f"journalctl SBX_VIOLATION={violation}{of_tenant}"


def _authorities(recent: Mapping[tuple[Happening, str], int]) -> Sequence[AlertInfo]:
    return [
        AlertInfo(
            name="SbxdLeaseAuthorityUnreachable",
            severity=Severity.WARNING,
            detail=f"the lease authority {name} did not answer, {count} times within the last "
            f"{_MINUTES}",
            fix="is `sbxd-worker leases` of that tier running? See docs/leases.md",
        )
        for (what, name), count in recent.items()
        if what is Happening.AUTHORITY_MISSED
    ]


def _pool(reading: Reading, recent: Mapping[tuple[Happening, str], int]) -> Sequence[AlertInfo]:
    misses = recent.get((Happening.POOL_MISS, ""), 0)
    hits = recent.get((Happening.POOL_HIT, ""), 0)
    if not reading.census.pool.target or misses < POOL_MISSES:
        return []
    if misses < POOL_MISS_SHARE * (hits + misses):
        return []
    return [
        AlertInfo(
            name="SbxdPoolMisses",
            severity=Severity.WARNING,
            detail=f"{misses} of {hits + misses} environments had to be built while their "
            f"callers waited, within the last {_MINUTES}",
            fix="raise reserve.slots, or ask for the default image and limits",
        )
    ]


def _lag(lag_worst_seconds: float) -> Sequence[AlertInfo]:
    if lag_worst_seconds < LAG_SECONDS:
        return []
    return [
        AlertInfo(
            name="SbxdEventLoopLag",
            severity=Severity.WARNING,
            detail=f"the event loop was {lag_worst_seconds * 1000:.0f} ms late within the last "
            "minute",
            fix="is the host out of processors? See `sbxctl top` and the CPUWeight of sbxd.service",
        )
    ]


def _store(store: Store | None) -> Sequence[AlertInfo]:
    if store is None:
        return []
    short = []
    if store.free_bytes < STORE_FREE_SHARE * store.size_bytes:
        short.append(f"{store.free_bytes >> 20} MiB of {store.size_bytes >> 20}")
    if store.free_inodes < STORE_FREE_SHARE * store.size_inodes:
        short.append(f"{store.free_inodes} of {store.size_inodes} inodes")
    return [
        AlertInfo(
            name="SbxdStorePressure",
            severity=Severity.WARNING,
            detail=f"left for images and workspaces: {', '.join(short)}",
            fix="sbxctl image prune, or a larger file system for the state directory",
        )
        for _ in short[:1]
    ]
