"""What one environment may do in all: operations, bytes returned to the worker, time.

Theory (S3): a limit bounds what a command uses; a budget bounds what a run gets out of its
environment. An operation is charged on attempt, also one that is then denied, or the budget could
be probed past. A denial leaves the environment as it was; a budget that is overrun halts it for
good. Bytes count on their way back to the worker, since that is what fills a context; written
bytes are metered apart and bounded by the volume.

Invariants: pure; no clock. Counts only grow; what is charged never exceeds a budget; the first
overrun stands and everything after it is refused.
"""

from enum import StrEnum

import msgspec

from sbxd.port.errors import BudgetExhausted, ExecutionRejected, RejectedCode
from sbxd.port.limits import EnvironmentBudgets

BUDGET_FIELDS = EnvironmentBudgets.__struct_fields__


class Budget(StrEnum):
    """The budgets by the names of their fields."""

    OPERATIONS = "operations_max"
    RETURNED_BYTES = "returned_bytes_max"
    WALL = "wall_seconds_max"


class Account:
    """What one environment has been charged."""

    def __init__(self, budgets: EnvironmentBudgets) -> None:
        self.budgets = budgets
        self.operations = 0
        self.returned_bytes = 0
        self.written_bytes = 0
        self.exhausted: Budget | None = None

    def charge_operation(self) -> None:
        """An operation is attempted. Raises BudgetExhausted."""
        self.check()
        if self.operations == self.budgets.operations_max:
            self._overrun(Budget.OPERATIONS)
        self.check()
        self.operations += 1

    def grant_returned(self, size_bytes: int) -> int:
        """How many of these bytes may go back to the worker; fewer than asked is an overrun."""
        if self.exhausted is not None:
            return 0
        granted = min(size_bytes, self.budgets.returned_bytes_max - self.returned_bytes)
        self.returned_bytes += granted
        if granted < size_bytes:
            self._overrun(Budget.RETURNED_BYTES)
        return granted

    def meter_written(self, size_bytes: int) -> None:
        """Bytes that the worker put into the workspace."""
        self.written_bytes += size_bytes

    def time_is_up(self) -> None:
        """The environment has lived for `wall_seconds_max`."""
        self._overrun(Budget.WALL)

    def check(self) -> None:
        """Raises BudgetExhausted once a budget has been overrun."""
        if self.exhausted is not None:
            raise overrun(self.exhausted)

    def _overrun(self, budget: Budget) -> None:
        if self.exhausted is None:
            self.exhausted = budget


def overrun(budget: Budget) -> BudgetExhausted:
    """What every call is told from the overrun on."""
    field = f"budgets.{budget}"
    return BudgetExhausted(
        f"{field}: the environment has used up its budget and has ended: provision a new one",
        field=field,
    )


def effective_budgets(
    requested: EnvironmentBudgets | None, operator: EnvironmentBudgets
) -> EnvironmentBudgets:
    """What applies to an admitted specification."""
    return operator if requested is None else requested


def admit_budgets(requested: EnvironmentBudgets | None, operator: EnvironmentBudgets) -> None:
    """Hold each budget against the operator's.

    Raises:
        ExecutionRejected: LIMIT_ABOVE_CEILING, `field` "budgets.<name>".
    """
    if requested is None:
        return
    ceilings = msgspec.structs.asdict(operator)
    for name, value in msgspec.structs.asdict(requested).items():
        if value > ceilings[name]:
            raise ExecutionRejected(
                RejectedCode.LIMIT_ABOVE_CEILING,
                f"budgets.{name}: {value} is above the operator's {ceilings[name]}: ask for less, "
                f"or have the operator raise limits.budgets.{name}",
                field=f"budgets.{name}",
            )
