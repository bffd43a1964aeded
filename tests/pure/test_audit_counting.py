"""What a peer can cause without end is counted exactly, and what is kept of it has a bound."""

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.audit import events as e
from sbxd.audit.bounds import BOUNDS, Bound
from sbxd.audit.counted_events import RefusalsCounted, WorkspaceUsed, WorkspaceUsesCounted
from sbxd.audit.counting import (
    ENVIRONMENTS_MAX,
    RECORDED_MAX,
    Refusals,
    WorkspaceUses,
    as_refusal,
)
from sbxd.audit.lease_events import JournalWriteFailed
from sbxd.audit.vocabulary import EVENT_TYPES
from sbxd.policy.by_uid import UIDS_MAX
from sbxd.policy.violations import ViolationCode
from sbxd.port.errors import RejectedCode, UnavailableCode, WorkspaceCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
CODES = (RejectedCode.ENVIRONMENT_GONE, RejectedCode.STALE_LEASE, RejectedCode.NOT_AUTHORIZED)


def rejected(uid: int, code: RejectedCode = RejectedCode.ENVIRONMENT_GONE) -> e.RequestRejected:
    return e.RequestRejected(
        verb="execute",
        peer_uid=uid,
        code=code,
        violation=ViolationCode.HANDLE_DENIED,
        detail="no such environment",
    )


def refused(uid: int) -> e.PeerRefused:
    return e.PeerRefused(
        door=e.Door.WORKER,
        reason=e.PeerRefusal.PROTOCOL_VIOLATED,
        peer_uid=uid,
        peer_gid=uid,
        peer_pid=1,
    )


def used(name: str, verb: str, code: WorkspaceCode | None = None) -> WorkspaceUsed:
    return WorkspaceUsed(
        environment_id=EnvironmentId(name),
        tenant_id=TenantId("tenant"),
        run_id=RunId("run"),
        lease_epoch=1,
        verb=verb,
        peer_uid=7,
        code=code,
    )


def told(counted: list[RefusalsCounted]) -> dict[int | None, dict[str, int]]:
    return {
        each.peer_uid: {
            reason: int(number) for reason, _, number in (c.rpartition("=") for c in each.counts)
        }
        for each in counted
    }


# --- every type has a bound ---------------------------------------------------------------------


def test_every_type_of_event_says_what_bounds_it() -> None:
    assert set(BOUNDS) == set(EVENT_TYPES), "put a new type into sbxd/audit/bounds.py"


def test_what_answers_a_request_or_a_connection_is_counted_beyond_the_window() -> None:
    at_will = {kind for kind in EVENT_TYPES if issubclass(kind, e.RequestEvent | e.PeerRefused)}
    assert {kind for kind in at_will if BOUNDS[kind] is not Bound.WINDOW} == set()
    assert as_refusal(rejected(1)) is not None
    assert as_refusal(refused(1)) is not None
    assert as_refusal(e.LimitUnenforced(limit="io")) is None


def test_what_the_journals_absence_refuses_is_counted_with_that() -> None:
    event = e.RequestUnserved(
        verb="execute", peer_uid=1, code=UnavailableCode.AUDIT_UNAVAILABLE, detail=""
    )
    assert as_refusal(event) is None


def test_the_page_explains_every_bound() -> None:
    documentation = PAGE.read_text("utf-8")
    for bound in Bound:
        assert re.search(rf"^\| `{bound.value}` \|", documentation, re.M), bound


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.case("PEER-20")
@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(1, 3), st.sampled_from(CODES), st.integers(1, 90)),
        max_size=40,
    )
)
def test_each_refusal_is_recorded_or_in_one_count(
    bursts: list[tuple[float, int, RejectedCode, int]],
) -> None:
    refusals, now = Refusals(), 0.0
    asked: Counter[int] = Counter()
    recorded: Counter[int] = Counter()
    for pause, uid, code, number in bursts:
        now += pause
        for _ in range(number):
            asked[uid] += 1
            event = rejected(uid, code)
            if refusals.take(event, now):
                recorded[uid] += 1
            else:
                refusals.count(event, now)
    counted = list(refusals.counted(now))
    for each in counted:
        refusals.put_back(each, now)
    again = list(refusals.counted(now))
    assert told(again) == told(counted)
    assert list(refusals.counted(now)) == []
    for uid in asked:
        of = told(counted).get(uid, {})
        assert recorded[uid] + sum(of.values()) == asked[uid]
        assert recorded[uid] <= RECORDED_MAX + now / 6 + 1
    for each in counted:
        assert each.total == sum(told([each])[each.peer_uid].values())


