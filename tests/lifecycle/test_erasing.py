"""What is dead and not erased yet: nobody waits for it, it is counted, and it takes its room."""

from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.audit.events import EnvironmentDestroyed, EnvironmentDestroyFailed
from sbxd.mechanism.protocol import Erasing
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from tests.lifecycle.double import Script
from tests.lifecycle.world import LIMITS, OTHER_WORKER, WORKER, open_world, spec

VOLUME_BYTES = LIMITS.workspace_bytes


@pytest.mark.case("PEER-30")
async def test_what_is_being_erased_delays_nobodys_end_and_is_no_quarantine(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(erases_later=True)) as world:
        hostile = [
            await world.environments.provision(WORKER, spec(run=f"run{number}"))
            for number in range(5)
        ]
        victim = await world.environments.provision(OTHER_WORKER, spec(tenant="victim"))
        began = trio.current_time()
        for each in hostile:
            await world.environments.destroy(WORKER, each)
        await world.environments.destroy(OTHER_WORKER, victim)
        await wait_all_tasks_blocked()
        assert trio.current_time() == began
        assert len(world.mechanism.dead) == 6, "the control: nothing is erased yet"
        described = await world.environments.describe()
        assert described.erasing == Erasing(6, 6 * VOLUME_BYTES)
        assert (described.environments, described.quarantined) == (0, ())
        assert world.store.states() == {}
        assert len(world.sink.of(EnvironmentDestroyed)) == 6
        assert world.sink.of(EnvironmentDestroyFailed) == []


async def test_erasing_takes_turns_between_the_tenants_of_each_worker(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(erases_later=True)) as world:
        one, same, other = [
            await world.environments.provision(WORKER, spec(run=run, tenant=tenant))
            for run, tenant in (("r1", "tenant-a"), ("r2", "tenant-a"), ("r3", "tenant-b"))
        ]
        foreign = await world.environments.provision(
            OTHER_WORKER, spec(run="r4", tenant="tenant-a")
        )
        for handle in (one, same, other):
            await world.environments.destroy(WORKER, handle)
        await world.environments.destroy(OTHER_WORKER, foreign)
        party = {name: dead[0] for name, dead in world.mechanism.dead.items()}
        assert party[one.environment_id] == party[same.environment_id]
        of_one = {party[each.environment_id] for each in (one, other, foreign)}
        assert len(of_one) == 3


async def test_a_request_waits_for_the_room_that_the_dead_still_have(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(
        tmp_path, script=Script(erases_later=True, disk_bytes=VOLUME_BYTES)
    ) as world:
        first = await world.environments.provision(WORKER, spec(run="first"))
        with pytest.raises(ExecutionUnavailable, match="no room for a workspace"):
            # The control: nothing is being erased, so there is nothing to wait for.
            await world.environments.provision(WORKER, spec(run="second"))
        await world.environments.destroy(WORKER, first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.environments.provision, WORKER, spec(run="third"))
            await trio.sleep(5)
            assert world.environments.census().states.get("LIVE") is None
            world.mechanism.erase(first.environment_id)
        assert world.environments.census().states == {"LIVE": 1}


async def test_a_wait_for_the_dead_is_within_the_start_budget(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(
        tmp_path, script=Script(erases_later=True, disk_bytes=VOLUME_BYTES)
    ) as world:
        first = await world.environments.provision(WORKER, spec(run="first"))
        await world.environments.destroy(WORKER, first)
        larger = msgspec.structs.replace(LIMITS, inodes_max=LIMITS.inodes_max - 1)
        with pytest.raises(ExecutionUnavailable) as caught:
            await world.environments.provision(WORKER, spec(run="second", limits=larger))
        assert caught.value.code is UnavailableCode.START_BUDGET_EXCEEDED


async def test_a_start_finds_what_the_last_run_left_to_be_erased(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(erases_later=True)) as world:
        handle = await world.environments.provision(WORKER, spec())
        await world.environments.destroy(WORKER, handle)
        await wait_all_tasks_blocked()
        report = await world.environments.reconcile()
        # It is no orphan, in the journal of nobody, and shown all the same.
        assert (report.destroyed, report.quarantined) == ((), ())
        assert (await world.environments.describe()).erasing.volumes == 1
        asked = world.mechanism.erasing_asked
        await world.environments.reap()
        assert world.mechanism.erasing_asked == asked + 1, "a pass begins the erasing again"
