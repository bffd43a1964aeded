"""When an environment is over, what is left (nothing), and its files while it lives."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.audit.events import (
    DestroyReason,
    EnvironmentDestroyed,
    EnvironmentDestroyFailed,
    EnvironmentExpired,
    EnvironmentQuarantined,
)
from sbxd.audit.losses import EnvironmentLost, LostPart
from sbxd.lifecycle.environments import Peer, PeerRole
from sbxd.lifecycle.journal import JournalState
from sbxd.lifecycle.machine import State
from sbxd.port.command import FileChange, KillReason
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    UnavailableCode,
    WorkspaceEscape,
)
from tests.lifecycle.double import Behaviour, Script
from tests.lifecycle.world import (
    ADMIN,
    OTHER_WORKER,
    WORKER,
    command,
    open_world,
    spec,
)

# --- the end ----------------------------------------------------------------------------------


async def test_destroy_is_proven_audited_and_idempotent(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        await world.run(handle, Behaviour(seconds=3.0))
        await trio.sleep(1)
        await world.environments.destroy(WORKER, handle)
        assert not world.mechanism.existing
        await world.environments.destroy(WORKER, handle)
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()
        (event,) = world.sink.of(EnvironmentDestroyed)
        assert event.reason is DestroyReason.REQUESTED
        assert (event.commands_run, event.lifetime_ms, event.executing_ms) == (1, 4000, 3000)


@pytest.mark.case("API-13")
async def test_destroy_during_a_command_gives_its_partial_output_as_cancelled(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        results = []

        async def run() -> None:
            results.append(await world.run(handle, Behaviour(seconds=None, last_words=b"bye")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            await world.environments.destroy(WORKER, handle)
        assert (results[0].killed_by, results[0].stdout) == (KillReason.CANCELLED, b"bye")
        assert world.consistent_and_empty()


async def test_a_destroy_that_fails_says_so_until_it_is_proven_in_the_background(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_failures=2)) as world:
        handle = await world.environments.provision(WORKER, spec())
        await world.destroy_unproven(handle)
        assert world.mechanism.existing
        await world.destroy_unproven(handle)  # asked again, it is as true
        await trio.sleep(10)
        assert world.consistent_and_empty()
        await world.environments.destroy(WORKER, handle)  # the control: it is proven now
        attempts = [event.attempt for event in world.sink.of(EnvironmentDestroyFailed)]
        assert attempts == [1, 2]


@pytest.mark.case("LIF-10")
async def test_what_cannot_be_destroyed_is_quarantined_with_an_alert_and_stays_visible(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_failures=99)) as world:
        handle = await world.environments.provision(WORKER, spec())
        await world.destroy_unproven(handle)
        await trio.sleep(10)
        (event,) = world.sink.of(EnvironmentQuarantined)
        assert (event.environment_id, event.step, event.errno) == (
            handle.environment_id,
            "umount",
            16,
        )
        assert world.store.states() == {handle.environment_id: JournalState.QUARANTINED}
        (info,) = await world.environments.list()
        assert info.state == State.QUARANTINED
        assert (await world.environments.describe()).quarantined == (handle.environment_id,)
        assert not world.sink.of(EnvironmentDestroyed)
        await world.destroy_unproven(handle)
        report = await world.environments.reconcile()
        assert (report.destroyed, report.released) == ((), ())  # it cannot be proven


async def test_expiry_ends_an_idle_environment_exactly_then(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        await world.environments.provision(WORKER, spec())
        await trio.sleep(14_399)
        assert len(await world.environments.list()) == 1
        await trio.sleep(1)
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()
        assert len(world.sink.of(EnvironmentExpired)) == 1


async def test_an_orphan_lives_for_the_grace_and_no_longer(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        await world.environments.provision(WORKER, spec())
        await trio.sleep(5)
        world.environments.release_owner(WORKER.connection_id)
        await trio.sleep(59)
        assert len(await world.environments.list()) == 1
        await trio.sleep(1)
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()
        (event,) = world.sink.of(EnvironmentDestroyed)
        assert event.reason is DestroyReason.PEER_GONE


async def test_a_use_from_another_connection_ends_orphanhood_and_an_operators_does_not(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    reconnected = Peer(uid=WORKER.uid, connection_id=9, role=PeerRole.WORKER)
    async with open_world(tmp_path) as world:
        adopted = await world.environments.provision(WORKER, spec(run="adopted"))
        looked_at = await world.environments.provision(WORKER, spec(run="looked at"))
        world.environments.release_owner(WORKER.connection_id)
        await trio.sleep(59)
        await world.run(adopted, peer=reconnected)
        await world.run(looked_at, peer=ADMIN)
        await trio.sleep(1000)
        (info,) = await world.environments.list()
        assert info.handle == adopted


async def test_an_environment_whose_init_dies_idle_is_ended_and_named(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        await world.environments.provision(WORKER, spec())
        world.mechanism.sandboxes[0].lose("steward")
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()
        (event,) = world.sink.of(EnvironmentLost)
        assert event.part is LostPart.STEWARD


async def test_a_mechanism_that_is_gone_tells_callers_and_quarantines_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_failures=99)) as world:
        handle = await world.environments.provision(WORKER, spec())

        async def run() -> None:
            with pytest.raises(ExecutionUnavailable) as lost:
                await world.run(handle, Behaviour(seconds=None))
            assert lost.value.code is UnavailableCode.ENVIRONMENT_LOST

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            # The environment may learn of it first: it counts all the same.
            world.mechanism.sandboxes[0].lose("launcher")
            await wait_all_tasks_blocked()
            assert await world.registry.abandon(within_seconds=5) == 1
        await trio.sleep(100)
        assert not world.sink.of(EnvironmentQuarantined)
        assert world.mechanism.sandboxes[0].killed
        assert world.store.states() == {handle.environment_id: JournalState.DESTROYING}


async def test_a_shutdown_is_bounded_although_nothing_can_be_destroyed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_seconds=1000)) as world:
        await world.environments.provision(WORKER, spec())
        began = trio.current_time()
        await world.registry.shut_down(DestroyReason.SERVICE_SHUTDOWN)
        assert trio.current_time() - began == 20


# --- the workspace ----------------------------------------------------------------------------


async def test_files_go_in_and_out_and_only_for_the_owner(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"hello "
        yield b"world"

    taken: list[bytes] = []

    async def take(data: bytes) -> None:
        taken.append(data)

    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        environments = world.environments
        await environments.write(WORKER, handle, b"a/b", size_bytes=11, data=pieces())
        await environments.read(WORKER, handle, b"a/b", maximum_bytes=100, on_content=take)
        assert b"".join(taken) == b"hello world"
        with pytest.raises(ExecutionRejected) as foreign:
            await environments.read(
                OTHER_WORKER, handle, b"a/b", maximum_bytes=100, on_content=take
            )
        assert foreign.value.code is RejectedCode.ENVIRONMENT_GONE
        with pytest.raises(WorkspaceEscape):
            await environments.listdir(WORKER, handle, b"../etc", on_entries=no_entries)


async def no_entries(entries: Sequence[FileChange]) -> None:
    raise AssertionError(entries)


async def test_a_steward_that_is_gone_is_environment_lost_and_ends_the_environment(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        world.mechanism.sandboxes[0].steward_is_gone = True
        with pytest.raises(ExecutionUnavailable) as lost:
            await world.environments.listdir(WORKER, handle, b".", on_entries=no_entries)
        assert lost.value.code is UnavailableCode.ENVIRONMENT_LOST
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()
        assert [each.part for each in world.sink.of(EnvironmentLost)] == [LostPart.STEWARD]


@pytest.mark.case("API-11")
async def test_a_command_that_is_refused_touches_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        for argv in (("./run.sh",), ("a\0b",)):
            with pytest.raises(ExecutionRejected) as refused:
                await world.run(handle, ask=command(*argv))
            assert refused.value.code is RejectedCode.INVALID_COMMAND
        assert "start" not in world.mechanism.calls


@pytest.mark.parametrize("is_lost", [True, False])
async def test_what_cannot_be_proven_because_the_mechanism_went_is_not_quarantined(
    tmp_path: Path, autojump_clock: MockClock, is_lost: bool
) -> None:
    """A host that shuts down stops the launcher too; the next start resolves the intents."""
    script = Script(destroy_failures=100)
    async with open_world(tmp_path, script=script) as world:
        await world.environments.provision(WORKER, spec())
        if is_lost:
            world.mechanism.lost.set()
        await world.registry.shut_down(DestroyReason.SERVICE_SHUTDOWN)
        quarantined = [each.step for each in world.sink.of(EnvironmentQuarantined)]
        assert (quarantined == []) is is_lost
