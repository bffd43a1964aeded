"""An environment that overruns a budget ends, and every later call is told so."""

from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.events import (
    BudgetWasExhausted,
    DestroyReason,
    EnvironmentDestroyed,
    EnvironmentExpired,
)
from sbxd.policy.budgets import Budget
from sbxd.port.command import KillReason
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import (
    BudgetExhausted,
    ExecutionRejected,
    RejectedCode,
    SandboxEscapeSuspected,
)
from sbxd.port.limits import EnvironmentBudgets
from tests.lifecycle.double import Behaviour
from tests.lifecycle.world import OTHER_WORKER, WORKER, World, open_world, spec

BUDGETS = EnvironmentBudgets(operations_max=3, returned_bytes_max=20, wall_seconds_max=100)


def budgeted(**changes: int) -> EnvironmentSpec:
    return msgspec.structs.replace(spec(), budgets=msgspec.structs.replace(BUDGETS, **changes))


async def _is_over(world: World, handle: EnvironmentHandle, budget: Budget) -> None:
    """The environment is gone, audited, and its handle is told why, for good."""
    await trio.testing.wait_all_tasks_blocked()
    assert world.consistent_and_empty()
    assert [each.budget for each in world.sink.of(BudgetWasExhausted)] == [budget]
    for _ in range(2):
        with pytest.raises(BudgetExhausted) as caught:
            world.environments.attempt(WORKER, handle)
        assert caught.value.code is RejectedCode.BUDGET_EXHAUSTED
        assert caught.value.field == f"budgets.{budget}"
    with pytest.raises(BudgetExhausted):
        await world.run(handle)
    with pytest.raises(ExecutionRejected) as foreign:
        world.environments.attempt(OTHER_WORKER, handle)
    assert foreign.value.code is RejectedCode.ENVIRONMENT_GONE
    await world.environments.destroy(WORKER, handle)


async def test_the_operation_beyond_the_budget_ends_the_environment(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, budgeted())
        for _ in range(3):
            world.environments.attempt(WORKER, handle)
        assert (await world.run(handle)).exit_code == 0, "the third is served"
        with pytest.raises(BudgetExhausted):
            world.environments.attempt(WORKER, handle)
        await _is_over(world, handle, Budget.OPERATIONS)
        (destroyed,) = world.sink.of(EnvironmentDestroyed)
    assert destroyed.reason is DestroyReason.BUDGET_EXHAUSTED
    assert destroyed.operations == 3


async def test_a_running_command_dies_with_the_environment_that_overran(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, budgeted(operations_max=1))
        world.environments.attempt(WORKER, handle)
        ends: list[KillReason | None] = []

        async def long_one() -> None:
            ends.append((await world.run(handle, Behaviour(seconds=None))).killed_by)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(long_one)
            await trio.sleep(1)
            with pytest.raises(BudgetExhausted):
                world.environments.attempt(WORKER, handle)
        await _is_over(world, handle, Budget.OPERATIONS)
    assert ends == [KillReason.CANCELLED]


async def test_output_beyond_the_budget_is_cut_and_returned(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, budgeted())
        first = await world.run(handle, Behaviour(output=[(0.0, "stdout", b"x" * 12)]))
        second = await world.run(
            handle, Behaviour(seconds=None, output=[(0.5, "stderr", b"y" * 12)])
        )
        await _is_over(world, handle, Budget.RETURNED_BYTES)
        (destroyed,) = world.sink.of(EnvironmentDestroyed)
    assert first.stdout == b"x" * 12
    assert not first.stdout_truncated
    assert second.killed_by is KillReason.OUTPUT_LIMIT
    assert second.stderr == b"y" * 8
    assert second.stderr_truncated
    assert destroyed.returned_bytes == 20


async def test_output_of_exactly_the_budget_is_no_overrun(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, budgeted())
        result = await world.run(handle, Behaviour(output=[(0.0, "stdout", b"x" * 20)]))
        assert result.killed_by is None
        assert (await world.run(handle)).exit_code == 0


async def test_content_beyond_the_budget_is_not_returned(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    got: list[bytes] = []

    async def take(data: bytes) -> None:
        got.append(data)

    async def content() -> bytes:
        return b"z" * 22

    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, budgeted())
        world.mechanism.sandboxes[0].files[b"f"] = await content()
        with pytest.raises(BudgetExhausted):
            await world.environments.read(WORKER, handle, b"f", maximum_bytes=100, on_content=take)
        await _is_over(world, handle, Budget.RETURNED_BYTES)
    assert b"".join(got) == b"z" * 20


async def test_the_wall_is_the_expiry_and_is_told_as_a_budget(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, budgeted())
        assert (handle.expires_at - handle.created_at).total_seconds() == 100
        result = await world.run(handle, Behaviour(seconds=None), ask=None)
        assert result.killed_by is KillReason.TIMEOUT, "30 s: the environment lives"
        await trio.sleep(71)
        await _is_over(world, handle, Budget.WALL)
        assert len(world.sink.of(EnvironmentExpired)) == 1


async def test_an_environment_without_budgets_has_the_operators(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        for _ in range(200):
            world.environments.attempt(WORKER, handle)
        assert (await world.run(handle)).exit_code == 0


async def test_another_tenants_handle_of_an_overrun_environment_learns_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, budgeted(operations_max=1))
        world.environments.attempt(WORKER, handle)
        with pytest.raises(BudgetExhausted):
            world.environments.attempt(WORKER, handle)
        await trio.testing.wait_all_tasks_blocked()
        other = msgspec.structs.replace(handle, tenant_id="other")
        with pytest.raises((ExecutionRejected, SandboxEscapeSuspected)) as caught:
            world.environments.attempt(WORKER, other)
    assert caught.value.code is RejectedCode.ENVIRONMENT_GONE
