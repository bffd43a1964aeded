"""The service is told to stop: who runs a command has a grace, everybody has an end."""

import errno
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.events import DestroyReason
from sbxd.mechanism.protocol import CommandExit, MechanismError
from sbxd.port.command import ExecutionResult, KillReason
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    ServiceShuttingDown,
    UnavailableCode,
)
from tests.lifecycle.double import Behaviour, Script
from tests.lifecycle.world import DEFAULT, WORKER, World, open_world, spec

GRACE_SECONDS = 20
SETTINGS = msgspec.structs.replace(
    DEFAULT,
    service=msgspec.structs.replace(DEFAULT.service, shutdown_grace_seconds=GRACE_SECONDS),
)
ENDS = CommandExit(exit_code=3, signal=None)


async def stopped(world: World, *behaviours: Behaviour) -> tuple[list[ExecutionResult], float]:
    """What becomes of commands that behave so when the service is stopped, and how long that
    takes. Each runs in an environment of its own, and one more environment is idle."""
    results: list[ExecutionResult] = []

    async def run(number: int, behaviour: Behaviour) -> None:
        handle = await world.environments.provision(WORKER, spec(run=f"run{number}"))
        results.append(await world.run(handle, behaviour))

    await world.environments.provision(WORKER, spec(run="idle"))
    async with trio.open_nursery() as nursery:
        for number, behaviour in enumerate(behaviours):
            nursery.start_soon(run, number, behaviour)
            await trio.testing.wait_all_tasks_blocked()
        begun = trio.current_time()
        await world.registry.shut_down(DestroyReason.SERVICE_SHUTDOWN)
        took = trio.current_time() - begun
    assert world.consistent_and_empty()
    return results, took


async def test_a_command_that_ends_within_the_grace_has_its_own_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=SETTINGS) as world:
        (result,), took = await stopped(world, Behaviour(seconds=7, exit=ENDS))
    assert (result.exit_code, result.killed_by) == (3, None)
    assert took == pytest.approx(7, abs=1), "nobody waits for the rest of the grace"


async def test_after_the_grace_a_command_is_killed_with_what_it_said_so_far(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    said = [(1.0, "stdout", b"partial")]
    async with open_world(tmp_path, settings=SETTINGS) as world:
        results, took = await stopped(
            world,
            Behaviour(seconds=1000, output=list(said)),
            Behaviour(seconds=2, exit=ENDS),
        )
    assert [(each.killed_by, each.stdout) for each in results] == [
        (None, b""),
        (KillReason.SERVICE_SHUTDOWN, b"partial"),
    ]
    assert took == pytest.approx(GRACE_SECONDS, abs=1)


async def test_nothing_new_is_begun_in_the_grace(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_world(tmp_path, settings=SETTINGS) as world:
        busy = await world.environments.provision(WORKER, spec(run="busy"))
        idle = await world.environments.provision(WORKER, spec(run="idle"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.run, busy, Behaviour(seconds=1000))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(world.registry.shut_down, DestroyReason.SERVICE_SHUTDOWN)
            await trio.sleep(1)
            with pytest.raises(ServiceShuttingDown):
                await world.environments.provision(WORKER, spec(run="new"))
            for handle in (busy, idle):
                with pytest.raises(ServiceShuttingDown):
                    await world.run(handle)
        assert world.consistent_and_empty()


@pytest.mark.parametrize("step", ["prepare", "assign"])
@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (DestroyReason.SERVICE_SHUTDOWN, UnavailableCode.SHUTTING_DOWN),
        (DestroyReason.SUPERSEDED, RejectedCode.STALE_LEASE),
        (DestroyReason.STALE_LEASE, RejectedCode.STALE_LEASE),
        (None, UnavailableCode.SETUP_FAILED),
    ],
)
async def test_what_is_ended_while_it_is_made_says_why_whatever_the_mechanism_then_fails_with(
    tmp_path: Path,
    autojump_clock: MockClock,
    step: str,
    reason: DestroyReason | None,
    told: UnavailableCode | RejectedCode,
) -> None:
    """Its limits, say, cannot be bound any more once its end has killed what they are for."""
    script = Script()
    async with open_world(tmp_path, script=script) as world:

        def end(name: str) -> None:
            if name == step:
                for each in world.registry.supervisors:
                    if reason is not None:
                        each.request_end(reason)
                raise MechanismError("scope", errno.ENOENT)

        script.on_call = end
        with pytest.raises((ExecutionUnavailable, ExecutionRejected)) as caught:
            await world.environments.provision(WORKER, spec())
        assert caught.value.code is told
        await trio.sleep(60)
        assert world.consistent_and_empty()


async def test_without_a_grace_everything_ends_at_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    none = msgspec.structs.replace(
        DEFAULT, service=msgspec.structs.replace(DEFAULT.service, shutdown_grace_seconds=0)
    )
    async with open_world(tmp_path, settings=none) as world:
        (result,), took = await stopped(world, Behaviour(seconds=1000))
    assert result.killed_by is KillReason.SERVICE_SHUTDOWN
    assert took == pytest.approx(0, abs=1)


async def test_what_does_not_end_is_left_to_the_next_start_and_the_stop_is_bounded(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(
        tmp_path, settings=SETTINGS, script=Script(destroy_seconds=10_000)
    ) as world:
        await world.environments.provision(WORKER, spec(run="stuck"))
        begun = trio.current_time()
        await world.registry.shut_down(DestroyReason.SERVICE_SHUTDOWN)
        assert trio.current_time() - begun <= GRACE_SECONDS + 20
        assert world.mechanism.existing
