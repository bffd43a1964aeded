"""How many slots: bounded, monotone in what was asked for, fading, and as Little's law says."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.policy import pool
from sbxd.policy.pool import BURST_HALF_LIFE_SECONDS, MEMORY_SECONDS, Demand

seconds = st.floats(0, 1e6, allow_nan=False)
demands = st.builds(
    Demand,
    at=seconds,
    arrivals_per_second=st.floats(0, 1000),
    burst=st.floats(0, 500),
    refill_seconds=st.floats(0, 60),
)
bounds = st.tuples(st.integers(0, 64), st.integers(0, 64)).map(sorted)
kinds = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(0, 20), max_size=8)


@given(demands, seconds, bounds)
def test_the_operators_bounds_hold_whatever_is_asked_for(
    demand: Demand, now: float, within: list[int]
) -> None:
    least, most = within
    assert least <= pool.slots_wanted(demand, now, least=least, most=most) <= most


@given(demands, st.floats(0, 1e5), st.floats(0, 1e5))
def test_demand_only_fades_with_time(demand: Demand, first: float, second: float) -> None:
    sooner, later = (demand.at + min(first, second), demand.at + max(first, second))
    assert pool.as_of(demand, later).burst <= pool.as_of(demand, sooner).burst
    wanted = [pool.slots_wanted(demand, now, least=0, most=10**6) for now in (sooner, later)]
    assert wanted[1] <= wanted[0]


@given(demands, seconds, st.integers(0, 100))
def test_a_request_never_lowers_what_is_wanted(demand: Demand, now: float, missing: int) -> None:
    before = pool.slots_wanted(demand, now, least=0, most=10**6)
    after = pool.after_arrival(demand, now, missing)
    assert pool.slots_wanted(after, now, least=0, most=10**6) >= before


@given(demands, st.floats(0, 60), st.floats(0, 60))
def test_a_slower_replacement_wants_no_fewer(demand: Demand, one: float, other: float) -> None:
    slow, fast = (pool.after_refill(demand, each) for each in (max(one, other), min(one, other)))
    assert pool.slots_wanted(slow, slow.at, least=0, most=10**6) >= pool.slots_wanted(
        fast, fast.at, least=0, most=10**6
    )


@given(demands, seconds)
def test_a_clock_that_goes_back_changes_nothing(demand: Demand, back: float) -> None:
    assert pool.as_of(demand, demand.at - back) == demand


def test_one_request_is_no_reason_for_a_slot_and_two_are() -> None:
    once = pool.after_arrival(Demand(at=0), 0, 1)
    assert pool.slots_wanted(once, 0, least=0, most=8) == 0
    twice = pool.after_arrival(once, 10, 1)
    assert pool.slots_wanted(twice, 10, least=0, most=8) == 1
    assert pool.slots_wanted(twice, 10 + MEMORY_SECONDS, least=0, most=8) == 0


def test_a_burst_is_remembered_for_a_while() -> None:
    demand = Demand(at=0)
    for missing in range(1, 13):
        demand = pool.after_arrival(demand, 0.01 * missing, missing)
    assert pool.slots_wanted(demand, 1, least=2, most=64) == 12
    assert pool.slots_wanted(demand, BURST_HALF_LIFE_SECONDS, least=2, most=64) in (6, 7)
    assert pool.slots_wanted(demand, 20 * MEMORY_SECONDS, least=2, most=64) == 2


@pytest.mark.parametrize(("rate", "refill"), [(0.2, 0.4), (1, 0.4), (5, 0.4), (2, 3.0)])
def test_the_estimate_of_a_steady_stream_is_littles_law(rate: float, refill: float) -> None:
    demand = Demand(at=0, refill_seconds=refill)
    now, rng = 0.0, random.Random(f"{rate} {refill}")
    while now < 10 * MEMORY_SECONDS:
        now += rng.expovariate(rate)
        demand = pool.after_arrival(demand, now, 1)
    measured = pool.as_of(demand, now).arrivals_per_second
    assert measured == pytest.approx(rate, rel=5 / math.sqrt(rate * MEMORY_SECONDS))
    load = measured * refill
    wanted = pool.slots_wanted(demand, now, least=0, most=10**6)
    assert load + 3 * math.sqrt(load) <= wanted < load + 3 * math.sqrt(load) + 1


@given(kinds, kinds, st.integers(0, 40))
def test_shares_stay_within_the_whole_and_within_what_is_wanted(
    wanted: dict[str, int], promised: dict[str, int], most: int
) -> None:
    given_out = pool.share_out(wanted, promised, most)
    assert sum(given_out.values()) <= most
    assert all(0 <= number <= wanted[kind] for kind, number in given_out.items())
    if sum(wanted.values()) <= most:
        assert given_out == wanted
    else:
        assert sum(given_out.values()) == most


@given(kinds, st.integers(0, 8), st.integers(0, 40))
def test_what_is_promised_comes_before_what_others_want(
    others: dict[str, int], least: int, more: int
) -> None:
    wanted = {**others, "default": least + more}
    assert pool.share_out(wanted, {"default": least}, least + 3)["default"] >= least


@given(kinds, kinds)
def test_what_is_built_next_lacks_most_and_never_more_than_is_given(
    given_out: dict[str, int], have: dict[str, int]
) -> None:
    key = pool.next_to_build(given_out, have)
    short = {kind for kind, number in given_out.items() if have.get(kind, 0) < number}
    assert (key is None) == (not short)
    if key is not None:
        assert key in short
        lacks = {kind: have.get(kind, 0) / given_out[kind] for kind in short}
        assert lacks[key] == min(lacks.values())
