"""The quarantine: shown with what is there, released by proof or on an operator's word."""

from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from sbxd.audit.events import EnvironmentDestroyFailed, EnvironmentQuarantined, Priority
from sbxd.audit.lease_events import ClearingProof, QuarantineCleared
from sbxd.lifecycle.journal import JournalState
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import ExecutionRejected, ExecutionUnavailable, RejectedCode
from sbxd.port.ids import EnvironmentId
from sbxd.wire.repair import ClearingWord
from tests.lifecycle.double import Script
from tests.lifecycle.world import ADMIN, DEFAULT, WORKER, World, open_store, open_world, spec

WITH_PROOF, BY_WORD = ClearingWord.ONLY_WITH_PROOF, ClearingWord.OPERATOR_WORD


async def quarantined(world: World, autojump_clock: MockClock) -> EnvironmentHandle:
    """An environment that could not be destroyed, three times."""
    handle = await world.environments.provision(WORKER, spec())
    world.mechanism.script.destroy_failures = 3
    await world.environments.destroy(WORKER, handle)
    await trio.sleep(30)
    assert world.store.states() == {handle.environment_id: JournalState.QUARANTINED}
    return handle


@pytest.mark.parametrize("failures", [1, 2, 3, 6])
async def test_the_operator_says_after_how_many_failures_it_is_an_alert(
    tmp_path: Path, autojump_clock: MockClock, failures: int
) -> None:
    limits = replace(DEFAULT.limits, destroy_failures_max=failures)
    async with open_world(tmp_path, settings=replace(DEFAULT, limits=limits)) as world:
        spared = await world.environments.provision(WORKER, spec())
        world.mechanism.script.destroy_failures = failures - 1
        await world.environments.destroy(WORKER, spared)
        await trio.sleep(60)
        # The control: one failure less is no alert.
        assert world.sink.of(EnvironmentQuarantined) == []
        assert len(world.sink.of(EnvironmentDestroyFailed)) == failures - 1
        handle = await world.environments.provision(WORKER, spec())
        world.mechanism.script.destroy_failures = failures
        await world.environments.destroy(WORKER, handle)
        await trio.sleep(60)
        (alert,) = world.sink.of(EnvironmentQuarantined)
        assert (alert.environment_id, alert.PRIORITY) == (handle.environment_id, Priority.ALERT)
        assert len(world.sink.of(EnvironmentDestroyFailed)) == 2 * failures - 1
        assert world.store.states() == {handle.environment_id: JournalState.QUARANTINED}


async def test_it_is_shown_with_what_the_kernel_holds(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        assert await world.environments.quarantine() == ()
        handle = await quarantined(world, autojump_clock)
        (item,) = await world.environments.quarantine()
        assert item.name == handle.environment_id
        assert item.kinds


async def test_what_is_proven_gone_is_released_and_its_id_shown_no_more(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await quarantined(world, autojump_clock)
        name = handle.environment_id
        assert len(await world.environments.list()) == 1
        proof = await world.environments.clear_quarantine(ADMIN, name, WITH_PROOF)
        assert proof is ClearingProof.PROVEN
        assert world.consistent_and_empty()
        assert await world.environments.list() == ()
        (event,) = world.sink.of(QuarantineCleared)
        assert (event.environment_id, event.peer_uid) == (name, ADMIN.uid)
        with pytest.raises(ExecutionRejected) as again:
            await world.environments.clear_quarantine(ADMIN, name, WITH_PROOF)
        assert again.value.code is RejectedCode.ENVIRONMENT_GONE


async def test_what_cannot_be_proven_gone_stays_until_an_operator_gives_their_word(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        name = (await quarantined(world, autojump_clock)).environment_id
        world.mechanism.script.destroy_failures = 100
        with pytest.raises(ExecutionUnavailable):
            await world.environments.clear_quarantine(ADMIN, name, WITH_PROOF)
        assert world.store.states() == {name: JournalState.QUARANTINED}
        assert world.sink.of(QuarantineCleared) == []
        proof = await world.environments.clear_quarantine(ADMIN, name, BY_WORD)
        assert proof is ClearingProof.OPERATOR_WORD
        assert world.store.states() == {}
        # The word moves nothing in the kernel: the next look finds what is there.
        assert name in world.mechanism.existing
        report = await world.environments.reconcile()
        assert report.quarantined == (name,)


async def test_a_release_that_is_not_recorded_is_none(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        name = (await quarantined(world, autojump_clock)).environment_id
        world.sink.fail()
        with pytest.raises(ExecutionUnavailable):
            await world.environments.clear_quarantine(ADMIN, name, WITH_PROOF)
        assert world.store.states() == {name: JournalState.QUARANTINED}


async def test_nothing_that_lives_can_be_cleared(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        with pytest.raises(ExecutionRejected):
            await world.environments.clear_quarantine(ADMIN, handle.environment_id, BY_WORD)
        assert (await world.run(handle)).exit_code == 0


async def test_a_name_that_is_no_id_is_released_on_a_word_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script()) as world:
        await world.reconciler._journal.quarantine(EnvironmentId("../../etc"))
        with pytest.raises(ExecutionUnavailable):
            await world.environments.clear_quarantine(ADMIN, "../../etc", WITH_PROOF)
        await world.environments.clear_quarantine(ADMIN, "../../etc", BY_WORD)
        assert world.store.states() == {}


def test_a_release_removes_the_marker_too(tmp_path: Path) -> None:
    store = open_store(tmp_path, fail_at=1)
    name = EnvironmentId("a" * 32)
    store.quarantine(name)
    assert store.states() == {name: JournalState.QUARANTINED}
    store.release(name)
    assert store.states() == {}
    store.close()
