"""The pool's size follows what is asked for, within the operator's bounds; and what it tells."""

from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.events import DestroyReason, EnvironmentProvisioned, SlotOrigin
from sbxd.lifecycle.pool import PoolStatus
from sbxd.lifecycle.reserve import KINDS_MAX, fits
from sbxd.mechanism.protocol import SlotProfile, VolumeBinding
from sbxd.policy.pool import REFILL_SECONDS_ASSUMED
from sbxd.port.limits import MIB, ResourceLimits
from sbxd.port.network import NetworkShape
from sbxd.settings import ReserveSettings
from tests.lifecycle.double import Script
from tests.lifecycle.world import DEFAULT, IMAGE, LIMITS, WORKER, World, open_world, spec

GROWING = msgspec.structs.replace(
    DEFAULT,
    limits=msgspec.structs.replace(
        DEFAULT.limits, environments_max=100, environments_per_peer_max=100
    ),
    reserve=ReserveSettings(slots=2, slots_max=6),
)
OTHER_VOLUME = msgspec.structs.replace(LIMITS, workspace_bytes=32 * MIB)


async def burst(world: World, count: int, limits: ResourceLimits = LIMITS) -> list[SlotOrigin]:
    """So many requests at once; where each came from."""
    before = len(world.sink.of(EnvironmentProvisioned))
    async with trio.open_nursery() as nursery:
        for number in range(count):
            one = spec(run=f"run{trio.current_time()}{number}", limits=limits)
            nursery.start_soon(world.environments.provision, WORKER, one)
    return [each.origin for each in world.sink.of(EnvironmentProvisioned)[before:]]


async def test_a_burst_makes_the_pool_ready_for_the_next_and_it_shrinks_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(prepare_seconds=0.3)
    async with open_world(tmp_path, settings=GROWING, script=script) as world:
        await trio.sleep(5)
        assert world.registry.reserve.ready == 2
        assert (await burst(world, 5)).count(SlotOrigin.RESERVE) == 2
        await trio.sleep(10)
        status = world.registry.reserve.status()
        assert (status.wanted, status.ready) == (5, 5)
        assert await burst(world, 5) == [SlotOrigin.RESERVE] * 5
        assert await burst(world, 50) != [SlotOrigin.RESERVE] * 50
        await trio.sleep(10)
        assert world.registry.reserve.ready == 6
        await trio.sleep(3000)
        status = world.registry.reserve.status()
        assert (status.wanted, status.ready) == (2, 2)
        assert world.mechanism.existing.keys() <= world.registry.owned()


async def test_another_volume_is_a_kind_of_its_own_once_it_is_asked_for_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=GROWING) as world:
        await trio.sleep(1)
        assert await burst(world, 1, OTHER_VOLUME) == [SlotOrigin.COLD]
        await trio.sleep(1)
        assert world.registry.reserve.ready == 2
        assert await burst(world, 1, OTHER_VOLUME) == [SlotOrigin.COLD]
        await trio.sleep(1)
        assert await burst(world, 1, OTHER_VOLUME) == [SlotOrigin.RESERVE]
        (default, other) = world.registry.reserve.status().keys
        assert (default.hits, default.misses) == (0, 0)
        assert (other.hits, other.misses) == (1, 2)
        assert other.key.workspace_bytes == OTHER_VOLUME.workspace_bytes
        await trio.sleep(3000)
        assert [each.ready for each in world.registry.reserve.status().keys] == [2, 0]


