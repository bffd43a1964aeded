"""Each event is counted once, by what it says; nothing else counts."""

import time
from datetime import UTC, datetime
from typing import Any, get_type_hints

import pytest

from sbxd.audit import egress_events as egress
from sbxd.audit import events as e
from sbxd.audit import lease_events as lease
from sbxd.audit.bridge_events import BridgeClosed, BridgeRefused
from sbxd.audit.counted_events import RefusalsCounted
from sbxd.audit.events import AuditEvent
from sbxd.audit.sink import AuditUnavailable, MemorySink
from sbxd.audit.vocabulary import EVENT_TYPES
from sbxd.egress.decisions import TunnelEnd
from sbxd.metrics.derived import TUNNEL_ENDS, DerivedMetrics, Happening
from sbxd.metrics.exposition import render
from sbxd.metrics.families import OTHERS, Counter, Histogram
from sbxd.metrics.sink import CountedSink
from sbxd.policy.bridge import BridgeCounts, Refusal
from sbxd.policy.violations import ViolationCode
from sbxd.port.command import KillReason
from sbxd.port.egress import EgressMode
from sbxd.port.errors import RejectedCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.settings import DEFAULT_LIMITS
from sbxd.wire.messages import FRAME_BYTES_MAX
from sbxd.wire.observing import MetricsForm

ID = EnvironmentId("a" * 32)
WHO: dict[str, Any] = {
    "environment_id": ID,
    "tenant_id": TenantId("tenant"),
    "run_id": RunId("run"),
    "lease_epoch": 1,
}
COUNTS = BridgeCounts()


def provisioned(origin: e.SlotOrigin = e.SlotOrigin.RESERVE) -> e.EnvironmentProvisioned:
    return e.EnvironmentProvisioned(
        **WHO,
        mechanism="gvisor",
        image_digest="sha256:" + "0" * 64,
        limits=DEFAULT_LIMITS,
        egress_mode=EgressMode.DENY,
        egress_destinations=(),
        origin=origin,
        duration_ms=12,
        expires_at=datetime(2030, 1, 1, tzinfo=UTC),
        owner_uid=1,
    )


def destroyed(reason: e.DestroyReason = e.DestroyReason.REQUESTED) -> e.EnvironmentDestroyed:
    return e.EnvironmentDestroyed(
        **WHO,
        reason=reason,
        commands_run=1,
        lifetime_ms=8000,
        executing_ms=2000,
        destroying_ms=40,
    )


def finished(killed_by: KillReason | None) -> e.CommandFinished:
    return e.CommandFinished(
        **WHO,
        command_number=1,
        exit_code=0 if killed_by is None else None,
        signal=None,
        killed_by=killed_by,
        duration_ms=200,
        stdout_bytes=0,
        stdout_sha256="",
        stdout_truncated=False,
        stderr_bytes=0,
        stderr_sha256="",
        stderr_truncated=False,
        files_changed=0,
        files_changed_truncated=False,
    )


def refused(reason: str = "host_not_listed") -> egress.EgressRefused:
    return egress.EgressRefused(
        **WHO,
        command_number=1,
        connection=1,
        host="h",
        port=1,
        address=None,
        reason=reason,
        rule=None,
        decided_us=500,
    )


def rejected(tenant: str | None = "tenant") -> e.RequestRejected:
    return e.RequestRejected(
        verb="execute",
        code=RejectedCode.INVALID_COMMAND,
        violation=ViolationCode.COMMAND_DENIED,
        detail="",
        peer_uid=1,
        environment_id=ID,
        tenant_id=None if tenant is None else TenantId(tenant),
    )


@pytest.fixture
def derived() -> DerivedMetrics:
    return DerivedMetrics("gvisor", lambda: 0.0)


def test_s1s_metrics_carry_the_mechanism(derived: DerivedMetrics) -> None:
    derived.observe(provisioned())
    derived.observe(provisioned(e.SlotOrigin.COLD))
    derived.observe(finished(KillReason.MEMORY))
    derived.observe(finished(None))
    derived.observe(refused())
    derived.observe(destroyed(e.DestroyReason.PEER_GONE))
    derived.observe(e.OrphanDestroyed(environment_id=ID, kinds=("scope",)))
    assert derived.provision.count("gvisor", "RESERVE") == 1
    assert derived.provision.quantile(0.5) == 0.025
    assert derived.executing.value("gvisor") / derived.lifetime.value("gvisor") == 0.25
    assert derived.connections.value("gvisor", "refused", "host_not_listed") == 1
    assert derived.commands.value("gvisor", "MEMORY") == 1
    assert derived.commands.value("gvisor", "NONE") == 1
    assert derived.reaped.value("gvisor", "PEER_GONE") == 1
    assert derived.reaped.value("gvisor", "UNOWNED") == 1
    assert (derived.pool_hits.total, derived.pool_misses.total) == (1, 1)
    assert derived.destroy.count("gvisor") == 1
    assert derived.execute.count("gvisor") == 2


