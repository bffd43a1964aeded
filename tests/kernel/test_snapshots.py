"""Snapshots ahead: as good as one at the start, and never one while a command runs."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.mechanism.protocol import MechanismError, WorkspaceChanged
from sbxd.mechanism.snapshots import AHEAD_SECONDS, Snapshots
from sbxd.mechanism.steward_client import StewardClient
from sbxd.mechanism.volume import Identity, Volume

ROOT: Identity = (1, 2)


class Steward(StewardClient):
    """Counts; each snapshot takes a second."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.fails = False

    async def snapshot(self) -> Identity:
        await trio.sleep(1)
        if self.fails:
            raise MechanismError("steward.snapshot", 0)
        self.taken.append(trio.current_time())
        return ROOT


class Root(Volume):
    """Remembers what it was compared with."""

    def __init__(self) -> None:
        self.checked: list[Identity] = []
        self.is_removed = False

    def check(self, walked: Identity) -> None:
        self.checked.append(walked)
        if self.is_removed:
            raise WorkspaceChanged("volume", 0)


async def test_a_command_does_not_wait_for_what_was_taken_ahead(autojump_clock: MockClock) -> None:
    steward, root = Steward(), Root()
    snapshots = Snapshots(steward, root)
    await snapshots.take_ahead()
    began = trio.current_time()
    await snapshots.before_command()
    assert trio.current_time() == began
    assert (len(steward.taken), root.checked) == (1, [ROOT])


async def test_one_that_is_under_way_is_waited_for_and_not_repeated(
    autojump_clock: MockClock,
) -> None:
    steward = Steward()
    snapshots = Snapshots(steward, Root())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(snapshots.take_ahead)
        await trio.sleep(AHEAD_SECONDS + 0.5)
        await snapshots.before_command()
    assert len(steward.taken) == 1


async def test_each_command_has_its_own(autojump_clock: MockClock) -> None:
    steward = Steward()
    snapshots = Snapshots(steward, Root())
    for number in (1, 2, 3):
        await snapshots.before_command()
        snapshots.command_over()
        assert len(steward.taken) == number


async def test_none_is_taken_while_a_command_runs(autojump_clock: MockClock) -> None:
    steward = Steward()
    snapshots = Snapshots(steward, Root())
    await snapshots.before_command()
    await snapshots.take_ahead()
    assert len(steward.taken) == 1
    snapshots.command_over()
    await snapshots.take_ahead()
    assert len(steward.taken) == 2


async def test_a_command_that_comes_at_once_takes_its_own(autojump_clock: MockClock) -> None:
    steward = Steward()
    snapshots = Snapshots(steward, Root())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(snapshots.take_ahead)
        await wait_all_tasks_blocked()
        await snapshots.before_command()
        await trio.sleep(10)
    assert len(steward.taken) == 1


async def test_a_write_before_within_or_after_it_has_it_taken_again(
    autojump_clock: MockClock,
) -> None:
    steward = Steward()
    snapshots = Snapshots(steward, Root())
    await snapshots.take_ahead()
    with snapshots.writing():
        await trio.sleep(1)
    await snapshots.before_command()
    assert len(steward.taken) == 2
    snapshots.command_over()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(snapshots.take_ahead)
        await trio.sleep(AHEAD_SECONDS + 0.5)
        with snapshots.writing():
            await trio.sleep(5)
    await snapshots.before_command()
    assert len(steward.taken) == 4


async def test_a_failure_is_told_to_the_command_alone(autojump_clock: MockClock) -> None:
    steward = Steward()
    snapshots = Snapshots(steward, Root())
    steward.fails = True
    await snapshots.take_ahead()
    with pytest.raises(MechanismError, match=r"steward\.snapshot"):
        await snapshots.before_command()
    snapshots.command_over()
    steward.fails = False
    await snapshots.before_command()


async def test_the_root_is_compared_at_the_start_not_ahead(autojump_clock: MockClock) -> None:
    root = Root()
    snapshots = Snapshots(Steward(), root)
    await snapshots.take_ahead()
    assert root.checked == []
    root.is_removed = True
    with pytest.raises(WorkspaceChanged):
        await snapshots.before_command()