async def test_a_quota_of_the_volume_is_bound_at_the_hand_out(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(volume_binding=VolumeBinding.AT_HAND_OUT)
    async with open_world(tmp_path, settings=GROWING, script=script) as world:
        await trio.sleep(1)
        assert await burst(world, 1, OTHER_VOLUME) == [SlotOrigin.RESERVE]
        assert world.mechanism.sandboxes[0].assigned == [OTHER_VOLUME]
        larger = msgspec.structs.replace(LIMITS, workspace_bytes=128 * MIB)
        assert await burst(world, 1, larger) == [SlotOrigin.COLD]


async def test_limits_up_to_the_ceilings_are_bound_at_the_hand_out(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    ceilings = GROWING.limits.ceilings
    larger = msgspec.structs.replace(
        LIMITS,
        cpu_millicores=ceilings.cpu_millicores,
        memory_bytes=ceilings.memory_bytes,
        pids_max=ceilings.pids_max,
    )
    async with open_world(tmp_path, settings=GROWING) as world:
        await trio.sleep(1)
        assert await burst(world, 1, larger) == [SlotOrigin.RESERVE]
        assert world.mechanism.sandboxes[0].assigned == [larger]


def test_a_slot_without_ceilings_is_handed_out_with_no_more_than_its_limits() -> None:
    more = msgspec.structs.replace(LIMITS, pids_max=LIMITS.pids_max + 1)
    assert fits(SlotProfile(IMAGE, LIMITS, ceilings=more), SlotProfile(IMAGE, more))
    assert not fits(SlotProfile(IMAGE, LIMITS), SlotProfile(IMAGE, more))


def test_where_the_memory_limit_is_built_in_a_slot_fits_no_other() -> None:
    more = msgspec.structs.replace(LIMITS, memory_bytes=2 * LIMITS.memory_bytes)
    slot = SlotProfile(IMAGE, LIMITS, ceilings=more)
    assert fits(slot, SlotProfile(IMAGE, more))
    assert not fits(slot, SlotProfile(IMAGE, more), memory_is_built_in=True)
    assert fits(slot, SlotProfile(IMAGE, LIMITS), memory_is_built_in=True)


def test_a_proxys_port_is_given_up_but_not_had_later() -> None:
    port = NetworkShape.PROXY_PORT
    assert fits(SlotProfile(IMAGE, LIMITS, port), SlotProfile(IMAGE, LIMITS))
    assert not fits(SlotProfile(IMAGE, LIMITS), SlotProfile(IMAGE, LIMITS, port))


async def test_what_others_ask_for_never_takes_the_default_kinds_slots(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=GROWING) as world:
        await trio.sleep(1)
        for size in range(17, 17 + 3 * KINDS_MAX):
            other = msgspec.structs.replace(LIMITS, workspace_bytes=size * MIB)
            await burst(world, 2, other)
            await trio.sleep(0.1)
        await trio.sleep(5)
        status = world.registry.reserve.status()
        assert len(status.keys) <= KINDS_MAX
        assert status.ready <= GROWING.reserve.most
        assert await burst(world, 2) == [SlotOrigin.RESERVE] * 2


async def test_the_status_counts_hits_misses_and_ages(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    script = Script(prepare_seconds=1)
    async with open_world(tmp_path, settings=GROWING, script=script) as world:
        await trio.sleep(20)
        await burst(world, 3)
        status = world.registry.reserve.status()
        assert (status.hits, status.misses) == (2, 1)
        assert status.age_counts == (0, 0, 2, 0, 0, 0, 0)
        assert status.age_seconds_sum == pytest.approx(39, abs=1.1)
        assert (status.slots_min, status.slots_max) == (2, 6)
        await trio.sleep(20)
        status = world.registry.reserve.status()
        assert (status.built, status.failed) == (status.hits + status.ready, 0)
        (kind,) = status.keys
        assert kind.key.image_digest == IMAGE
        assert (kind.hits, kind.misses, kind.ready, kind.building) == (2, 1, kind.wanted, 0)
        assert kind.refill_seconds > REFILL_SECONDS_ASSUMED
        assert kind.oldest_ready_seconds is not None
        assert kind.oldest_ready_seconds <= 21  # from the beginning of its building


async def test_slots_that_end_unused_are_counted_whatever_for(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=GROWING) as world:
        await trio.sleep(GROWING.reserve.age_max_seconds + 1)
        assert world.registry.reserve.status().discarded == 2
        world.mechanism.sandboxes[-1].lose("init")
        await trio.sleep(1)
        status = world.registry.reserve.status()
        assert (status.discarded, status.ready, status.hits) == (3, 2, 0)


async def test_without_a_default_image_a_kind_has_the_operators_limits(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    no_default = msgspec.structs.replace(
        GROWING, images=msgspec.structs.replace(GROWING.images, default=None, aliases={})
    )
    small = msgspec.structs.replace(LIMITS, memory_bytes=8 * MIB, pids_max=1)
    async with open_world(tmp_path, settings=no_default) as world:
        for _ in range(3):
            await burst(world, 1, small)
            await trio.sleep(1)
        assert await burst(world, 1) == [SlotOrigin.RESERVE]
        assert world.mechanism.sandboxes[-1].profile.limits == LIMITS


async def test_a_refused_epoch_is_no_demand(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_world(tmp_path, settings=GROWING) as world:
        await trio.sleep(1)
        await world.environments.provision(WORKER, spec(epoch=2))
        for _attempt in range(5):
            with pytest.raises(Exception, match="lease_epoch"):
                await world.environments.provision(WORKER, spec(epoch=1))
        assert world.registry.reserve.status().hits == 1


async def test_a_pool_of_none_keeps_nothing_whatever_is_asked_for(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=DEFAULT) as world:
        await burst(world, 3)
        await trio.sleep(10)
        status = world.registry.reserve.status()
        assert (status.wanted, status.ready, status.hits, status.misses) == (0, 0, 0, 3)


async def test_a_shutdown_drains_every_kind(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_world(tmp_path, settings=GROWING) as world:
        await burst(world, 4)
        await burst(world, 3, OTHER_VOLUME)
        await trio.sleep(2)
        assert world.registry.reserve.ready > 2
        await world.registry.shut_down(DestroyReason.SERVICE_SHUTDOWN)
        await trio.sleep(5)
        status: PoolStatus = world.registry.reserve.status()
        assert (status.ready, status.building, status.wanted) == (0, 0, 0)
        assert world.consistent_and_empty()
