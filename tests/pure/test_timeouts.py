"""The minimum of four, which of them decided, and the floor under which nothing is started."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.policy.timeouts import (
    RUN_FLOOR_SECONDS,
    TimeoutBound,
    clamp_model_timeout,
    effective_timeout,
)
from sbxd.port.errors import RejectedCode, RunBudgetTooLow

SECONDS = st.integers(1, 100_000)


@pytest.mark.parametrize(
    ("hard_cap", "wall_clock", "budget", "command", "seconds", "bound"),
    [
        (1, 20, 30, 40, 1, TimeoutBound.HARD_CAP),
        (40, 2, 30, 20, 2, TimeoutBound.WALL_CLOCK),
        (40, 30, 6, 20, 6, TimeoutBound.RUN_BUDGET),
        (40, 30, 20, 3, 3, TimeoutBound.COMMAND),
        (9, 9, 9, 9, 9, TimeoutBound.HARD_CAP),
        (10, 9, 9, 9, 9, TimeoutBound.WALL_CLOCK),
        (10, 10, 9, 9, 9, TimeoutBound.RUN_BUDGET),
    ],
)
def test_the_smallest_of_the_four_decides_and_is_named(
    hard_cap: int, wall_clock: int, budget: int, command: int, seconds: int, bound: TimeoutBound
) -> None:
    effective = effective_timeout(
        hard_cap_seconds=hard_cap,
        wall_clock_seconds=wall_clock,
        remaining_run_budget_seconds=budget,
        command_timeout_seconds=command,
    )
    assert (effective.seconds, effective.bound) == (seconds, bound)


@given(SECONDS, SECONDS, st.none() | st.integers(RUN_FLOOR_SECONDS, 100_000), SECONDS, SECONDS)
def test_the_commands_own_number_never_raises_the_timeout(
    hard_cap: int, wall_clock: int, budget: int | None, one: int, other: int
) -> None:
    smaller, larger = (
        effective_timeout(
            hard_cap_seconds=hard_cap,
            wall_clock_seconds=wall_clock,
            remaining_run_budget_seconds=budget,
            command_timeout_seconds=command,
        ).seconds
        for command in sorted((one, other))
    )
    assert smaller <= larger <= min(hard_cap, wall_clock)


def test_a_budget_below_the_floor_refuses_and_one_at_the_floor_does_not() -> None:
    def at(budget: float) -> float:
        return effective_timeout(
            hard_cap_seconds=60,
            wall_clock_seconds=60,
            remaining_run_budget_seconds=budget,
            command_timeout_seconds=60,
        ).seconds

    assert at(RUN_FLOOR_SECONDS) == RUN_FLOOR_SECONDS
    for budget in (RUN_FLOOR_SECONDS - 0.001, 0, -3, float("nan")):
        with pytest.raises(RunBudgetTooLow) as refused:
            at(budget)
        assert refused.value.code is RejectedCode.RUN_BUDGET_TOO_LOW


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_a_number_that_bounds_nothing_is_an_error_and_not_an_endless_command(bad: float) -> None:
    for name in ("hard_cap_seconds", "wall_clock_seconds", "command_timeout_seconds"):
        numbers = {
            "hard_cap_seconds": 5.0,
            "wall_clock_seconds": 5.0,
            "command_timeout_seconds": 5.0,
            name: bad,
        }
        with pytest.raises(ValueError, match="positive number of seconds"):
            effective_timeout(**numbers)


def test_a_model_gets_less_when_it_asks_for_less_and_never_more_than_declared() -> None:
    assert clamp_model_timeout(5, declared_seconds=300) == 5
    assert clamp_model_timeout(3600, declared_seconds=300) == 300
    assert clamp_model_timeout(None, declared_seconds=300) == 300
    for wrong in (0, -1, True):
        with pytest.raises(ValueError, match="whole number"):
            clamp_model_timeout(wrong, declared_seconds=300)
