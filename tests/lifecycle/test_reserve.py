"""The reserve: ready before anyone asks, used once, never in the way."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.audit.events import (
    DestroyReason,
    EnvironmentDestroyed,
    EnvironmentProvisioned,
    SlotOrigin,
)
from sbxd.lifecycle.journal import JournalState
from sbxd.lifecycle.reserve import fits
from sbxd.mechanism.protocol import SlotProfile
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import ExecutionUnavailable, PortError, StaleLease
from sbxd.port.limits import MIB
from tests.lifecycle.double import Behaviour, Script
from tests.lifecycle.world import IMAGE, LIMITS, WITH_RESERVE, WORKER, open_world, spec
from tests.pacing import next_look

VOLUME_BYTES = LIMITS.workspace_bytes


def test_a_slot_fits_when_image_and_volume_are_the_same() -> None:
    slot = SlotProfile(IMAGE, LIMITS)
    other = msgspec.structs.replace
    assert fits(slot, SlotProfile(IMAGE, other(LIMITS, memory_bytes=8 * MIB, pids_max=1)))
    assert not fits(slot, SlotProfile(IMAGE, other(LIMITS, workspace_bytes=32 * MIB)))
    assert not fits(slot, SlotProfile(IMAGE, other(LIMITS, inodes_max=17)))
    assert not fits(slot, SlotProfile("sha256:" + "b" * 64, LIMITS))


@pytest.mark.parametrize("name", ["cpu_millicores", "memory_bytes", "pids_max"])
def test_a_slot_never_becomes_more_than_its_scope_was_made_for(name: str) -> None:
    slot = SlotProfile(IMAGE, LIMITS)
    value = getattr(LIMITS, name)
    more, less = (msgspec.structs.replace(LIMITS, **{name: value + step}) for step in (1, -1))
    assert not fits(slot, SlotProfile(IMAGE, more))
    assert fits(slot, SlotProfile(IMAGE, less))


async def test_a_ready_slot_is_handed_out_without_preparing_and_replaced(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(prepare_seconds=3)
    async with open_world(tmp_path, settings=WITH_RESERVE, script=script) as world:
        await trio.sleep(10)
        assert (await world.environments.describe()).reserve_ready == 2
        assert set(world.store.states().values()) == {JournalState.PREPARING}
        began = trio.current_time()
        limits = msgspec.structs.replace(LIMITS, memory_bytes=16 * MIB)
        handle = await world.environments.provision(WORKER, spec(limits=limits))
        assert trio.current_time() == began
        assert world.store.states()[handle.environment_id] is JournalState.LIVE
        (event,) = world.sink.of(EnvironmentProvisioned)
        assert (event.origin, event.duration_ms) == (SlotOrigin.RESERVE, 0)
        assert world.mechanism.sandboxes[0].assigned == [limits]
        assert (await world.run(handle)).exit_code == 0
        await trio.sleep(10)
        assert (await world.environments.describe()).reserve_ready == 2


async def test_a_slot_that_does_not_fit_is_left_and_the_environment_is_built(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_RESERVE) as world:
        await trio.sleep(1)
        limits = msgspec.structs.replace(LIMITS, workspace_bytes=32 * MIB)
        await world.environments.provision(WORKER, spec(limits=limits))
        assert world.sink.of(EnvironmentProvisioned)[0].origin is SlotOrigin.COLD
        assert (await world.environments.describe()).reserve_ready == 2


async def test_a_slot_that_is_too_old_is_destroyed_and_replaced_unrecorded(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_RESERVE) as world:
        await trio.sleep(3601)
        await wait_all_tasks_blocked()
        await trio.sleep(1)
        assert [each.destroyed for each in world.mechanism.sandboxes] == [True, True, False, False]
        assert not world.sink.of(EnvironmentDestroyed)


async def test_a_slot_whose_init_dies_is_not_handed_out(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_RESERVE) as world:
        await trio.sleep(1)
        world.mechanism.sandboxes[0].lose("init")
        await wait_all_tasks_blocked()
        handle = await world.environments.provision(WORKER, spec())
        assert handle.environment_id != world.mechanism.sandboxes[0].environment_id
        assert (await world.run(handle)).exit_code == 0


async def test_a_refused_epoch_gives_the_slot_back_untouched(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_RESERVE) as world:
        await trio.sleep(1)
        await world.environments.provision(WORKER, spec(epoch=2))
        await trio.sleep(1)
        prepared = len(world.mechanism.sandboxes)
        for _attempt in range(5):
            with pytest.raises(StaleLease):
                await world.environments.provision(WORKER, spec(epoch=1))
        await trio.sleep(1)
        assert (await world.environments.describe()).reserve_ready == 2
        assert len(world.mechanism.sandboxes) == prepared


async def test_filling_waits_for_a_pause_but_not_for_long(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_RESERVE) as world:
        await trio.sleep(1)
        handle = await world.environments.provision(WORKER, spec())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.run, handle, Behaviour(seconds=0.05))
            await wait_all_tasks_blocked()
            await world.environments.provision(WORKER, spec(run="another"))
            ready = (await world.environments.describe()).reserve_ready
            await trio.sleep(0.01)
            assert (await world.environments.describe()).reserve_ready == ready
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.run, handle, Behaviour(seconds=10.0))
            await trio.sleep(1)
            assert (await world.environments.describe()).reserve_ready == 2


async def test_a_preparation_that_keeps_failing_is_retried_ever_more_slowly(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    times: list[float] = []

    script = Script()
    async with open_world(tmp_path, settings=WITH_RESERVE, script=script) as world:

        def fail(name: str) -> None:
            if name == "prepare":
                times.append(trio.current_time())
                script.fail_at = len(world.mechanism.calls)

        script.on_call = fail
        await trio.sleep(200)
        pauses = [later - earlier for earlier, later in pairwise(times)]
        assert pauses[:5] == [1, 2, 4, 8, 16]
        assert max(pauses) <= 60


async def test_an_image_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    known: set[str] = set()
    async with open_world(
        tmp_path, settings=WITH_RESERVE, known_images=lambda: sorted(known)
    ) as world:
        await trio.sleep(100)
        assert world.mechanism.calls == []
        known.add(IMAGE)
        world.registry.reserve.wake()
        await trio.sleep(2)
        assert (await world.environments.describe()).reserve_ready == 2


async def test_slots_of_an_image_that_is_removed_give_way(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    known = {IMAGE}
    async with open_world(
        tmp_path, settings=WITH_RESERVE, known_images=lambda: sorted(known)
    ) as world:
        await trio.sleep(100)
        assert world.registry.images_in_use() == {}
        assert world.registry.images_reserved() == {IMAGE: 2}
        assert (await world.environments.describe()).reserve_ready == 2
        known.clear()
        with trio.fail_after(30):
            await world.registry.wait_image_free(IMAGE)
        described = await world.environments.describe()
        assert (described.reserve_ready, described.reserve_target) == (0, 0)
        assert world.mechanism.existing == {}


async def test_an_image_is_free_for_its_removal_once_its_environment_is_proven_gone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Whoever destroyed it has its answer, and its record is not taken yet."""
    known = {IMAGE}
    async with open_world(tmp_path, known_images=lambda: sorted(known)) as world:
        handle = await world.environments.provision(WORKER, spec())
        assert world.registry.images_in_use() == {IMAGE: 1}
        world.sink.fail()
        await world.environments.destroy(WORKER, handle)
        assert world.registry.images_in_use() == {}
        known.clear()
        with trio.move_on_after(30) as waited:
            await world.registry.wait_image_free(IMAGE)
        assert waited.cancelled_caught, "it has its place until its end is recorded"
        world.sink.recover()
        with trio.fail_after(300):
            await world.registry.wait_image_free(IMAGE)


