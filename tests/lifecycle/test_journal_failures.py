"""A journal that is full, read-only, torn or corrupt: nothing new is built, everything is ended.

Source: CASES LIF-05. SQLite itself makes the failures: no page beyond the last, no writing at all,
a write-ahead log that ends at any byte, pages of nonsense.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.events import EnvironmentDestroyed, EnvironmentQuarantined
from sbxd.audit.lease_events import JournalWriteFailed
from sbxd.lifecycle.journal import (
    JournalState,
    JournalStore,
    JournalUnreadable,
    JournalUnwritable,
    Tenancy,
)
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from tests.lifecycle.world import WITH_RESERVE, WORKER, World, open_world, spec

BREAK = {
    "full": "PRAGMA max_page_count = 1",
    "read-only": "PRAGMA query_only = ON",
}
REPAIR = {
    "full": "PRAGMA max_page_count = 1073741823",
    "read-only": "PRAGMA query_only = OFF",
}
NAME = {"full": "SQLITE_FULL", "read-only": "SQLITE_READONLY"}


def fill(world: World) -> None:
    """Use up the pages that are there: a full disk still has room in the last one."""
    number = 0
    while True:
        number += 1
        try:
            world.store.intend(
                EnvironmentId(f"{number:030x}ff"),
                Tenancy(1, TenantId("t" * 100), RunId(f"r{number}" + "x" * 100), 1),
            )
        except JournalUnwritable:
            break
    # These were never built: their intents stand for nothing that exists.


@pytest.mark.parametrize("how", BREAK)
@pytest.mark.case("LIF-05")
async def test_nothing_new_is_built_and_what_exists_is_destroyed(
    tmp_path: Path, autojump_clock: MockClock, how: str
) -> None:
    async with open_world(tmp_path) as world:
        old = await world.environments.provision(WORKER, spec(run="old"))
        world.store._connection.execute(BREAK[how])
        if how == "full":
            fill(world)
        existing = set(world.mechanism.existing)
        with pytest.raises(ExecutionUnavailable) as refused:
            await world.environments.provision(WORKER, spec(run="new"))
        assert refused.value.code is UnavailableCode.SETUP_FAILED
        assert set(world.mechanism.existing) == existing
        (alert,) = world.sink.of(JournalWriteFailed)
        assert alert.detail == NAME[how]
        assert NAME[how] in refused.value.detail
        assert (await world.run(old)).exit_code == 0
        await world.environments.destroy(WORKER, old)
        await trio.sleep(10)
        assert not world.mechanism.existing
        (ended,) = world.sink.of(EnvironmentDestroyed)
        assert ended.environment_id == old.environment_id
        # With room again, it goes on.
        world.store._connection.execute(REPAIR[how])
        await world.environments.provision(WORKER, spec(run="later"))


@pytest.mark.parametrize("how", BREAK)
async def test_what_cannot_be_destroyed_then_is_marked_and_the_next_start_leaves_it(
    tmp_path: Path, autojump_clock: MockClock, how: str
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        world.store._connection.execute(BREAK["read-only"])
        world.mechanism.script.destroy_failures = 100
        await world.destroy_unproven(handle)
        await trio.sleep(100)
        assert len(world.sink.of(EnvironmentQuarantined)) == 1
        assert (tmp_path / "quarantine" / handle.environment_id).exists()
        left = dict(world.mechanism.existing)
    async with open_world(tmp_path) as later:
        later.mechanism.existing.update(left)
        report = await later.reconciler.run(frozenset)
        assert report.destroyed == ()
        assert await later.reconciler.quarantined() == (handle.environment_id,)
        assert handle.environment_id in later.mechanism.existing
        # The reaper's next pass proves it gone, the marker with it.
        assert (await later.environments.reap()).released == (handle.environment_id,)
        assert not list((tmp_path / "quarantine").iterdir())


async def test_the_reserve_is_not_filled_from_a_journal_that_takes_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_RESERVE) as world:
        world.store._connection.execute(BREAK["read-only"])
        await trio.sleep(100)
        assert not world.mechanism.existing
        assert world.sink.of(JournalWriteFailed)
        world.store._connection.execute(REPAIR["read-only"])
        await trio.sleep(1000)
        assert world.registry.reserve.ready == WITH_RESERVE.reserve.slots


def written(directory: Path) -> list[Mapping[EnvironmentId, JournalState]]:
    """Write a history, and return every state of the books on the way. The log is not folded into
    the database, as after a crash."""
    store = JournalStore(directory, "boot", lambda: 0.0)
    store._connection.execute("PRAGMA wal_autocheckpoint = 0")
    history = [store.states()]
    for number in range(6):
        environment_id = EnvironmentId(f"{number:032x}")
        store.intend(environment_id, None)
        history.append(store.states())
        store.assign(environment_id, Tenancy(1, TenantId("t"), RunId(f"r{number}"), 1))
        history.append(store.states())
        if number % 2:
            store.note(environment_id, JournalState.DESTROYING)
            history.append(store.states())
    copy = directory.with_name("crashed")
    shutil.copytree(directory, copy)
    store.close()
    return history


@pytest.mark.case("LIF-05")
def test_a_log_that_is_torn_at_any_place_gives_a_past_state_of_the_books(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    directory.mkdir()
    history = written(directory)
    crashed = tmp_path / "crashed"
    log = (crashed / "journal.sqlite-wal").read_bytes()
    assert len(log) > 10_000
    seen = []
    for length in [*range(0, len(log), 1021), len(log)]:
        torn = tmp_path / "torn"
        shutil.copytree(crashed, torn)
        (torn / "journal.sqlite-shm").unlink(missing_ok=True)
        (torn / "journal.sqlite-wal").write_bytes(log[:length])
        try:
            store = JournalStore(torn, "boot", lambda: 0.0)
        except JournalUnreadable:
            seen.append(-1)
        else:
            seen.append(history.index(store.states()))
            store.close()
        shutil.rmtree(torn)
    assert seen == sorted(seen), "a longer log never says less"
    assert seen[-1] == len(history) - 1
    assert len(set(seen)) > 5


@pytest.mark.parametrize("page", [1, 2, 3])
@pytest.mark.case("LIF-05")
def test_a_corrupt_page_keeps_the_daemon_from_starting(tmp_path: Path, page: int) -> None:
    store = JournalStore(tmp_path, "boot", lambda: 0.0)
    for number in range(200):
        store.intend(EnvironmentId(f"{number:032x}"), None)
    (size,) = store._connection.execute("PRAGMA page_size").fetchone()
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    path = tmp_path / "journal.sqlite"
    content = bytearray(path.read_bytes())
    content[(page - 1) * size : page * size] = b"\xa5" * size
    path.write_bytes(bytes(content))
    with pytest.raises(JournalUnreadable):
        JournalStore(tmp_path, "boot", lambda: 0.0)


def test_control_the_same_file_without_the_nonsense_is_opened(tmp_path: Path) -> None:
    store = JournalStore(tmp_path, "boot", lambda: 0.0)
    store.intend(EnvironmentId("a" * 32), None)
    store.close()
    again = JournalStore(tmp_path, "boot", lambda: 0.0)
    assert again.states() == {EnvironmentId("a" * 32): JournalState.PREPARING}
    again.close()


def test_a_journal_that_breaks_while_it_is_used_is_an_error_of_its_own(tmp_path: Path) -> None:
    store = JournalStore(tmp_path, "boot", lambda: 0.0)
    store.close()
    with pytest.raises(JournalUnwritable):
        store.intend(EnvironmentId("a" * 32), None)
    with pytest.raises(JournalUnreadable):
        store.states()


async def test_a_slot_that_no_claim_can_be_recorded_on_goes_to_nobody(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_RESERVE) as world:
        await trio.sleep(1)
        taken, other = world.mechanism.sandboxes
        world.store._connection.execute(BREAK["read-only"])
        with pytest.raises(ExecutionUnavailable) as refused:
            await world.environments.provision(WORKER, spec())
        assert NAME["read-only"] in refused.value.detail
        assert (taken.killed, other.killed) == (True, False)
        await trio.sleep(1)
        assert world.sink.of(JournalWriteFailed)[0].environment_id == taken.environment_id
        # What the record says was provisioned, it says has ended.
        (ended,) = world.sink.of(EnvironmentDestroyed)
        assert ended.environment_id == taken.environment_id
        world.store._connection.execute(REPAIR["read-only"])
        handle = await world.environments.provision(WORKER, spec())
        assert handle.environment_id == other.environment_id
