"""Commands through the whole lifecycle: every kill reason, every race, and the exact bytes."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.audit.events import (
    CommandFinished,
    CommandStarted,
    CommandUnfinished,
    DestroyReason,
    SandboxEscapeWasSuspected,
)
from sbxd.audit.losses import EnvironmentLost, LostPart
from sbxd.lifecycle.budgets import Budgets
from sbxd.lifecycle.journal import JournalState
from sbxd.mechanism.protocol import Changes, CommandExit, CommandNotStarted, Counters, StartFailure
from sbxd.port.command import ChangeKind, FileChange, KillReason
from sbxd.port.errors import (
    EscapeCode,
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    SandboxEscapeSuspected,
    UnavailableCode,
)
from sbxd.wire.messages import OutputStream
from tests.lifecycle.double import Behaviour, Script
from tests.lifecycle.world import WORKER, command, open_world, spec


async def test_a_command_that_exits_reports_its_code_output_and_changes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    change = FileChange(path="out.csv", change=ChangeKind.CREATED, size_bytes=3, sha256="b" * 64)
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        result = await world.run(
            handle,
            Behaviour(
                seconds=2.5,
                exit=CommandExit(exit_code=7, signal=None),
                output=[(0.0, "stdout", b"one"), (1.0, "stderr", b"two"), (2.0, "stdout", b"3")],
                changes=Changes((change,), truncated=False, workspace_bytes=9, workspace_inodes=2),
            ),
        )
        assert (result.exit_code, result.signal, result.killed_by) == (7, None, None)
        assert (result.stdout, result.stderr) == (b"one3", b"two")
        assert not result.stdout_truncated
        assert not result.stderr_truncated
        assert result.files_changed == (change,)
        assert result.duration_ms == 2500
        assert (result.usage.workspace_bytes, result.usage.cpu_ms) == (9, 1)
        assert result.evidence.effective_timeout_ms == 30_000
        (started,) = world.sink.of(CommandStarted)
        (finished,) = world.sink.of(CommandFinished)
        assert (started.command_number, finished.exit_code, finished.stdout_bytes) == (1, 7, 4)
        assert world.mechanism.sandboxes[0].commands[0].closed


async def test_what_is_left_of_the_tree_after_a_normal_exit_is_killed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        began = trio.current_time()
        result = await world.run(handle, Behaviour(seconds=1.0, holds_pipes=True))
        assert result.exit_code == 0
        assert trio.current_time() - began == 1.0  # the holder of the pipe does not delay
        assert world.mechanism.sandboxes[0].commands[0].kill_count == 1


async def test_a_command_that_dies_of_a_signal_has_128_and_the_signal(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        own = await world.run(handle, Behaviour(exit=CommandExit(exit_code=None, signal=9)))
        plain = await world.run(handle, Behaviour(exit=CommandExit(exit_code=137, signal=None)))
        assert (own.exit_code, own.signal) == (137, 9)
        assert (plain.exit_code, plain.signal) == (137, None)


async def test_the_deadline_kills_with_timeout_and_keeps_the_last_words(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        result = await world.run(
            handle,
            Behaviour(seconds=None, output=[(1.0, "stdout", b"early ")], last_words=b"late"),
            ask=command("sleep", "60", timeout_seconds=3),
        )
        assert result.killed_by is KillReason.TIMEOUT
        assert result.timed_out
        assert (result.exit_code, result.stdout, result.duration_ms) == (None, b"early late", 3000)


async def test_the_environments_wall_clock_bounds_a_longer_request(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        result = await world.run(
            handle, Behaviour(seconds=None), ask=command(timeout_seconds=86_400)
        )
        assert (result.killed_by, result.duration_ms) == (KillReason.TIMEOUT, 60_000)


async def test_a_kill_by_the_kernel_for_memory_is_memory(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        result = await world.run(
            handle, Behaviour(seconds=None, counters=[(1.0, Counters(oom_kill=1))])
        )
        assert result.killed_by is KillReason.MEMORY
        assert (result.exit_code, result.evidence.oom_kill) == (None, 1)


async def test_a_child_killed_for_memory_behind_its_parents_back_is_memory(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        behind = await world.run(
            handle,
            Behaviour(
                seconds=1.0,
                exit=CommandExit(exit_code=0, signal=None),
                counters=[(1.0, Counters(oom_kill=1))],
            ),
        )
        clean = await world.run(handle, Behaviour(seconds=1.0, counters=[(0.5, Counters())]))
        assert behind.killed_by is KillReason.MEMORY
        assert behind.exit_code is None
        assert clean.exit_code == 0


async def test_a_burst_of_refused_forks_is_pids_and_a_trickle_is_not(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    trickle = [(0.5 * n, Counters(pids_max_events=200 * n)) for n in range(1, 40)]
    burst = [(0.1 * n, Counters(pids_max_events=200 * n)) for n in range(1, 40)]
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        polite = await world.run(handle, Behaviour(seconds=25.0, counters=trickle))
        bomb = await world.run(handle, Behaviour(seconds=25.0, counters=burst))
        assert polite.exit_code == 0
        assert polite.evidence.pids_max_events == 7800
        assert bomb.killed_by is KillReason.PIDS
        assert bomb.duration_ms == 500


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_the_first_byte_beyond_the_cap_kills_and_exactly_the_cap_is_kept(
    stream: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        result = await world.run(
            handle,
            Behaviour(seconds=None, output=[(0.1 * n, stream, b"x" * 300) for n in range(40)]),
        )
        assert result.killed_by is KillReason.OUTPUT_LIMIT
        kept = {"stdout": result.stdout, "stderr": result.stderr}
        flags = {"stdout": result.stdout_truncated, "stderr": result.stderr_truncated}
        assert kept.pop(stream) == b"x" * 1000
        assert flags.pop(stream)
        assert list(kept.values()) == [b""]
        assert list(flags.values()) == [False]


async def test_exactly_the_cap_is_no_violation_and_one_more_is_even_at_the_exit(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        full = await world.run(handle, Behaviour(output=[(0.0, "stdout", b"x" * 1000)]))
        over = await world.run(handle, Behaviour(output=[(0.0, "stdout", b"x" * 1001)]))
        assert (full.exit_code, len(full.stdout), full.stdout_truncated) == (0, 1000, False)
        assert (over.killed_by, len(over.stdout)) == (KillReason.OUTPUT_LIMIT, 1000)


async def test_a_cancel_gives_a_result_with_the_partial_output(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        cancelled = trio.Event()
        async with trio.open_nursery() as nursery:

            async def cancel_later() -> None:
                await trio.sleep(2)
                cancelled.set()

            nursery.start_soon(cancel_later)
            result = await world.run(
                handle,
                Behaviour(seconds=None, output=[(1.0, "stdout", b"partial")]),
                cancelled=cancelled,
            )
        assert (result.killed_by, result.stdout) == (KillReason.CANCELLED, b"partial")
        assert (await world.run(handle, Behaviour())).exit_code == 0  # the environment lives


async def test_a_cancel_before_the_call_starts_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        cancelled = trio.Event()
        cancelled.set()
        result = await world.run(handle, cancelled=cancelled)
        assert result.killed_by is KillReason.CANCELLED
        assert "start" not in world.mechanism.calls
        assert not world.sink.of(CommandStarted)


async def test_a_vanished_caller_kills_the_tree_and_is_audited_as_cancelled(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        with trio.move_on_after(2) as scope:
            await world.run(handle, Behaviour(seconds=None))
        assert scope.cancelled_caught
        running = world.mechanism.sandboxes[0].commands[0]
        assert running.killed
        assert running.closed
        (finished,) = world.sink.of(CommandFinished)
        assert finished.killed_by is KillReason.CANCELLED
        assert (await world.run(handle, Behaviour())).exit_code == 0


async def test_expiry_ends_the_command_with_expired(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        await trio.sleep(14_400 - 10)
        result = await world.run(handle, Behaviour(seconds=None))
        assert (result.killed_by, result.duration_ms) == (KillReason.EXPIRED, 10_000)
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()


@pytest.mark.case("LIF-13")
async def test_shutdown_ends_the_command_with_service_shutdown(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        results = []
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                behaviour = Behaviour(seconds=None, last_words=b"bye")
                results.append(await world.run(handle, behaviour))

            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            assert await world.registry.shut_down(DestroyReason.SERVICE_SHUTDOWN) == 1
        (result,) = results
        assert (result.killed_by, result.stdout) == (KillReason.SERVICE_SHUTDOWN, b"bye")
        assert world.consistent_and_empty()
        with pytest.raises(ExecutionUnavailable) as refused:
            await world.environments.provision(WORKER, spec())
        assert refused.value.code is UnavailableCode.SHUTTING_DOWN


async def test_a_lost_init_is_environment_lost_and_ends_the_environment(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        with pytest.raises(ExecutionUnavailable) as lost:
            await world.run(handle, Behaviour(seconds=None, lost_at=1.0))
        assert lost.value.code is UnavailableCode.ENVIRONMENT_LOST
        assert len(world.sink.of(CommandUnfinished)) == 1
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()


async def test_a_tree_that_outlives_every_attempt_to_destroy_it_is_an_escape_and_an_alert(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_failures=3)) as world:
        handle = await world.environments.provision(WORKER, spec())
        began = trio.current_time()
        with pytest.raises(SandboxEscapeSuspected) as suspected:
            await world.run(handle, Behaviour(seconds=1.0, dies=False))
        assert suspected.value.code is EscapeCode.PROCESS_SURVIVED
        assert trio.current_time() - began == 1.0 + 5.0 + sum(Budgets().destroy_retry_seconds)
        with pytest.raises(ExecutionRejected) as gone:
            await world.run(handle)
        assert gone.value.code is RejectedCode.ENVIRONMENT_GONE
        await wait_all_tasks_blocked()
        (alert,) = world.sink.of(SandboxEscapeWasSuspected)
        assert alert.code is EscapeCode.PROCESS_SURVIVED
        assert world.store.states() == {handle.environment_id: JournalState.QUARANTINED}


@pytest.mark.parametrize("failures", [0, 2])
async def test_a_tree_that_is_late_and_then_proven_dead_is_a_lost_environment_and_no_alert(
    failures: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_failures=failures)) as world:
        handle = await world.environments.provision(WORKER, spec())
        with pytest.raises(ExecutionUnavailable) as lost:
            await world.run(handle, Behaviour(seconds=1.0, dies=False))
        assert lost.value.code is UnavailableCode.ENVIRONMENT_LOST
        await wait_all_tasks_blocked()
        assert world.consistent_and_empty()
        assert world.sink.of(SandboxEscapeWasSuspected) == []
        assert len(world.sink.of(CommandUnfinished)) == 1
        assert [each.part for each in world.sink.of(EnvironmentLost)] == [LostPart.COMMAND]


async def test_a_caller_that_hangs_up_does_not_hide_a_tree_that_survives(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_failures=3)) as world:
        handle = await world.environments.provision(WORKER, spec())
        with trio.move_on_after(1):
            await world.run(handle, Behaviour(seconds=None, dies=False))
        await trio.sleep(60)
        (alert,) = world.sink.of(SandboxEscapeWasSuspected)
        assert alert.code is EscapeCode.PROCESS_SURVIVED


async def test_nobody_waits_for_a_proof_when_the_mechanism_is_gone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(destroy_seconds=20)) as world:
        handle = await world.environments.provision(WORKER, spec())
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def run() -> None:
                with pytest.raises(ExecutionUnavailable) as lost:
                    await world.run(handle, Behaviour(seconds=1.0, dies=False))
                assert lost.value.code is UnavailableCode.ENVIRONMENT_LOST

            await trio.sleep(8)
            began = trio.current_time()
            await world.registry.abandon(within_seconds=10)
            assert trio.current_time() == began


@pytest.mark.case("API-13")
async def test_a_second_command_on_a_busy_environment_is_refused(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.run, handle, Behaviour(seconds=5.0))
            await wait_all_tasks_blocked()
            with pytest.raises(ExecutionRejected) as busy:
                await world.run(handle)
            assert busy.value.code is RejectedCode.ENVIRONMENT_BUSY
        assert (await world.run(handle)).exit_code == 0


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (StartFailure.NOT_FOUND, RejectedCode.COMMAND_NOT_FOUND),
        (StartFailure.NOT_EXECUTABLE, RejectedCode.COMMAND_NOT_EXECUTABLE),
        (StartFailure.BAD_WORKING_DIRECTORY, RejectedCode.WORKING_DIRECTORY_NOT_FOUND),
        (StartFailure.RESOURCES, UnavailableCode.SETUP_FAILED),
    ],
)
async def test_a_command_that_cannot_be_started_is_a_typed_failure_and_leaves_the_environment(
    failure: StartFailure, code: object, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        problem = CommandNotStarted(failure, "detail")
        with pytest.raises((ExecutionRejected, ExecutionUnavailable)) as refused:
            await world.run(handle, Behaviour(not_started=problem))
        assert refused.value.code is code
        assert (await world.run(handle)).exit_code == 0


@pytest.mark.parametrize(
    ("exit_at", "cancel_at", "expected"),
    [(1.0, 2.0, None), (2.0, 1.0, KillReason.CANCELLED), (5.0, 4.0, KillReason.TIMEOUT)],
)
async def test_the_first_of_exit_cancel_and_deadline_wins(
    exit_at: float,
    cancel_at: float,
    expected: KillReason | None,
    tmp_path: Path,
    autojump_clock: MockClock,
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        cancelled = trio.Event()

        async def cancel() -> None:
            await trio.sleep(cancel_at)
            cancelled.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            result = await world.run(
                handle,
                Behaviour(seconds=exit_at),
                ask=command(timeout_seconds=3),
                cancelled=cancelled,
            )
        assert result.killed_by is expected
        assert result.duration_ms == 1000 * min(exit_at, cancel_at, 3.0)


async def test_a_sink_gets_the_output_live_and_the_result_has_none(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    taken: list[tuple[float, OutputStream, bytes]] = []

    async def sink(stream: OutputStream, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        taken.append((trio.current_time(), stream, data))

    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        began = trio.current_time()
        result = await world.run(
            handle,
            Behaviour(seconds=4.0, output=[(1.0, "stdout", b"a"), (2.0, "stderr", b"b")]),
            on_output=sink,
        )
        assert (result.stdout, result.stderr, result.stdout_truncated) == (b"", b"", False)
        assert taken == [
            (began + 1, OutputStream.STDOUT, b"a"),
            (began + 2, OutputStream.STDERR, b"b"),
        ]
        (finished,) = world.sink.of(CommandFinished)
        assert (finished.stdout_bytes, finished.stderr_bytes) == (1, 1)


async def test_a_sink_that_never_takes_anything_cannot_hold_the_end_for_ever(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def stuck(stream: OutputStream, data: bytes) -> None:
        await trio.sleep_forever()

    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        began = trio.current_time()
        result = await world.run(
            handle, Behaviour(seconds=1.0, output=[(0.0, "stdout", b"a")]), on_output=stuck
        )
        assert trio.current_time() - began == 31.0
        assert result.exit_code == 0
        assert result.stdout_truncated
        assert not result.stderr_truncated


async def test_a_workspace_that_cannot_be_compared_is_environment_lost(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        world.mechanism.sandboxes[0].changes_fail = True
        with pytest.raises(ExecutionUnavailable) as lost:
            await world.run(handle)
        assert lost.value.code is UnavailableCode.ENVIRONMENT_LOST
        await wait_all_tasks_blocked()
        assert [each.part for each in world.sink.of(EnvironmentLost)] == [LostPart.COMMAND]


async def test_a_command_that_cannot_be_audited_is_killed_and_reported_so(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec())
        world.sink.fail()
        began = trio.current_time()
        with pytest.raises(ExecutionUnavailable) as refused:
            await world.run(handle, Behaviour(seconds=None))
        assert refused.value.code is UnavailableCode.AUDIT_UNAVAILABLE
        assert trio.current_time() == began
        assert world.mechanism.sandboxes[0].commands[0].killed
        world.sink.recover()
        assert (await world.run(handle)).exit_code == 0
