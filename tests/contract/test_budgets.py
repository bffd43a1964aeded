"""Budgets, the same for every mechanism: charged on attempt, absorbing; a denial is not (S3)."""

import msgspec
import pytest
from trio.testing import MockClock

from sbxd.port.command import KillReason
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import (
    BudgetExhausted,
    ExecutionRejected,
    RejectedCode,
)
from sbxd.port.limits import EnvironmentBudgets
from tests.contract.subjects import Subject

Clock = MockClock | None
BUDGETS = EnvironmentBudgets(operations_max=4, returned_bytes_max=1000, wall_seconds_max=600)


async def provision(subject: Subject, **changes: int) -> EnvironmentHandle:
    budgets = msgspec.structs.replace(BUDGETS, **changes)
    return await subject.environment.provision(
        msgspec.structs.replace(subject.specification(), budgets=budgets)
    )


async def is_over(subject: Subject, handle: EnvironmentHandle, field: str) -> None:
    """Every call is told so, again and again, and destroying it is as ever."""
    workspace = subject.workspace(handle)
    for _ in range(2):
        with pytest.raises(BudgetExhausted) as caught:
            await subject.run(handle, subject.commands.write())
        assert caught.value.code is RejectedCode.BUDGET_EXHAUSTED
        assert caught.value.field == field
        with pytest.raises(BudgetExhausted):
            await workspace.listdir(".")
    await subject.environment.destroy(handle)


async def test_every_kind_of_operation_is_charged(subject: Subject, clock: Clock) -> None:
    handle = await provision(subject)
    workspace = subject.workspace(handle)
    await subject.run(handle, subject.commands.write())
    await workspace.write("a", b"1")
    assert await workspace.read("a") == b"1"
    await workspace.listdir(".")
    with pytest.raises(BudgetExhausted):
        await workspace.provenance("a")
    await is_over(subject, handle, "budgets.operations_max")


async def test_a_denied_operation_is_charged_and_halts_nothing(
    subject: Subject, clock: Clock
) -> None:
    handle = await provision(subject)
    for _ in range(3):
        with pytest.raises(ExecutionRejected) as caught:
            await subject.run(handle, subject.commands.write(), working_directory="nowhere")
        assert caught.value.code is RejectedCode.WORKING_DIRECTORY_NOT_FOUND
    assert (await subject.run(handle, subject.commands.write())).exit_code == 0
    with pytest.raises(BudgetExhausted):
        await subject.run(handle, subject.commands.write(), working_directory="nowhere")
    await is_over(subject, handle, "budgets.operations_max")


async def test_output_is_cut_at_the_budget_and_the_environment_ends(
    subject: Subject, clock: Clock
) -> None:
    handle = await provision(subject)
    result = await subject.run(handle, subject.commands.write_bytes(1500))
    assert result.killed_by is KillReason.OUTPUT_LIMIT
    assert len(result.stdout) == 1000
    assert result.stdout_truncated
    await is_over(subject, handle, "budgets.returned_bytes_max")


async def test_reading_counts_and_writing_does_not(subject: Subject, clock: Clock) -> None:
    handle = await provision(subject)
    workspace = subject.workspace(handle)
    await workspace.write("big", b"x" * 50_000)
    with pytest.raises(BudgetExhausted):
        await workspace.read("big")
    await is_over(subject, handle, "budgets.returned_bytes_max")


async def test_the_wall_shortens_the_life(subject: Subject, clock: Clock) -> None:
    handle = await provision(subject, wall_seconds_max=77)
    assert (handle.expires_at - handle.created_at).total_seconds() == 77
    await subject.environment.destroy(handle)


async def test_a_budget_above_the_operators_is_rejected_by_field(
    subject: Subject, clock: Clock
) -> None:
    with pytest.raises(ExecutionRejected) as caught:
        await provision(subject, operations_max=10**9)
    assert caught.value.code is RejectedCode.LIMIT_ABOVE_CEILING
    assert caught.value.field == "budgets.operations_max"
