"""Whatever fails, and wherever a caller is cut off: nothing is left and the books agree.

Each loop goes on until the fault no longer happens, so it covers every place where it can.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import trio
from trio.testing import MockClock

from sbxd.audit.events import (
    CommandFinished,
    CommandStarted,
    CommandUnfinished,
    DestroyReason,
    EnvironmentDestroyed,
    EnvironmentProvisioned,
)
from sbxd.mechanism.protocol import CommandExit
from sbxd.port.errors import PortError
from tests.lifecycle.double import Behaviour, Script
from tests.lifecycle.world import WITH_RESERVE, WORKER, World, open_world, spec


async def a_life(world: World) -> None:
    """Provision, run a command that writes and one that is killed, destroy."""
    handle = await world.environments.provision(WORKER, spec())
    await world.run(handle, Behaviour(seconds=0.0, output=[(0.0, "stdout", b"x" * 10)]))
    await world.run(handle, Behaviour(output=[(0.0, "stderr", b"x" * 2000)]))
    await world.environments.destroy(WORKER, handle)


async def forget_the_caller(world: World) -> None:
    """The caller's connection ends, and all the time in the world passes."""
    world.environments.release_owner(WORKER.connection_id)
    await trio.sleep(1000)


def assert_nothing_is_left(world: World) -> None:
    assert world.consistent_and_empty()
    sink = world.sink
    begun = {(event.environment_id, event.command_number) for event in sink.of(CommandStarted)}
    ends: list[CommandFinished | CommandUnfinished] = [
        *sink.of(CommandFinished),
        *sink.of(CommandUnfinished),
    ]
    over = [(event.environment_id, event.command_number) for event in ends]
    assert len(over) == len(set(over))
    assert begun == set(over)
    provisioned = [event.environment_id for event in sink.of(EnvironmentProvisioned)]
    destroyed = [event.environment_id for event in sink.of(EnvironmentDestroyed)]
    # An end is recorded also of what was cut off while its beginning was being recorded.
    assert set(provisioned) <= set(destroyed)
    assert len(destroyed) == len(set(destroyed))
    for sandbox in world.mechanism.sandboxes:
        assert sandbox.destroyed
        assert all(running.killed and running.closed for running in sandbox.commands)


async def test_a_caller_that_is_cut_off_anywhere_leaves_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    steps = 0
    while True:
        async with open_world(tmp_path / str(steps)) as world:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:

                    async def cut_off() -> None:
                        for _step in range(steps):  # noqa: B023
                            await trio.lowlevel.checkpoint()
                        scope.cancel()

                    nursery.start_soon(cut_off)
                    await a_life(world)
                    nursery.cancel_scope.cancel()
            await forget_the_caller(world)
            assert_nothing_is_left(world)
        if not scope.cancelled_caught:
            break
        steps += 1
    assert steps > 20  # the loop has covered something


async def run_with_faults(directory: Path, open_faulty: Callable[[int], Script | int]) -> int:
    """Lives with the n-th fault, until a life does not come so far. Returns n."""
    number = 1
    while True:
        fault = open_faulty(number)
        async with open_world(
            directory / str(number), script=fault if isinstance(fault, Script) else None
        ) as world:
            try:
                await a_life(world)
                failed = False
            except PortError:
                failed = True
            await forget_the_caller(world)
            assert_nothing_is_left(world)
            if len(world.mechanism.calls) < number:
                assert not failed
                return number
        number += 1


async def test_a_mechanism_that_fails_at_any_call_leaves_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    assert await run_with_faults(tmp_path, lambda number: Script(fail_at=number)) > 8


async def test_a_journal_that_fails_at_any_write_leaves_nothing_in_the_kernel(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    number = 1
    while True:
        async with open_world(tmp_path / str(number), fail_write_at=number) as world:
            with suppress(PortError):
                await a_life(world)
            await forget_the_caller(world)
            writes = world.store.writes
            # What the journal did not take stands as an intent, which the next start resolves.
            assert not world.mechanism.existing
            assert not world.registry.owned()
            await world.environments.reconcile()
            assert_nothing_is_left(world)
            if writes < number:
                break
        number += 1
    assert number > 3


async def test_an_audit_log_that_misses_any_event_leaves_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    number = 1
    while True:
        async with open_world(tmp_path / str(number), fail_emit_at=number) as world:
            try:
                await a_life(world)
                failed = False
            except PortError:
                failed = True
            await forget_the_caller(world)
            emits = world.sink.emits
            assert world.consistent_and_empty()
            # An event of an ending is repeated; every other makes the call fail.
            assert failed or len(world.sink.of(EnvironmentDestroyed)) == 1
            if emits < number:
                break
        number += 1
    assert number > 5


async def test_the_reserve_leaves_nothing_when_it_is_shut_down_at_any_moment(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    for steps in range(40):
        script = Script(behaviours=[Behaviour(exit=CommandExit(exit_code=0, signal=None))])
        async with open_world(tmp_path / str(steps), settings=WITH_RESERVE, script=script) as world:
            for _step in range(steps):
                await trio.lowlevel.checkpoint()
            await world.registry.shut_down(DestroyReason.SERVICE_SHUTDOWN)
            await trio.sleep(1000)
            assert world.consistent_and_empty()