async def test_slots_give_way_to_a_volume_that_has_no_room_beside_theirs(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(disk_bytes=2 * VOLUME_BYTES, destroy_seconds=2)
    async with open_world(tmp_path, settings=WITH_RESERVE, script=script) as world:
        await trio.sleep(1)
        oldest, newest = world.mechanism.sandboxes
        smaller = msgspec.structs.replace(LIMITS, workspace_bytes=VOLUME_BYTES - MIB)
        handle = await world.environments.provision(WORKER, spec(limits=smaller))
        assert (oldest.destroyed, newest.destroyed) == (True, False), "no more than is needed"
        assert (await world.run(handle)).exit_code == 0
        # The control: there is no room for a third, and what holds the room is nobody's to end.
        another = await world.environments.provision(WORKER, spec(run="another"))
        with pytest.raises(ExecutionUnavailable, match="no room for a workspace"):
            await world.environments.provision(WORKER, spec(run="a third"))
        assert (await world.run(another)).exit_code == 0
        await world.environments.destroy(WORKER, handle)
        await world.environments.destroy(WORKER, another)
        await trio.sleep(120)
        assert (await world.environments.describe()).reserve_ready == 2, "the pool is filled again"


async def test_a_tenant_that_asks_for_what_the_disk_has_not_does_not_keep_the_pool_empty(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(disk_bytes=2 * VOLUME_BYTES)
    hopeless = msgspec.structs.replace(LIMITS, workspace_bytes=2 * VOLUME_BYTES + MIB)
    fitting = msgspec.structs.replace(LIMITS, workspace_bytes=2 * VOLUME_BYTES - MIB)
    async with open_world(tmp_path, settings=WITH_RESERVE, script=script) as world:
        await trio.sleep(1)
        with pytest.raises(ExecutionUnavailable, match="no room for a workspace"):
            await world.environments.provision(WORKER, spec(limits=hopeless))
        assert [each.destroyed for each in world.mechanism.sandboxes] == [True, True]
        await trio.sleep(10)
        filled = world.mechanism.sandboxes[2:]
        assert len(filled) == 2
        for limits in (hopeless, fitting):
            with pytest.raises(ExecutionUnavailable, match="no room for a workspace"):
                await world.environments.provision(WORKER, spec(limits=limits))
        assert not any(each.destroyed for each in filled)
        # The controls: another tenant's request gets the room, and so does this one's later.
        handle = await world.environments.provision(WORKER, spec(tenant="b", limits=fitting))
        await world.environments.destroy(WORKER, handle)
        await trio.sleep(120)
        await world.environments.provision(WORKER, spec(limits=fitting))


async def test_a_request_that_has_no_room_beside_the_slot_in_the_making_gets_that_one(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(disk_bytes=VOLUME_BYTES, prepare_seconds=3)
    async with open_world(tmp_path, settings=WITH_RESERVE, script=script) as world:
        await trio.sleep(1)
        assert (await world.environments.describe()).reserve_ready == 0
        handle = await world.environments.provision(WORKER, spec())
        (event,) = world.sink.of(EnvironmentProvisioned)
        assert event.origin is SlotOrigin.RESERVE
        assert handle.environment_id == world.mechanism.sandboxes[0].environment_id
        assert trio.current_time() >= 3


async def test_a_refusal_that_cost_no_slot_is_not_held_against_the_tenant(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(disk_bytes=2 * VOLUME_BYTES)
    smaller = msgspec.structs.replace(LIMITS, workspace_bytes=VOLUME_BYTES - MIB)
    async with open_world(tmp_path, settings=WITH_RESERVE, script=script) as world:
        await trio.sleep(1)
        first = await world.environments.provision(WORKER, spec(run="first"))
        await world.environments.provision(WORKER, spec(run="second"))
        with pytest.raises(ExecutionUnavailable, match="no room for a workspace"):
            await world.environments.provision(WORKER, spec(run="third", limits=smaller))
        await world.environments.destroy(WORKER, first)
        with trio.fail_after(30):
            while world.registry.reserve.ready == 0:
                await next_look()
        await world.environments.provision(WORKER, spec(run="third", limits=smaller))
        assert world.registry.reserve.ready == 0, "the slot has given way"


async def test_a_tenant_that_asked_in_vain_still_gets_the_slot_in_the_making(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(disk_bytes=VOLUME_BYTES, prepare_seconds=3)
    hopeless = msgspec.structs.replace(LIMITS, workspace_bytes=VOLUME_BYTES + MIB)
    async with open_world(tmp_path, settings=WITH_RESERVE, script=script) as world:
        with pytest.raises(ExecutionUnavailable, match="no room for a workspace"):
            await world.environments.provision(WORKER, spec(limits=hopeless))
        with trio.fail_after(30):
            # Until it has the room: a request that came before that would take it, and build.
            while not (world.registry.reserve.status().building and world.mechanism.volumes):
                await next_look()
        assert world.registry.reserve.ready == 0
        await world.environments.provision(WORKER, spec())
        (event,) = world.sink.of(EnvironmentProvisioned)
        assert event.origin is SlotOrigin.RESERVE


async def test_a_request_that_is_given_up_while_slots_give_way_holds_nothing_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(disk_bytes=2 * VOLUME_BYTES, destroy_seconds=5)
    async with open_world(tmp_path, settings=WITH_RESERVE, script=script) as world:
        await trio.sleep(1)
        larger = msgspec.structs.replace(LIMITS, workspace_bytes=VOLUME_BYTES + MIB)
        with trio.move_on_after(1) as given_up:
            await world.environments.provision(WORKER, spec(limits=larger))
        assert given_up.cancelled_caught
        assert [each.destroyed for each in world.mechanism.sandboxes] == [False, False]
        await trio.sleep(120)
        assert [each.destroyed for each in world.mechanism.sandboxes][:2] == [True, True]
        assert (await world.environments.describe()).reserve_ready == 2, "the pool is filled again"


steps = st.lists(
    st.one_of(
        st.tuples(st.just("provision"), st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.just("destroy"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 4000), st.just(0)),
        st.tuples(st.just("release"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps, st.integers(0, 3))
@pytest.mark.case("LIF-12")
def test_no_slot_is_ever_handed_out_twice_and_nothing_is_left(
    tmp_path_factory: pytest.TempPathFactory, some: list[tuple[str, int, int]], failures: int
) -> None:
    async def live() -> None:
        handed: list[EnvironmentHandle] = []
        directory = tmp_path_factory.mktemp("world")
        script = Script(destroy_failures=min(failures, 2))
        async with open_world(directory, settings=WITH_RESERVE, script=script) as world:
            for verb, number, epoch in some:
                if verb == "provision":
                    try:
                        handed.append(
                            await world.environments.provision(
                                WORKER, spec(run=f"run{number}", epoch=epoch)
                            )
                        )
                    except PortError:
                        continue
                elif verb == "destroy" and handed:
                    try:
                        await world.environments.destroy(WORKER, handed[number % len(handed)])
                    except PortError:
                        continue
                elif verb == "lose" and world.mechanism.sandboxes:
                    world.mechanism.sandboxes[number % len(world.mechanism.sandboxes)].lose("init")
                elif verb == "release":
                    world.environments.release_owner(WORKER.connection_id)
                else:
                    await trio.sleep(number)
            names = [handle.environment_id for handle in handed]
            assert len(names) == len(set(names))
            for sandbox in world.mechanism.sandboxes:
                assert len(sandbox.assigned) <= 1
            live_runs: dict[str, set[int]] = {}
            for info in await world.environments.list():
                if info.state == "LIVE":
                    live_runs.setdefault(info.handle.run_id, set()).add(info.handle.lease_epoch)
            assert all(len(epochs) == 1 for epochs in live_runs.values())
            await world.registry.shut_down(DestroyReason.SERVICE_SHUTDOWN)
            assert world.consistent_and_empty()

    trio.run(live, clock=MockClock(autojump_threshold=0))
