"""The only place of the daemon that shields from cancellation, and never without a deadline.

What must be finished although its caller is gone (the proof that a tree is dead, the last audit
event of a command) runs in here, under a budget.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

ResultT = TypeVar("ResultT")


class BudgetSpent(Exception):
    """The operation did not finish within its budget; it was cancelled."""


async def within_shield(
    budget_seconds: float, operation: Callable[[], Awaitable[ResultT]]
) -> ResultT:
    """Finish `operation` although the caller is cancelled, but not beyond the budget.

    Raises: BudgetSpent, and whatever the operation raises.

    Cancellation: takes effect at the caller's next checkpoint after the operation.
    """
    with trio.move_on_after(budget_seconds, shield=True):
        return await operation()
    raise BudgetSpent


async def within(budget_seconds: float, operation: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Await `operation` for at most the budget, unshielded. Raises BudgetSpent."""
    with trio.move_on_after(budget_seconds):
        return await operation()
    raise BudgetSpent
