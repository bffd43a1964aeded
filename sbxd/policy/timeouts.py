"""How long one command may run: one rule, the minimum of four.

Invariants: the operator's hard cap always applies; the model's number can only lower the result;
nothing here reads a clock. The lifetime of an environment is deliberately not part of the
minimum: it ends the environment (EXPIRED), not the command.
"""

from enum import StrEnum

from msgspec import Struct

from sbxd.port.errors import RunBudgetTooLow

RUN_FLOOR_SECONDS = 5


class TimeoutBound(StrEnum):
    """Which of the four numbers was the smallest; the first in this order wins a tie."""

    HARD_CAP = "HARD_CAP"
    WALL_CLOCK = "WALL_CLOCK"
    RUN_BUDGET = "RUN_BUDGET"
    COMMAND = "COMMAND"


class EffectiveTimeout(Struct, frozen=True, kw_only=True):
    """seconds: positive. bound: which number decided."""

    seconds: float
    bound: TimeoutBound


def effective_timeout(
    *,
    hard_cap_seconds: float,
    wall_clock_seconds: float,
    command_timeout_seconds: float,
    remaining_run_budget_seconds: float | None = None,
    run_floor_seconds: float = RUN_FLOOR_SECONDS,
) -> EffectiveTimeout:
    """The timeout that bounds one command, and which of the four numbers decided.

    Args:
        hard_cap_seconds: the operator's `limits.command_hard_cap_seconds`; always applies.
        wall_clock_seconds: the environment's `limits.wall_clock_seconds`.
        command_timeout_seconds: the command's own `timeout_seconds`.
        remaining_run_budget_seconds: what is left of the run's deadline; None where the caller
            has no run (the service: its client has folded the deadline in already).
        run_floor_seconds: the least of the run's budget that starting a command is worth.

    Raises:
        RunBudgetTooLow: less of the run's budget is left than the floor. Nothing was started.
        ValueError: a number that is not a positive, finite number of seconds.
    """
    candidates = [
        (hard_cap_seconds, TimeoutBound.HARD_CAP),
        (wall_clock_seconds, TimeoutBound.WALL_CLOCK),
        (command_timeout_seconds, TimeoutBound.COMMAND),
    ]
    for seconds, bound in candidates:
        if not 0 < seconds < float("inf"):
            raise ValueError(f"{bound}: {seconds!r} is not a positive number of seconds")
    if remaining_run_budget_seconds is not None:
        # `not >=` refuses NaN as well.
        if not remaining_run_budget_seconds >= run_floor_seconds:
            raise RunBudgetTooLow(
                f"{remaining_run_budget_seconds:.1f} s of the run's budget are left and the floor "
                f"is {run_floor_seconds} s: the command was not started"
            )
        candidates.insert(2, (remaining_run_budget_seconds, TimeoutBound.RUN_BUDGET))
    seconds, bound = min(candidates, key=lambda candidate: candidate[0])
    return EffectiveTimeout(seconds=float(seconds), bound=bound)


def clamp_model_timeout(requested_seconds: int | None, *, declared_seconds: int) -> int:
    """What a model's own wish becomes: never above the tool's declared timeout.

    Args:
        requested_seconds: the model's number (1 or more) or None for no wish.
        declared_seconds: the timeout that the tool declares (S1: 300).

    Raises:
        ValueError: the wish is not a positive whole number.
    """
    if requested_seconds is None:
        return declared_seconds
    if isinstance(requested_seconds, bool) or requested_seconds < 1:
        raise ValueError(f"timeout_seconds is {requested_seconds!r}: give a whole number from 1")
    return min(requested_seconds, declared_seconds)
