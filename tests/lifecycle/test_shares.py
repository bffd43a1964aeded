"""Who is told which share of a busy host, and when."""

from pathlib import Path

import trio
from trio.testing import MockClock

from sbxd.lifecycle.shares import PACE_SECONDS
from sbxd.mechanism.protocol import MechanismError
from tests.lifecycle.double import Behaviour, Script
from tests.lifecycle.world import OTHER_WORKER, WORKER, open_world, spec


async def test_a_tenant_with_three_gets_as_much_as_one_with_one(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handles = [
            await world.environments.provision(WORKER, spec(tenant=tenant, run=f"run-{number}"))
            for number, tenant in enumerate(("many", "many", "many", "one"))
        ]
        async with trio.open_nursery() as nursery:
            for handle in handles:
                nursery.start_soon(world.run, handle, Behaviour(seconds=10))
        ids = [handle.environment_id for handle in handles]
        given: dict[str, int] = {}
        for sent in world.mechanism.shares:
            given |= sent  # type: ignore[arg-type]
        assert [given.get(each, 10_000) for each in ids] == [3333, 3333, 3333, 10_000]


async def test_one_tenant_alone_costs_nobody_a_message(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handles = [
            await world.environments.provision(WORKER, spec(tenant="many", run=f"run-{number}"))
            for number in range(4)
        ]
        async with trio.open_nursery() as nursery:
            for handle in handles:
                nursery.start_soon(world.run, handle, Behaviour(seconds=10))
    assert world.mechanism.shares == []


async def test_the_same_name_of_two_workers_is_two_tenants(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        mine = [
            await world.environments.provision(WORKER, spec(tenant="same", run=f"run-{number}"))
            for number in range(2)
        ]
        theirs = await world.environments.provision(OTHER_WORKER, spec(tenant="same"))
        async with trio.open_nursery() as nursery:
            for handle in mine:
                nursery.start_soon(world.run, handle, Behaviour(seconds=10))
            behaviour = Behaviour(seconds=10)
            nursery.start_soon(lambda: world.run(theirs, behaviour, peer=OTHER_WORKER))
    given: dict[str, int] = {}
    for sent in world.mechanism.shares:
        given |= sent  # type: ignore[arg-type]
    assert given == {each.environment_id: 5000 for each in mine}


async def test_a_flood_of_short_commands_is_one_message_a_second(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        long = await world.environments.provision(WORKER, spec(tenant="one", run="long"))
        handles = [
            await world.environments.provision(WORKER, spec(tenant="many", run=f"run-{number}"))
            for number in range(3)
        ]

        async def flood(handle: object) -> None:
            for _ in range(100):
                await world.run(handle, Behaviour(seconds=0.1))  # type: ignore[arg-type]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.run, long, Behaviour(seconds=10))
            for handle in handles:
                nursery.start_soon(flood, handle)
            begun = trio.current_time()
        lasted = trio.current_time() - begun
    assert 1 <= len(world.mechanism.shares) <= lasted / PACE_SECONDS + 2


async def test_a_round_that_fails_is_repeated(tmp_path: Path, autojump_clock: MockClock) -> None:
    failures = 2

    def fail(name: str) -> None:
        nonlocal failures
        if name == "share" and failures:
            failures -= 1
            raise MechanismError("share", 5)

    async with open_world(tmp_path, script=Script(on_call=fail)) as world:
        handles = [
            await world.environments.provision(WORKER, spec(tenant=tenant, run=f"run-{number}"))
            for number, tenant in enumerate(("many", "many", "one"))
        ]
        async with trio.open_nursery() as nursery:
            for handle in handles:
                nursery.start_soon(world.run, handle, Behaviour(seconds=10))
        many = [handle.environment_id for handle in handles[:2]]
    assert failures == 0
    assert dict.fromkeys(many, 5000) in world.mechanism.shares
