"""What the lifecycle shows of itself while it runs: places, the pool, each environment's use."""

from pathlib import Path

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.audit.events import EnvironmentDestroyed
from sbxd.lifecycle.machine import State
from sbxd.mechanism.protocol import Counters
from sbxd.port.ids import EnvironmentId
from sbxd.service.observing import page_of
from sbxd.wire.observing import EnvironmentMeter
from tests.lifecycle.double import Behaviour, Script
from tests.lifecycle.world import ADMIN, WITH_RESERVE, WORKER, command, open_world, spec


def nobody(environment_id: EnvironmentId) -> int:
    return 0


def with_cpu(seconds: float | None, cpu_us: int) -> Behaviour:
    return Behaviour(seconds=seconds, counters=[(0.0, Counters(cpu_usage_us=cpu_us))])


async def test_a_meter_has_the_cpu_of_all_commands_the_running_one_included(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world, trio.open_nursery() as nursery:
        handle = await world.environments.provision(WORKER, spec())
        (idle,) = await world.environments.meters(nobody)
        assert (idle.cpu_ms, idle.program, idle.state) == (None, None, State.LIVE)
        await world.run(handle, with_cpu(1.0, 250_000))
        world.mechanism.script.behaviours.append(with_cpu(None, 500_000))
        nursery.start_soon(
            lambda: world.run(handle, ask=command("spin" * 100, "secret", timeout_seconds=20))
        )
        await trio.sleep(5)
        (meter,) = await world.environments.meters(lambda environment_id: 7)
        assert meter.cpu_ms == 750
        assert meter.memory_bytes == 4 << 20
        assert (meter.commands_run, meter.state, meter.denials) == (2, State.RUNNING, 7)
        assert meter.age_ms == 6000
        assert meter.program == b"spin" * 64, "the program's name alone, cut"
        nursery.cancel_scope.cancel()


async def test_a_census_counts_states_and_slots_by_age(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(prepare_seconds=1.0)
    async with open_world(tmp_path, settings=WITH_RESERVE, script=script) as world:
        await trio.sleep(10)
        await world.environments.provision(WORKER, spec())
        census = world.environments.census()
        assert census.states == {"LIVE": 1}
        assert census.pool.target == 2
        assert len(census.pool.ages_seconds) == 1
        assert census.pool.ages_seconds[0] >= 7
        await trio.sleep(10)
        assert len(world.environments.census().pool.ages_seconds) == 2


async def test_a_census_sums_what_idle_slots_hold_and_no_tenants_sandbox(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_RESERVE) as world:
        await trio.sleep(10)
        await world.environments.provision(WORKER, spec())
        await trio.sleep(10)
        slots = [each for each in world.registry.supervisors if each.tenant is None]
        assert world.environments.census().pool.memory_bytes == 2 * (4 << 20)
        world.mechanism.script.memory_bytes = None
        assert world.environments.census().pool.memory_bytes is None, "one that is not counted"
        assert len(slots) == 2


async def test_a_quarantined_environment_is_shown_as_that(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_failures=99)) as world:
        handle = await world.environments.provision(WORKER, spec())
        await world.destroy_unproven(handle)
        await trio.sleep(60)
        assert world.environments.census().states == {"QUARANTINED": 1}


async def test_a_destruction_is_timed_from_the_end_to_the_proof(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_seconds=2.0)) as world:
        handle = await world.environments.provision(WORKER, spec())
        await trio.sleep(30)
        await world.environments.destroy(ADMIN, handle)
        await wait_all_tasks_blocked()
        (event,) = world.sink.of(EnvironmentDestroyed)
        assert (event.destroying_ms, event.lifetime_ms) == (2000, 32_000)


def test_a_page_of_meters_fits_a_frame_and_pages_are_all_of_them() -> None:
    meter = EnvironmentMeter(
        environment_id=EnvironmentId("a" * 32),
        tenant_id=spec(tenant="t" * 128).tenant_id,
        run_id=spec(run="r" * 128).run_id,
        state="RUNNING",
        age_ms=1,
        commands_run=1,
        cpu_ms=1,
        cpu_millicores=1000,
        memory_bytes=1,
        memory_max_bytes=1,
        denials=0,
        program=b"\xff" * 256,
    )
    everything = [meter] * 3000
    seen = 0
    while page := page_of(everything, skip=seen):
        assert len(page) < 3000
        seen += len(page)
    assert seen == 3000
