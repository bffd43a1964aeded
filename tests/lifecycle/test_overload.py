"""More than there is room for: refused with a time, in turn between tenants, and never for ever."""

from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from tests.lifecycle.double import Script
from tests.lifecycle.world import DEFAULT, WORKER, World, open_world, spec

PLACES = 2
FEW = msgspec.structs.replace(
    DEFAULT,
    limits=msgspec.structs.replace(
        DEFAULT.limits, environments_max=PLACES, environments_per_peer_max=PLACES
    ),
)


async def filled(world: World) -> list[EnvironmentHandle]:
    return [
        await world.environments.provision(WORKER, spec(run=f"first{n}")) for n in range(PLACES)
    ]


async def test_a_full_house_is_refused_with_the_time_until_a_place_may_be_free(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=FEW) as world:
        await filled(world)
        with pytest.raises(ExecutionUnavailable) as refused:
            await world.environments.provision(WORKER, spec(run="late"))
        assert refused.value.code is UnavailableCode.CAPACITY
        assert refused.value.retry_after_seconds == 30.0
        await trio.sleep(FEW.limits.environment_lifetime_seconds - 7)
        with pytest.raises(ExecutionUnavailable) as later:
            await world.environments.provision(WORKER, spec(run="later"))
        assert later.value.retry_after_seconds == pytest.approx(7.0)


async def test_a_place_that_is_given_up_goes_to_tenants_in_turn(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(destroy_seconds=5.0)
    async with open_world(tmp_path, settings=FEW, script=script) as world:
        first = await filled(world)
        order: list[str] = []

        async def ask(tenant: str, number: int) -> None:
            handle = await world.environments.provision(
                WORKER, spec(tenant=tenant, run=f"{tenant}{number}")
            )
            order.append(tenant)
            await world.environments.destroy(WORKER, handle)

        async with trio.open_nursery() as nursery:
            for handle in first:
                nursery.start_soon(world.environments.destroy, WORKER, handle)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(4):
                nursery.start_soon(ask, "greedy", number)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, "modest", 0)
        assert sorted(order) == ["greedy"] * 4 + ["modest"]
        # Two places are free at once: one for each.
        assert "modest" in order[:PLACES]
        await trio.sleep(1)
        assert world.consistent_and_empty()


async def test_the_queue_of_one_tenant_is_bounded_and_leaves_room_for_another(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbxd.lifecycle.provision.WAITING_OF_TENANT_MAX", 3)
    script = Script(destroy_seconds=5.0)
    async with open_world(tmp_path, settings=FEW, script=script) as world:
        first = await filled(world)
        codes: list[tuple[str, str, float | None]] = []
        served: list[str] = []

        async def ask(tenant: str, number: int) -> None:
            try:
                handle = await world.environments.provision(
                    WORKER, spec(tenant=tenant, run=f"{tenant}{number}")
                )
            except ExecutionUnavailable as error:
                codes.append((tenant, error.code, error.retry_after_seconds))
            else:
                served.append(tenant)
                await world.environments.destroy(WORKER, handle)

        async with trio.open_nursery() as nursery:
            for handle in first:
                nursery.start_soon(world.environments.destroy, WORKER, handle)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(8):
                nursery.start_soon(ask, "greedy", number)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, "modest", 0)
        assert codes == [("greedy", "CAPACITY", 1.0)] * 5
        assert sorted(served) == ["greedy"] * 3 + ["modest"]


async def test_one_who_stops_waiting_holds_nobody(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(destroy_seconds=5.0)
    async with open_world(tmp_path, settings=FEW, script=script) as world:
        first = await filled(world)
        async with trio.open_nursery() as nursery:
            for handle in first:
                nursery.start_soon(world.environments.destroy, WORKER, handle)
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(1) as impatient:
                await world.environments.provision(WORKER, spec(run="impatient"))
            assert impatient.cancelled_caught
            await world.environments.provision(WORKER, spec(run="patient"))
        assert len(world.mechanism.existing) == 1


async def test_memory_that_is_promised_is_a_bound_of_its_own_with_a_time_to_ask_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    two = msgspec.structs.replace(
        DEFAULT.limits, memory_committed_max_bytes=2 * spec().limits.memory_bytes
    )
    settings = msgspec.structs.replace(DEFAULT, limits=two)
    script = Script(destroy_seconds=5.0)
    async with open_world(tmp_path, settings=settings, script=script) as world:
        first = await filled(world)
        with pytest.raises(ExecutionUnavailable) as refused:
            await world.environments.provision(WORKER, spec(run="late"))
        assert refused.value.code is UnavailableCode.CAPACITY
        assert refused.value.retry_after_seconds == 30.0
        assert "bytes of memory are promised" in refused.value.detail
        half = msgspec.structs.replace(spec().limits, memory_bytes=spec().limits.memory_bytes // 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.environments.destroy, WORKER, first[0])
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
            await world.environments.provision(WORKER, spec(run="one", limits=half))
            await world.environments.provision(WORKER, spec(run="two", limits=half))
        assert trio.current_time() - began == 5.0, "what is ending is promised until it is over"
        with pytest.raises(ExecutionUnavailable):
            await world.environments.provision(WORKER, spec(run="three", limits=half))


async def test_a_start_that_waited_too_long_for_a_place_says_so(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(destroy_seconds=12.0, prepare_seconds=0.0)
    async with open_world(tmp_path, settings=FEW, script=script) as world:
        first = await filled(world)
        async with trio.open_nursery() as nursery:
            for handle in first:
                nursery.start_soon(world.environments.destroy, WORKER, handle)
            await trio.testing.wait_all_tasks_blocked()
            script.prepare_seconds = 25.0
            with pytest.raises(ExecutionUnavailable) as late:
                await world.environments.provision(WORKER, spec(run="late"))
        assert late.value.code is UnavailableCode.START_BUDGET_EXCEEDED
        assert late.value.detail.endswith(
            "building the environment took 18.0 s and was not over, waiting for a place took 12.0 s"
        )
