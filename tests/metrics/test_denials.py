"""Denials are counted exactly, shown for a bounded number of tenants, and a spike stays visible."""

from collections import Counter as Tally

from hypothesis import given
from hypothesis import strategies as st

from sbxd.metrics.denials import NOBODY, QUIET_SECONDS, Denials
from sbxd.metrics.families import OTHERS
from sbxd.metrics.recent import RECENT_SECONDS, Recent
from sbxd.policy.violations import ViolationCode

EGRESS = ViolationCode.EGRESS_DENIED


def shown(denials: Denials) -> dict[tuple[str, str], float]:
    family = denials.families()[1]
    return {
        (sample.labels[0].value, sample.labels[1].value): sample.value for sample in family.samples
    }


def test_each_tenant_and_kind_has_its_series() -> None:
    denials = Denials()
    denials.note("a", EGRESS, 0.0, count=3)
    denials.note("a", ViolationCode.PATH_TRAVERSAL, 1.0)
    denials.note(None, EGRESS, 2.0)
    assert shown(denials) == {
        ("a", "EGRESS_DENIED"): 3,
        ("a", "PATH_TRAVERSAL"): 1,
        (NOBODY, "EGRESS_DENIED"): 1,
    }


def test_a_late_tenants_spike_is_others_while_nobody_is_quiet() -> None:
    denials = Denials(tenants_max=2)
    for tenant in ("a", "b", "late", "late"):
        denials.note(tenant, EGRESS, 0.0)
    assert shown(denials)[OTHERS, "EGRESS_DENIED"] == 2
    assert denials.recent(0.0)[OTHERS, EGRESS] == 2


def test_a_quiet_tenant_gives_its_place_to_a_new_one_and_a_loud_one_never() -> None:
    denials = Denials(tenants_max=2)
    denials.note("quiet", EGRESS, 0.0)
    denials.note("loud", EGRESS, 0.0)
    denials.note("loud", EGRESS, QUIET_SECONDS - 1)
    denials.note("new", EGRESS, QUIET_SECONDS)
    denials.note("newer", EGRESS, QUIET_SECONDS)
    assert shown(denials) == {
        ("loud", "EGRESS_DENIED"): 2,
        ("new", "EGRESS_DENIED"): 1,
        (OTHERS, "EGRESS_DENIED"): 1,
    }


@given(
    st.lists(
        st.tuples(
            st.sampled_from([f"t{n}" for n in range(12)]),
            st.sampled_from(list(ViolationCode)[:3]),
            st.floats(0, 400, allow_nan=False),
            st.integers(1, 5),
        ),
        max_size=60,
    )
)
def test_whatever_tenants_do_totals_are_exact_series_bounded_and_shown_ones_only_grow(
    steps: list[tuple[str, ViolationCode, float, int]],
) -> None:
    denials, now = Denials(tenants_max=4), 0.0
    truth: Tally[str] = Tally()
    before: dict[tuple[str, str], float] = {}
    for tenant, violation, pause, count in steps:
        now += pause
        denials.note(tenant, violation, now, count=count)
        truth[violation.value] += count
        after = shown(denials)
        assert len({name for name, _ in after}) <= 5
        # Of one that is shown before and after: it is the same series or one that began anew.
        for key in before.keys() & after.keys():
            assert after[key] >= before[key] or after[key] <= count
        before = after
    for violation in ViolationCode:
        assert denials.total.value(violation.value) == truth[violation.value]


def test_recent_forgets_after_its_minutes() -> None:
    recent: Recent[str] = Recent()
    recent.add("a", 0.0)
    recent.add("b", RECENT_SECONDS / 2, by=3)
    assert recent.counts(RECENT_SECONDS / 2) == {"b": 3, "a": 1}
    assert recent.counts(RECENT_SECONDS) == {"b": 3}
    assert recent.counts(2 * RECENT_SECONDS) == {}