def test_every_kind_of_denial_counts_for_its_tenant_and_its_environment(
    derived: DerivedMetrics,
) -> None:
    derived.observe(provisioned())
    derived.observe(rejected())
    derived.observe(
        e.PathDenied(verb="read", peer_uid=1, environment_id=ID, tenant_id=TenantId("tenant"))
    )
    derived.observe(refused())
    derived.observe(
        egress.EgressRefusalsCounted(
            **WHO, command_number=1, total=7, counts=("host_not_listed=5", "malformed=2")
        )
    )
    derived.observe(BridgeRefused(**WHO, command_number=1, refusal=Refusal.NO_TOKEN))
    # Three refusals in all, of which one had an event of its own.
    derived.observe(BridgeClosed(**WHO, command_number=1, opened=False, refused=3, counts=COUNTS))
    assert derived.denials_of(ID) == 1 + 1 + 1 + 7 + 3
    assert derived.denials.total.total == 13
    assert derived.recent_denials()["tenant", ViolationCode.EGRESS_DENIED] == 8
    assert derived.connections.value("gvisor", "refused", "host_not_listed") == 6
    derived.observe(destroyed())
    assert derived.denials_of(ID) == 0, "an account of an environment that is gone"


def test_every_event_with_a_violation_is_counted_as_a_denial() -> None:
    """A new kind of denial cannot be forgotten."""
    with_violation = {kind for kind in EVENT_TYPES if "violation" in get_type_hints(kind)}
    assert with_violation
    assert with_violation <= set(DerivedMetrics("x", lambda: 0.0)._handlers)


def test_tunnels_and_bytes_come_from_their_ends(derived: DerivedMetrics) -> None:
    allowed = egress.EgressAllowed(
        **WHO,
        command_number=1,
        connection=1,
        host="h",
        port=443,
        address="203.0.113.1",
        rule="h:443",
        decided_us=900,
    )
    derived.observe(allowed)
    derived.observe(allowed)
    assert derived.tunnels_open == 2
    derived.observe(
        egress.EgressTunnelClosed(
            **WHO,
            command_number=1,
            connection=1,
            host="h",
            port=443,
            address="203.0.113.1",
            up_bytes=10,
            down_bytes=20,
            duration_ms=1,
            end="FINISHED",
        )
    )
    assert derived.tunnels_open == 1
    assert (derived.proxy_bytes.value("up"), derived.proxy_bytes.value("down")) == (10, 20)


def test_the_ends_of_tunnels_are_the_proxys() -> None:
    assert set(TUNNEL_ENDS) == {each.value for each in TunnelEnd}


def test_what_an_operator_is_told_for_some_minutes(derived: DerivedMetrics) -> None:
    derived.observe(lease.LeaseAuthorityMissed(authority="tier", environments=1, detail=""))
    derived.observe(lease.JournalWriteFailed(environment_id=ID, detail=""))
    assert derived.recent() == {
        (Happening.AUTHORITY_MISSED, "tier"): 1,
        (Happening.JOURNAL_REFUSED, ""): 1,
    }
    assert derived.authority_unreachable.value("tier") == 1


async def test_an_event_counts_once_and_only_when_it_was_recorded(
    derived: DerivedMetrics,
) -> None:
    inner = MemorySink()
    sink = CountedSink(inner, derived)
    await sink.emit(destroyed())
    inner.fail()
    for _ in range(3):
        with pytest.raises(AuditUnavailable):
            await sink.emit(destroyed())
    inner.recover()
    await sink.emit(destroyed())
    assert len(inner.events) == derived.destroyed.total == 2
    assert derived.records.value("EnvironmentDestroyed") == 2
    assert derived.unrecorded.total == 3


async def test_a_refusal_that_was_not_recorded_is_counted_and_recorded_with_its_number(
    derived: DerivedMetrics,
) -> None:
    inner = MemorySink()
    sink = CountedSink(inner, derived)
    inner.fail()
    for _ in range(3):
        await sink.emit(rejected())
    assert not await sink.settle()
    inner.recover()
    assert await sink.settle()
    (counted,) = inner.of(RefusalsCounted)
    assert counted.total == derived.denials.total.total == 3
    assert derived.records.value("RequestRejected") == 0
    assert derived.unrecorded.total == 4
    assert inner.events == [counted]


def test_every_event_type_is_counted_as_a_record(derived: DerivedMetrics) -> None:
    assert len(EVENT_TYPES) < 200, "the records by event have their bound"
    bare: list[AuditEvent] = [e.LimitUnenforced(limit="io"), rejected(), destroyed()]
    for event in bare:
        derived.observe(event)
    assert derived.records.total == len(bare)


def test_the_whole_exposition_at_its_largest_fits_a_frame() -> None:
    derived = DerivedMetrics("namespaces", lambda: 0.0)
    for number in range(400):
        tenant = f"{number:03}" + "t" * 125
        for violation in ViolationCode:
            derived.denials.note(tenant, violation, 0.0)
    for instrument in vars(derived).values():
        if isinstance(instrument, Counter | Histogram):
            for number in range(400):
                key = [f"{number:03}" + "x" * 24 for _ in instrument.labels]
                if isinstance(instrument, Counter):
                    instrument.add(*key)
                elif number < 4:  # their labels are two closed words
                    instrument.observe(1.0, *key)
    for exposition in MetricsForm:
        text = render(derived.families(), exposition)
        assert OTHERS in text
        assert len(text.encode()) < FRAME_BYTES_MAX - 100_000, exposition


def test_observing_is_cheap(derived: DerivedMetrics) -> None:
    """A bound that a busy machine keeps: what an event costs to count is far below what it costs
    to encode and send."""
    events = [provisioned(), finished(None), refused(), destroyed()]
    started = time.process_time()
    for _ in range(5000):
        for event in events:
            derived.observe(event)
    assert (time.process_time() - started) / 20_000 < 0.000_2
