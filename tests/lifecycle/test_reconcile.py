"""After a crash: whatever the journal or the kernel knows is removed, or quarantined and kept."""

from pathlib import Path

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.audit.events import EnvironmentQuarantined, OrphanDestroyed
from sbxd.lifecycle.journal import JournalState
from sbxd.lifecycle.reconcile import plan
from sbxd.mechanism.protocol import Inventory, Orphan
from sbxd.port.ids import EnvironmentId
from tests.lifecycle.double import Script
from tests.lifecycle.world import WORKER, open_store, open_world, spec

IN_BOTH, IN_JOURNAL, IN_KERNEL, OWNED, QUARANTINED = (
    EnvironmentId(letter * 32) for letter in "abcde"
)


@pytest.mark.case("LIF-04")
def test_everything_unowned_is_destroyed_and_what_has_no_id_is_quarantined() -> None:
    inventory = Inventory(
        "boot",
        (
            Orphan(IN_BOTH, ("scope", "volume")),
            Orphan(IN_KERNEL, ("mount",)),
            Orphan(OWNED, ("scope",)),
            Orphan(QUARANTINED, ("process",)),
            Orphan("../strange", ("volume",)),
            Orphan(IN_BOTH + "\n", ("volume",)),
        ),
    )
    journal = {
        IN_BOTH: JournalState.LIVE,
        IN_JOURNAL: JournalState.PREPARING,
        OWNED: JournalState.LIVE,
        QUARANTINED: JournalState.QUARANTINED,
    }
    decided = plan(journal, inventory, {OWNED})
    assert decided.destroy == (
        (IN_BOTH, ("scope", "volume")),
        (IN_JOURNAL, ()),
        (IN_KERNEL, ("mount",)),
    )
    assert {name for name, _kinds in decided.quarantine} == {"../strange", IN_BOTH + "\n"}


async def test_a_start_removes_what_an_earlier_run_left(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    earlier = open_store(tmp_path)
    earlier.intend(IN_BOTH, None)
    earlier.intend(IN_JOURNAL, None)
    earlier.close()
    async with open_world(tmp_path) as world:
        world.mechanism.existing = {IN_BOTH: ("scope",), IN_KERNEL: ("volume",)}
        report = await world.environments.reconcile()
        assert report.destroyed == (IN_BOTH, IN_JOURNAL, IN_KERNEL)
        assert world.consistent_and_empty()
        assert [event.environment_id for event in world.sink.of(OrphanDestroyed)] == [
            IN_BOTH,
            IN_KERNEL,
        ]


async def test_what_cannot_be_removed_is_quarantined_once_however_often_it_is_tried_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_failures=99)) as world:
        world.mechanism.existing = {IN_KERNEL: ("process",)}
        first = await world.environments.reconcile()
        second = await world.environments.reconcile()
        assert (first.destroyed, first.quarantined) == ((), (IN_KERNEL,))
        assert (second.destroyed, second.quarantined) == ((), ())
        (event,) = world.sink.of(EnvironmentQuarantined)
        assert (event.kinds, event.step) == (("process",), "umount")
        assert world.store.states() == {IN_KERNEL: JournalState.QUARANTINED}


@pytest.mark.parametrize("is_live", [True, False])
async def test_reconciling_while_serving_touches_nothing_that_is_owned(
    is_live: bool, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        if not is_live:  # the positive control: what is not owned is taken
            await world.environments.destroy(WORKER, handle)
            await wait_all_tasks_blocked()  # its record is written after the answer
            assert not world.registry.owned()
            world.mechanism.existing = {handle.environment_id: ("scope",)}
        report = await world.environments.reconcile()
        assert report.destroyed == (() if is_live else (handle.environment_id,))
