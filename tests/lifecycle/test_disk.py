"""When a full volume ends a command, and when it does not."""

from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from sbxd.audit.events import DestroyReason, EnvironmentDestroyed, SandboxEscapeWasSuspected
from sbxd.lifecycle.budgets import Budgets
from sbxd.lifecycle.disk import (
    EXHAUSTED_BYTES,
    PACE_NEAR_SECONDS,
    PACE_SECONDS,
    SIGHTINGS,
    DiskWatch,
)
from sbxd.lifecycle.machine import State
from sbxd.mechanism.protocol import (
    CommandExit,
    MechanismError,
    ProcessSurvived,
    VolumeReading,
    WorkspaceChanged,
)
from sbxd.port.command import KillReason
from sbxd.port.errors import EscapeCode, SandboxEscapeSuspected
from tests.lifecycle.double import Behaviour, DoubleSandbox
from tests.lifecycle.world import WORKER, command, open_world, spec

MIB = 2**20
TOTAL = 32 * MIB
FAILED = CommandExit(exit_code=1, signal=None)


def reading(bytes_left: int = TOTAL, inodes_left: int = 100) -> VolumeReading:
    return VolumeReading(
        bytes_left=bytes_left,
        bytes_used=TOTAL - bytes_left,
        bytes_total=TOTAL,
        inodes_left=inodes_left,
        inodes_total=100,
    )


FULL = reading(bytes_left=0)
NO_INODES = reading(inodes_left=0)


# --- the watch --------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [FULL, NO_INODES, reading(bytes_left=EXHAUSTED_BYTES - 1)])
def test_a_second_sighting_in_a_row_is_the_end(full: VolumeReading) -> None:
    watch = DiskWatch(reading())
    for _ in range(SIGHTINGS - 1):
        watch.note(full)
        assert not watch.is_over
    watch.note(full)
    assert watch.is_over
    assert watch.was_exhausted


@pytest.mark.parametrize("room", [reading(bytes_left=EXHAUSTED_BYTES, inodes_left=1), reading()])
def test_room_is_never_the_end(room: VolumeReading) -> None:
    watch = DiskWatch(reading())
    for _ in range(50):
        watch.note(room)
    assert not watch.is_over
    assert not watch.was_exhausted


def test_room_between_two_sightings_makes_the_first_one_moot() -> None:
    watch = DiskWatch(reading())
    for _ in range(50):
        watch.note(FULL)
        watch.note(reading())
    assert not watch.is_over
    assert watch.was_exhausted, "but a failure is still laid to it"


def test_what_was_full_before_is_not_the_commands_doing() -> None:
    watch = DiskWatch(FULL)
    for _ in range(50):
        watch.note(FULL)
    assert not watch.is_over
    assert not watch.was_exhausted


def test_bytes_that_were_full_before_do_not_hide_inodes() -> None:
    watch = DiskWatch(FULL)
    for _ in range(SIGHTINGS):
        watch.note(reading(bytes_left=0, inodes_left=0))
    assert watch.is_over


def test_what_was_full_before_counts_once_there_was_room() -> None:
    watch = DiskWatch(FULL)
    watch.note(reading())
    for _ in range(SIGHTINGS):
        watch.note(FULL)
    assert watch.is_over


