"""The division of a busy host, for any tenants."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.launcher.requests import CPU_WEIGHT_MAX
from sbxd.policy.shares import WEIGHT_MAX, Claim, cpu_weights

claims_of = st.dictionaries(
    st.integers(),
    st.builds(Claim, tenant=st.sampled_from("abc"), cpu_millicores=st.integers(10, 1_024_000)),
    max_size=40,
)


@given(claims_of)
def test_no_tenant_gains_by_having_many(claims: dict[int, Claim]) -> None:
    weights = cpu_weights(claims)
    assert weights.keys() == claims.keys()
    totals: Counter[object] = Counter()
    for key, weight in weights.items():
        assert 1 <= weight <= WEIGHT_MAX
        totals[claims[key].tenant] += weight
    for total in totals.values():
        assert WEIGHT_MAX - 40 <= total <= WEIGHT_MAX + 40  # rounding, and the least weight


def test_ten_of_one_tenant_weigh_as_much_as_one_of_another() -> None:
    many = {n: Claim("many", 1000) for n in range(10)}
    weights = cpu_weights({**many, "single": Claim("single", 1000)})
    assert weights.pop("single") == 10_000
    assert set(weights.values()) == {1000}


def test_within_a_tenant_the_rate_counts_that_was_asked_for() -> None:
    assert cpu_weights({1: Claim("a", 3000), 2: Claim("a", 1000)}) == {1: 7500, 2: 2500}


def test_the_scale_is_the_kernels_and_the_launchers() -> None:
    assert WEIGHT_MAX == CPU_WEIGHT_MAX


@pytest.mark.parametrize("count", [0, 1])
def test_a_tenant_that_is_alone_keeps_what_it_began_with(count: int) -> None:
    claims = dict.fromkeys(range(count), Claim("a", 500))
    assert list(cpu_weights(claims).values()) == [WEIGHT_MAX] * count
