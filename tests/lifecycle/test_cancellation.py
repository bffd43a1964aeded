"""A caller that is cancelled at any of its steps: nothing is left, and nothing waits for ever.

An instrument counts the steps of the caller's own task and cancels it at the n-th, for every n
until it comes to its end first. So every checkpoint that the caller passes is met once, also those
inside a shield, where the cancellation has to wait.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.events import CommandFinished, CommandStarted, CommandUnfinished, DestroyReason
from sbxd.lifecycle.journal import JournalState
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.ids import EnvironmentId
from sbxd.port.leases import LeaseStanding
from sbxd.settings import LeaseSettings
from sbxd.wire.repair import ClearingWord
from tests.lifecycle.double import Behaviour
from tests.lifecycle.world import (
    ADMIN,
    DEFAULT,
    WITH_RESERVE,
    WORKER,
    World,
    open_world,
    spec,
)

Step = Callable[[World, EnvironmentHandle], Awaitable[object]]
STEPS_MAX = 500


class CancelAt(trio.abc.Instrument):
    """Cancels `scope` before the n-th step of `task`."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.task: trio.lowlevel.Task | None = None
        self.scope = trio.CancelScope()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


async def cut(number: int, operation: Callable[[], Awaitable[object]]) -> bool:
    """Run the operation in a task that is cancelled at its n-th step. Returns whether it was."""
    cutter = CancelAt(number)

    async def caller() -> None:
        cutter.task = trio.lowlevel.current_task()
        with cutter.scope:
            await operation()

    trio.lowlevel.add_instrument(cutter)
    try:
        with trio.fail_after(10_000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(caller)
    finally:
        trio.lowlevel.remove_instrument(cutter)
    return cutter.left <= 0


async def provision(world: World, handle: EnvironmentHandle) -> object:
    return await world.environments.provision(WORKER, spec(run="cut"))


async def supersede(world: World, handle: EnvironmentHandle) -> object:
    return await world.environments.provision(WORKER, spec(epoch=2))


async def execute(world: World, handle: EnvironmentHandle) -> object:
    return await world.run(handle, Behaviour(seconds=0.5, output=[(0.1, "stdout", b"x" * 10)]))


async def overrun(world: World, handle: EnvironmentHandle) -> object:
    return await world.run(handle, Behaviour(output=[(0.0, "stderr", b"x" * 2000)]))


async def destroy(world: World, handle: EnvironmentHandle) -> None:
    await world.environments.destroy(WORKER, handle)


async def reap(world: World, handle: EnvironmentHandle) -> object:
    return await world.environments.reap()


async def reconcile(world: World, handle: EnvironmentHandle) -> object:
    world.mechanism.existing[EnvironmentId("f" * 32)] = ("scope",)
    return await world.environments.reconcile()


class Stale:
    """An authority that calls everything stale."""

    name = "tier"
    owner_uids = frozenset({WORKER.uid})

    async def ask(self, environment_ids: Sequence[EnvironmentId]) -> list[LeaseStanding]:
        await trio.lowlevel.checkpoint()
        return [LeaseStanding.STALE for _ in environment_ids]


@pytest.mark.parametrize("settings", [DEFAULT, WITH_RESERVE], ids=["cold", "reserve"])
@pytest.mark.parametrize(
    ("operation", "least"),
    [(provision, 2), (supersede, 2), (execute, 5), (overrun, 5), (destroy, 1), (reap, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_caller_that_is_cancelled_at_any_step_leaves_nothing(
    tmp_path: Path,
    autojump_clock: MockClock,
    settings: object,
    operation: Step,
    least: int,
) -> None:
    chosen = WITH_RESERVE if settings is WITH_RESERVE else DEFAULT
    number = 0
    while True:
        number += 1
        assert number < STEPS_MAX
        async with open_world(
            tmp_path / str(number),
            settings=msgspec.structs.replace(chosen, leases=LeaseSettings(interval_seconds=1)),
            authorities=[Stale()] if operation is reap else [],
        ) as world:
            handle = await world.environments.provision(WORKER, spec())
            was_cut = await cut(number, lambda: operation(world, handle))  # noqa: B023
            world.environments.release_owner(WORKER.connection_id)
            await trio.sleep(1000)
            await world.registry.shut_down(DestroyReason.SERVICE_SHUTDOWN)
            await trio.sleep(10)
            assert world.consistent_and_empty()
            begun = world.sink.of(CommandStarted)
            ends = [*world.sink.of(CommandFinished), *world.sink.of(CommandUnfinished)]
            assert len(begun) == len(ends)
        if not was_cut:
            break
    assert number > least


@pytest.mark.parametrize("word", ClearingWord)
async def test_a_clearing_that_is_cancelled_at_any_step_is_done_or_can_be_done_again(
    tmp_path: Path, autojump_clock: MockClock, word: ClearingWord
) -> None:
    number = 0
    while True:
        number += 1
        assert number < STEPS_MAX
        async with open_world(tmp_path / str(number)) as world:
            handle = await world.environments.provision(WORKER, spec())
            name = handle.environment_id
            world.mechanism.script.destroy_failures = 3
            await world.destroy_unproven(handle)
            await trio.sleep(30)
            assert world.store.states() == {name: JournalState.QUARANTINED}
            clear = world.environments.clear_quarantine
            was_cut = await cut(number, lambda: clear(ADMIN, name, word))  # noqa: B023
            if world.store.states():
                await clear(ADMIN, name, word)
            assert world.store.states() == {}
        if not was_cut:
            break
    assert number > 2


async def test_a_reconciliation_that_is_cancelled_at_any_step_is_completed_by_the_next(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    number = 0
    while True:
        number += 1
        assert number < STEPS_MAX
        async with open_world(tmp_path / str(number)) as world:
            handle = await world.environments.provision(WORKER, spec())
            was_cut = await cut(number, lambda: reconcile(world, handle))  # noqa: B023
            await world.environments.reconcile()
            assert set(world.mechanism.existing) == {handle.environment_id}
            assert (await world.run(handle)).exit_code == 0
        if not was_cut:
            break
    assert number > 2
