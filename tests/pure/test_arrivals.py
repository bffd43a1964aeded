"""How fast connections of one uid may come, and who is told apart."""

from sbxd.policy.arrivals import (
    ARRIVALS_MAX,
    ARRIVALS_SECONDS,
    BROKEN_MAX,
    BROKEN_SECONDS,
    Arrivals,
)
from sbxd.policy.by_uid import UIDS_MAX


def taken(arrivals: Arrivals, uid: int, now: float) -> int:
    count = 0
    while arrivals.take(uid, now):
        count += 1
    return count


def test_a_uid_has_a_number_at_once_and_then_a_rate() -> None:
    arrivals = Arrivals()
    assert taken(arrivals, 1, 0.0) == ARRIVALS_MAX
    assert taken(arrivals, 1, 1.0) == ARRIVALS_MAX / ARRIVALS_SECONDS
    assert arrivals.take(2, 1.0), "another uid has its own"


def test_connections_that_come_to_nothing_have_a_lower_rate() -> None:
    arrivals = Arrivals()
    for _ in range(BROKEN_MAX):
        assert arrivals.take(1, 0.0)
        arrivals.broke(1, 0.0)
    assert not arrivals.take(1, 0.0)
    assert arrivals.take(2, 0.0)
    assert arrivals.take(1, BROKEN_SECONDS / BROKEN_MAX)


def test_uids_are_bounded_and_the_quiet_ones_make_room() -> None:
    arrivals = Arrivals()
    for uid in range(UIDS_MAX):
        assert arrivals.take(uid, 0.0)
    assert taken(arrivals, UIDS_MAX, 0.0) == ARRIVALS_MAX
    assert not arrivals.take(UIDS_MAX + 1, 0.0), "those beyond share one place"
    assert arrivals.take(0, 0.0), "who is known keeps its own"
    assert taken(arrivals, UIDS_MAX + 1, 60.0) == ARRIVALS_MAX