def test_a_flood_of_one_kind_does_not_hide_another() -> None:
    refusals = Refusals()
    for _ in range(10_000):
        if not refusals.take(refused(1), 0.0):
            refusals.count(refused(1), 0.0)
    assert refusals.take(rejected(1), 0.0)
    assert refusals.take(refused(2), 0.0)
    (counted,) = refusals.counted(1.5)
    assert counted == RefusalsCounted(
        peer_uid=1,
        total=10_000 - RECORDED_MAX,
        counts=(f"PeerRefused.PROTOCOL_VIOLATED={10_000 - RECORDED_MAX}",),
        over_ms=1500,
    )


@pytest.mark.case("PEER-21")
def test_no_number_of_uids_makes_it_grow_or_loses_a_count() -> None:
    refusals, recorded = Refusals(), 0
    uids, each = 4 * UIDS_MAX, 3
    for uid in range(uids):
        for _ in range(each):
            if refusals.take(rejected(uid), 0.0):
                recorded += 1
            else:
                refusals.count(rejected(uid), 0.0)
    assert len(refusals._uids) <= UIDS_MAX + 1
    (of_all,) = refusals.counted(0.0)
    assert of_all.peer_uid is None
    assert recorded + of_all.total == uids * each
    # Whoever was quiet for long makes room for another.
    assert refusals.take(rejected(uids), 10_000.0)
    assert not list(refusals.counted(10_000.0))


def test_a_uid_that_asks_slowly_is_never_beyond() -> None:
    refusals = Refusals()
    for second in range(600):
        refusals.take(rejected(1), float(second))
        assert not refusals.is_beyond(1, float(second))
    for _ in range(200):
        refusals.take(rejected(2), 600.0)
    assert refusals.is_beyond(2, 600.0)
    assert not refusals.is_beyond(1, 600.0)
    assert not refusals.is_beyond(2, 700.0)


def test_a_failing_creation_journal_is_no_flood_of_alerts() -> None:
    refusals = Refusals()
    event = JournalWriteFailed(environment_id=EnvironmentId("a" * 32), detail="no space")
    taken = sum(refusals.take(event, 0.0) for _ in range(1000))
    assert taken == RECORDED_MAX
    refusals.count(event, 0.0)
    (counted,) = refusals.counted(0.0)
    assert (counted.peer_uid, counted.counts) == (None, ("JournalWriteFailed=1",))


# --- workspaces ---------------------------------------------------------------------------------


def test_the_first_of_each_kind_is_recorded_and_all_are_counted() -> None:
    uses = WorkspaceUses()
    kinds = [("workspace_read", None), ("workspace_read", WorkspaceCode.HARD_LINKED),
             ("workspace_list", None)]  # fmt: skip
    firsts = [uses.take(used("a", verb, code)) for verb, code in kinds * 100]
    assert firsts == [True] * 3 + [False] * 297
    assert uses.take(used("b", "workspace_read"))
    of_a = uses.of_environment(EnvironmentId("a"))
    assert isinstance(of_a, WorkspaceUsesCounted)
    assert of_a.total == 300
    assert of_a.counts == (
        "workspace_list=100", "workspace_read=100", "workspace_read.HARD_LINKED=100",
    )  # fmt: skip
    uses.put_back(of_a)
    assert uses.of_environment(EnvironmentId("a")) == of_a
    assert uses.of_environment(EnvironmentId("a")) is None
    assert uses.environments() == [EnvironmentId("b")]


def test_no_number_of_environments_makes_it_grow_or_loses_a_count() -> None:
    uses, total = WorkspaceUses(), 0
    for number in range(ENVIRONMENTS_MAX + 10):
        uses.take(used(f"e{number}", "workspace_write"))
        full = uses.overflow()
        total += 0 if full is None else full.total
    assert len(uses.environments()) == ENVIRONMENTS_MAX
    assert total == 10
