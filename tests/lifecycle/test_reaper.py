"""When an environment is over although nobody ended it."""

from hypothesis import given
from hypothesis import strategies as st

from sbxd.audit.events import DestroyReason
from sbxd.lifecycle.reaper import Tenure, next_due, select_due
from sbxd.port.ids import EnvironmentId

GRACE = 60.0
times = st.floats(0, 1000)
tenures = st.lists(
    st.builds(
        Tenure,
        st.integers(0, 5).map(lambda number: EnvironmentId(f"{number:032x}")),
        times,
        st.none() | times,
    ),
    max_size=8,
)


def test_expiry_is_named_before_orphanhood_and_the_grace_is_kept() -> None:
    both = Tenure(EnvironmentId("a"), 10.0, 0.0)
    orphan = Tenure(EnvironmentId("b"), 1000.0, 5.0)
    held = Tenure(EnvironmentId("c"), 1000.0, None)
    assert select_due([both, orphan, held], 64.9, grace_seconds=GRACE) == [
        ("a", DestroyReason.EXPIRED)
    ]
    assert select_due([both, orphan, held], 65.0, grace_seconds=GRACE) == [
        ("a", DestroyReason.EXPIRED),
        ("b", DestroyReason.PEER_GONE),
    ]


@given(tenures, times)
def test_nothing_is_due_before_the_next_time_and_something_is_at_it(
    some: list[Tenure], now: float
) -> None:
    due_at = next_due(some, grace_seconds=GRACE)
    assert bool(select_due(some, now, grace_seconds=GRACE)) == (now >= due_at)
