"""The quarantine: shown with what is there, tried again, released by proof or on an operator's
word."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from sbxd.audit.events import EnvironmentDestroyFailed, EnvironmentQuarantined, Priority
from sbxd.audit.lease_events import ClearingProof, QuarantineCleared, QuarantineReleased
from sbxd.lifecycle.budgets import Budgets
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
    await world.destroy_unproven(handle)
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
        if failures > 1:
            await world.destroy_unproven(spared)
        else:
            await world.environments.destroy(WORKER, spared)
        await trio.sleep(60)
        # The control: one failure less is no alert.
        assert world.sink.of(EnvironmentQuarantined) == []
        assert len(world.sink.of(EnvironmentDestroyFailed)) == failures - 1
        handle = await world.environments.provision(WORKER, spec())
        world.mechanism.script.destroy_failures = failures
        await world.destroy_unproven(handle)
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


# --- the passes that try again ----------------------------------------------------------------


@pytest.mark.parametrize("verb", ["reap", "reconcile"])
async def test_a_pass_releases_what_is_proven_gone_and_records_it(
    verb: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        name = (await quarantined(world, autojump_clock)).environment_id
        report = await getattr(world.environments, verb)()
        assert report.released == (name,)
        assert world.consistent_and_empty()
        assert await world.environments.list() == ()
        (event,) = world.sink.of(QuarantineReleased)
        assert (event.environment_id, event.kinds) == (name, ("scope", "volume"))
        assert world.sink.of(QuarantineCleared) == []  # nobody's word
        assert (await getattr(world.environments, verb)()).released == ()


async def test_a_pass_leaves_what_is_not_proven_gone_and_alerts_no_second_time(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        name = (await quarantined(world, autojump_clock)).environment_id
        world.mechanism.script.destroy_failures = 2
        for _ in range(2):
            assert (await world.environments.reap()).released == ()
            assert world.store.states() == {name: JournalState.QUARANTINED}
            assert name in world.mechanism.existing
        assert len(world.sink.of(EnvironmentQuarantined)) == 1
        assert world.sink.of(QuarantineReleased) == []
        assert (await world.environments.reap()).released == (name,)


async def test_a_destruction_that_succeeds_is_no_proof_while_the_inventory_shows_something(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path) as world:
        name = (await quarantined(world, autojump_clock)).environment_id

        async def nothing(environment_id: EnvironmentId) -> None:
            await trio.lowlevel.checkpoint()

        with monkeypatch.context() as patch:
            patch.setattr(world.mechanism, "destroy_orphan", nothing)
            assert (await world.environments.reap()).released == ()
        assert world.store.states() == {name: JournalState.QUARANTINED}
        assert (await world.environments.reap()).released == (name,)


async def test_a_pass_of_a_later_daemon_releases_what_an_earlier_one_left_quarantined(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    names = [EnvironmentId(letter * 32) for letter in "ab"]
    earlier = open_store(tmp_path, fail_at=2)  # of the second there is but a marker
    for name in names:
        earlier.quarantine(name)
    earlier.close()
    async with open_world(tmp_path) as world:
        world.mechanism.existing = {names[0]: ("scope",)}
        assert await world.reconciler.run(frozenset) is not None  # a start waits for none of it
        assert set(world.store.states()) == set(names)
        assert sorted((await world.environments.reap()).released) == names
        assert world.consistent_and_empty()


async def test_a_name_that_is_no_id_is_left_to_the_operator(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        await world.reconciler._journal.quarantine(EnvironmentId("../../etc"))
        assert (await world.environments.reap()).released == ()
        assert len(world.store.states()) == 1


async def test_a_pass_is_bounded_and_the_next_one_begins_where_it_ended(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    names = [EnvironmentId(letter * 32) for letter in "abc"]
    budgets = Budgets(quarantine_seconds=10.0)
    script = Script(destroy_seconds=7.0)
    async with open_world(tmp_path, budgets=budgets, script=script) as world:
        for name in names:
            world.store.quarantine(name)
        found = []
        for _ in range(3):
            began = trio.current_time()
            found += list((await world.environments.reap()).released)
            assert trio.current_time() - began <= 10.0
        # Of each pass one is done, and the one that it broke off is not the first of the next.
        assert found == [names[0], names[2], names[1]]


@pytest.mark.parametrize("broken", ["audit", "journal"])
async def test_what_is_not_recorded_stays_quarantined_until_it_is(
    broken: str, tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path) as world:
        name = (await quarantined(world, autojump_clock)).environment_id
        if broken == "audit":
            world.sink.fail()
        else:
            world.store.fail_at = world.store.writes + 1
        assert (await world.environments.reap()).released == ()
        assert world.store.states() == {name: JournalState.QUARANTINED}
        assert len(await world.environments.list()) == 1
        if broken == "journal":
            assert (await world.environments.reap()).released == (name,)


class Killed(BaseException):
    """The daemon, here."""


@pytest.mark.parametrize("instant", ["destroy", "inventory", "audit", "release"])
async def test_a_kill_within_a_pass_leaves_the_books_right_and_the_next_daemon_ends_it(
    instant: str, tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kill(*_: object) -> None:
        raise Killed

    name = EnvironmentId("a" * 32)
    async with open_world(tmp_path) as world:
        world.store.quarantine(name)
        world.mechanism.existing = {name: ("scope",)}
        target, method = {
            "destroy": (world.mechanism, "destroy_orphan"),
            "inventory": (world.mechanism, "inventory"),
            "audit": (world.sink, "emit"),
            "release": (world.reconciler._journal, "release"),
        }[instant]
        with monkeypatch.context() as patch:
            patch.setattr(target, method, kill)
            with pytest.raises(Killed):
                await world.environments.reap()
        existing = world.mechanism.existing
        assert world.store.states() == {name: JournalState.QUARANTINED}
    async with open_world(tmp_path) as world:
        world.mechanism.existing = existing
        assert (await world.environments.reap()).released == (name,)
        assert world.consistent_and_empty()


async def test_what_is_being_given_up_while_a_reconciliation_looks_is_left_to_its_supervisor(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        name = handle.environment_id
        world.mechanism.script.destroy_failures = 3
        await world.destroy_unproven(handle)
        (supervisor,) = world.registry.supervisors
        assert not supervisor.over.is_set()  # it will try twice more

        async def slowly() -> Mapping[EnvironmentId, JournalState]:
            read = world.store.states()
            await supervisor.over.wait()  # what was read is the past by now
            return read

        with monkeypatch.context() as patch:
            patch.setattr(world.reconciler._journal, "states", slowly)
            report = await world.reconciler.run(world.registry.owned)
        assert (report.destroyed, report.quarantined) == ((), ())
        assert world.store.states() == {name: JournalState.QUARANTINED}
        assert (await world.environments.reconcile()).released == (name,)
        assert world.consistent_and_empty()


def test_a_release_removes_the_marker_too(tmp_path: Path) -> None:
    store = open_store(tmp_path, fail_at=1)
    name = EnvironmentId("a" * 32)
    store.quarantine(name)
    assert store.states() == {name: JournalState.QUARANTINED}
    store.release(name)
    assert store.states() == {}
    store.close()