def test_the_pace_quickens_when_little_is_left() -> None:
    watch = DiskWatch(reading())
    assert watch.pause_seconds(reading()) == PACE_SECONDS
    assert watch.pause_seconds(reading(bytes_left=TOTAL // 9)) == PACE_NEAR_SECONDS
    assert watch.pause_seconds(reading(inodes_left=12)) == PACE_NEAR_SECONDS


readings = st.builds(
    reading,
    bytes_left=st.sampled_from([0, 1, EXHAUSTED_BYTES - 1, EXHAUSTED_BYTES, MIB, TOTAL]),
    inodes_left=st.sampled_from([0, 1, 50, 100]),
)


def _exhausted(each: VolumeReading) -> tuple[bool, bool]:
    return each.bytes_left < EXHAUSTED_BYTES, each.inodes_left == 0


@given(readings, st.lists(readings, max_size=20))
def test_the_watch_is_over_exactly_after_two_sightings_since_there_was_room(
    first: VolumeReading, later: list[VolumeReading]
) -> None:
    watch = DiskWatch(first)
    for each in later:
        watch.note(each)
    history = [_exhausted(each) for each in (first, *later)]
    over = False
    for resource in (0, 1):
        seen = [each[resource] for each in history]
        tail = len(seen) - len("".join("x" if s else "." for s in seen).rstrip("x"))
        over |= SIGHTINGS <= tail < len(seen)
    assert watch.is_over == over
    assert watch.bytes_left_min == min(each.bytes_left for each in (first, *later))
    assert watch.inodes_left_min == min(each.inodes_left for each in (first, *later))
    assert watch.bytes_peak == max(each.bytes_used for each in (first, *later))


# --- a command --------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [FULL, NO_INODES])
async def test_a_filler_is_ended_promptly_with_its_partial_output(
    tmp_path: Path, full: VolumeReading, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        result = await world.run(
            handle,
            Behaviour(seconds=None, output=[(0.5, "stdout", b"so far")], volume=[(1.0, full)]),
        )
    assert result.killed_by is KillReason.DISK
    assert result.exit_code is None
    assert result.stdout == b"so far"
    assert 1000 <= result.duration_ms <= 1000 + round((PACE_SECONDS + PACE_NEAR_SECONDS) * 1000) + 1
    assert result.evidence.workspace_bytes_left == full.bytes_left
    assert result.evidence.workspace_inodes_left == min(full.inodes_left, 99)
    assert result.usage.workspace_bytes_peak == max(full.bytes_used, 4096)


async def test_one_that_fails_on_a_full_volume_before_it_is_seen_is_disk(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        result = await world.run(handle, Behaviour(seconds=0.1, exit=FAILED, volume=[(0.1, FULL)]))
    assert result.killed_by is KillReason.DISK


async def test_one_that_ends_well_on_a_full_volume_ended_well(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        result = await world.run(handle, Behaviour(seconds=0.1, volume=[(0.1, FULL)]))
    assert result.killed_by is None
    assert result.exit_code == 0
    assert result.evidence.workspace_bytes_left == 0


async def test_a_command_may_clean_a_full_workspace_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        world.mechanism.sandboxes[0].reading = FULL
        slow = await world.run(handle, Behaviour(seconds=5.0, volume=[(4.0, reading())]))
        world.mechanism.sandboxes[0].commands.clear()
        failed = await world.run(handle, Behaviour(seconds=5.0, exit=FAILED))
    assert slow.exit_code == 0
    assert failed.exit_code == 1


async def test_a_volume_that_cannot_be_read_leaves_no_word_of_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        world.mechanism.sandboxes[0].reading = None
        result = await world.run(handle, Behaviour(seconds=1.0, exit=FAILED))
    assert result.exit_code == 1
    assert result.evidence.workspace_bytes_left is None
    assert result.usage.workspace_bytes_peak is None


# --- broken invariants ------------------------------------------------------------------------


async def test_another_volume_than_the_prepared_one_is_a_suspected_escape(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: DoubleSandbox, spec: object) -> None:
        raise WorkspaceChanged("volume", 0, "told to")

    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        monkeypatch.setattr(DoubleSandbox, "start", start)
        with pytest.raises(SandboxEscapeSuspected) as caught:
            await world.environments.execute(WORKER, handle, command(), cancelled=trio.Event())
        await trio.testing.wait_all_tasks_blocked()
        assert world.consistent_and_empty()
    assert caught.value.code is EscapeCode.WORKSPACE_IDENTITY_CHANGED
    assert [each.code for each in world.sink.of(SandboxEscapeWasSuspected)] == [
        EscapeCode.WORKSPACE_IDENTITY_CHANGED
    ]
    assert [each.reason for each in world.sink.of(EnvironmentDestroyed)] == [
        DestroyReason.ESCAPE_SUSPECTED
    ]


@pytest.mark.parametrize(
    ("problem", "alerts"),
    [
        (ProcessSurvived("stop_proof", 110), [EscapeCode.PROCESS_SURVIVED]),
        (MechanismError("umount", 16), []),
    ],
)
async def test_only_a_process_that_outlives_the_destruction_is_a_suspected_escape(
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    problem: MechanismError,
    alerts: list[EscapeCode],
) -> None:
    async def destroy(self: DoubleSandbox, *, party: int) -> None:
        await trio.lowlevel.checkpoint()
        raise problem

    async with open_world(tmp_path, budgets=Budgets(destroy_retry_seconds=(1.0, 1.0))) as world:
        handle = await world.environments.provision(WORKER, spec())
        monkeypatch.setattr(DoubleSandbox, "destroy", destroy)
        supervisor = next(iter(world.registry.supervisors))
        await world.destroy_unproven(handle)
        await supervisor.over.wait()
        assert supervisor.state is State.QUARANTINED
    assert [each.code for each in world.sink.of(SandboxEscapeWasSuspected)] == alerts
