"""Budgets, whatever is charged in whatever order."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.policy.budgets import (
    BUDGET_FIELDS,
    Account,
    Budget,
    admit_budgets,
    effective_budgets,
    overrun,
)
from sbxd.policy.violations import ViolationCode, violation_of
from sbxd.port.errors import BudgetExhausted, ExecutionRejected, RejectedCode, StaleLease
from sbxd.port.limits import EnvironmentBudgets

Charge = Callable[[Account], object]


def _operation(account: Account) -> bool:
    try:
        account.charge_operation()
    except BudgetExhausted:
        return False
    return True


def _returned(size: int) -> Charge:
    return lambda account: account.grant_returned(size)


def _written(size: int) -> Charge:
    return lambda account: account.meter_written(size)


budgets = st.builds(
    EnvironmentBudgets,
    operations_max=st.integers(1, 12),
    returned_bytes_max=st.integers(1, 60),
    wall_seconds_max=st.integers(1, 100),
)
charges: st.SearchStrategy[list[Charge]] = st.lists(
    st.one_of(
        st.just(_operation),
        st.integers(0, 40).map(_returned),
        st.integers(0, 40).map(_written),
        st.just(Account.time_is_up),
    ),
    max_size=40,
)


def _counts(account: Account) -> tuple[int, int, int]:
    return account.operations, account.returned_bytes, account.written_bytes


@given(budgets, charges)
def test_counts_only_grow_and_stay_within_the_budgets(
    allowed: EnvironmentBudgets, steps: list[Charge]
) -> None:
    account = Account(allowed)
    for step in steps:
        before = _counts(account)
        step(account)
        after = _counts(account)
        assert all(new >= old >= 0 for new, old in zip(after, before, strict=True))
        assert account.operations <= allowed.operations_max
        assert account.returned_bytes <= allowed.returned_bytes_max


@given(budgets, charges, charges)
def test_an_overrun_is_absorbing_and_the_first_one_stands(
    allowed: EnvironmentBudgets, before: list[Charge], after: list[Charge]
) -> None:
    account = Account(allowed)
    for step in before:
        step(account)
    first = account.exhausted
    if first is None:
        account.check()
        return
    charged = _counts(account)[:2]
    for step in after:
        step(account)
        assert account.exhausted is first
        assert not _operation(account)
        assert account.grant_returned(1) == 0
        with pytest.raises(BudgetExhausted) as caught:
            account.check()
        assert caught.value.field == f"budgets.{first}"
    assert _counts(account)[:2] == charged


@given(budgets, st.integers(0, 30))
def test_exactly_as_many_operations_as_allowed_are_allowed(
    allowed: EnvironmentBudgets, attempts: int
) -> None:
    account = Account(allowed)
    granted = [_operation(account) for _ in range(attempts)]
    assert granted == [n < allowed.operations_max for n in range(attempts)]
    expected = Budget.OPERATIONS if attempts > allowed.operations_max else None
    assert account.exhausted is expected


@given(budgets, st.lists(st.integers(0, 40), max_size=20))
def test_every_byte_within_the_budget_is_granted_and_none_beyond(
    allowed: EnvironmentBudgets, sizes: list[int]
) -> None:
    account = Account(allowed)
    granted = sum(account.grant_returned(size) for size in sizes)
    assert granted == min(sum(sizes), allowed.returned_bytes_max)
    over = sum(sizes) > allowed.returned_bytes_max
    assert account.exhausted is (Budget.RETURNED_BYTES if over else None)


@given(budgets, st.lists(st.integers(0, 2**40), max_size=20))
def test_written_bytes_are_metered_and_never_an_overrun(
    allowed: EnvironmentBudgets, sizes: list[int]
) -> None:
    account = Account(allowed)
    for size in sizes:
        account.meter_written(size)
    assert account.written_bytes == sum(sizes)
    assert account.exhausted is None


@given(budgets, budgets)
def test_a_specification_may_only_ask_for_less(
    requested: EnvironmentBudgets, operator: EnvironmentBudgets
) -> None:
    above = [n for n in BUDGET_FIELDS if getattr(requested, n) > getattr(operator, n)]
    if not above:
        admit_budgets(requested, operator)
        assert effective_budgets(requested, operator) is requested
        return
    with pytest.raises(ExecutionRejected) as caught:
        admit_budgets(requested, operator)
    assert caught.value.code is RejectedCode.LIMIT_ABOVE_CEILING
    assert caught.value.field == f"budgets.{above[0]}"
    assert str(getattr(requested, above[0])) in caught.value.detail


@given(budgets)
def test_a_specification_without_budgets_has_the_operators(operator: EnvironmentBudgets) -> None:
    admit_budgets(None, operator)
    assert effective_budgets(None, operator) is operator


@pytest.mark.parametrize("code", RejectedCode)
def test_every_rejection_has_a_violation_code(code: RejectedCode) -> None:
    field = "budgets.operations_max" if code is RejectedCode.BUDGET_EXHAUSTED else None
    assert violation_of(ExecutionRejected(code, "", field=field)) in ViolationCode


@pytest.mark.parametrize("budget", Budget)
def test_every_budget_has_a_violation_code_of_its_own(budget: Budget) -> None:
    assert violation_of(overrun(budget)).value == budget.value.upper()


def test_a_stale_lease_is_a_violation_of_its_own() -> None:
    assert violation_of(StaleLease("")) is ViolationCode.LEASE_STALE


def test_the_budgets_are_named_as_their_fields() -> None:
    assert {budget.value for budget in Budget} == set(BUDGET_FIELDS)
