"""The hold of one run on one environment: lazy, bounded, and gone on every way out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import anyio
import anyio.lowlevel
import pytest
import trio
from trio.testing import MockClock

from sbxd.client.blocking import blocking_scope
from sbxd.client.bridge import BridgeHoldExceeded
from sbxd.client.leases import LeasedEnvironments
from sbxd.client.remote import Hooks, RemoteExecutionEnvironment, RunDeadline
from sbxd.client.run_scope import (
    HoldExceeded,
    RunScope,
    ScopeEnded,
    remote_workspaces,
)
from sbxd.fake.environment import ExecuteCall, FakeExecutionEnvironment
from sbxd.fake.script import Outcome, Script
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import (
    BudgetExhausted,
    EscapeCode,
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    RunBudgetTooLow,
    SandboxEscapeSuspected,
    StaleLease,
    UnavailableCode,
)
from sbxd.tools.tool import ToolName, ToolRefused, ToolRunEnded
from tests.artifacts.world import run
from tests.service.memory import memory_daemon
from tests.tools.world import SCRIPT, SPECIFICATION, World, world


def command(*argv: str, timeout_seconds: int = 300) -> ExecutionCommand:
    return ExecutionCommand(
        argv=argv,
        working_directory=".",
        timeout_seconds=timeout_seconds,
        stdin=None,
        maximum_output_bytes=1024,
    )


TRUE = command("true")


class Failing(FakeExecutionEnvironment):
    """A fake whose commands raise what it is told to."""

    def __init__(self, *errors: PortError) -> None:
        super().__init__(SCRIPT)
        self.errors = list(errors)
        self.destroy_error: PortError | None = None
        self.destroy_hangs = False
        self.destroyed = 0

    async def execute(self, environment: EnvironmentHandle, command: ExecutionCommand) -> object:  # type: ignore[override]
        self.calls.append(ExecuteCall(environment, command))
        await anyio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop(0)
        return await super().execute(environment, command)

    async def destroy(self, environment: EnvironmentHandle) -> None:
        if self.destroy_hangs:
            await anyio.sleep_forever()
        if self.destroy_error is not None:
            raise self.destroy_error
        await super().destroy(environment)
        self.destroyed += 1


def test_a_run_that_runs_nothing_makes_nothing(backend: str) -> None:
    async def main() -> None:
        async with world() as made:
            assert made.scope.existing_workspace() is None
        assert made.calls == []

    run(backend, main)


def test_one_environment_is_held_across_steps_and_destroyed_at_the_end(backend: str) -> None:
    async def main() -> None:
        async with world() as made:
            await (await made.scope.workspace()).write("a", b"1")
            await made.scope.execute(TRUE)
            assert await (await made.scope.workspace()).read("a") == b"1"
        assert made.calls == ["provision", "execute", "destroy"]

    run(backend, main)


async def test_many_first_calls_at_once_make_one_environment() -> None:
    async with world() as made:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(made.scope.environment)
        assert made.calls == ["provision"]


@pytest.mark.parametrize("way", ["raise", "cancel", "deadline", "system-exit"])
def test_it_is_destroyed_on_every_way_out(backend: str, way: str) -> None:
    async def body(made: World, outer: anyio.CancelScope) -> None:
        await made.scope.execute(TRUE)
        if way == "deadline":
            outer.deadline = anyio.current_time() + 0.2  # of a run that has an environment
        if way == "raise":
            raise ValueError("a bug of the caller")
        if way == "system-exit":
            raise SystemExit(3)
        with anyio.CancelScope() as inner:
            if way == "cancel":
                inner.cancel()
            await made.scope.execute(command("forever"))

    async def main() -> None:
        environment = FakeExecutionEnvironment(SCRIPT)
        ended: type[BaseException] | None = None
        with anyio.move_on_after(60) as outer:
            try:
                async with world(environment=environment) as made:
                    await body(made, outer)
            except (ValueError, SystemExit) as error:
                ended = type(error)
        assert ended is {"raise": ValueError, "system-exit": SystemExit}.get(way)
        assert outer.cancelled_caught is (way == "deadline")
        assert made.calls[0] == "provision"
        assert made.calls[-1] == "destroy"

    run(backend, main)


async def test_a_daemon_that_does_not_answer_holds_nobody_at_the_end(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    environment = Failing()
    environment.destroy_hangs = True
    begun = trio.current_time()
    with trio.CancelScope() as outer:
        async with world(environment=environment) as made:
            await made.scope.environment()
            outer.cancel()
    assert trio.current_time() - begun == pytest.approx(10, abs=0.1)
    assert "not seen destroyed" in caplog.text


async def test_a_destroy_that_fails_does_not_hide_what_the_block_gave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = Failing()
    environment.destroy_error = ExecutionUnavailable(UnavailableCode.UNREACHABLE, "gone")

    async def fail() -> None:
        async with world(environment=environment) as made:
            await made.scope.environment()
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert "was not destroyed" in caplog.text


@pytest.mark.parametrize(
    ("left", "asked", "sent"), [(100.0, 300, 100), (5.0, 300, 5), (400.0, 300, 300), (60.9, 5, 5)]
)
async def test_the_runs_deadline_lowers_the_timeout(left: float, asked: int, sent: int) -> None:
    async with world(deadline=RunDeadline(clock=lambda: 0.0, at=left)) as made:
        await made.scope.execute(command("true", timeout_seconds=asked))
        assert made.last_command().command.timeout_seconds == sent


async def test_below_the_floor_no_call_is_made() -> None:
    async with world(deadline=RunDeadline(clock=lambda: 0.0, at=4.9)) as made:
        with pytest.raises(RunBudgetTooLow):
            await made.scope.execute(TRUE)
        with pytest.raises(ToolRunEnded, match=r"4\.9 s"):
            await made.tools.call(ToolName.RUN_COMMAND, {"command": ["true"]})
    assert made.calls == []


async def test_the_floor_is_looked_at_again_when_the_environment_has_been_made() -> None:
    times = iter([0.0, 96.0])
    async with world(deadline=RunDeadline(clock=lambda: next(times), at=100.0)) as made:
        with pytest.raises(RunBudgetTooLow):
            await made.scope.execute(TRUE)
    assert made.calls == ["provision", "destroy"]


HALTS = [
    BudgetExhausted("no more operations"),
    StaleLease("an older lease"),
    SandboxEscapeSuspected(EscapeCode.PROCESS_SURVIVED, "a process survived"),
]
GONE = [
    ExecutionRejected(RejectedCode.ENVIRONMENT_GONE, "no such environment"),
    ExecutionUnavailable(UnavailableCode.ENVIRONMENT_LOST, "lost"),
]


@pytest.mark.parametrize("error", HALTS, ids=lambda each: type(each).__name__)
async def test_a_halt_is_not_got_around_by_another_environment(error: PortError) -> None:
    environment = Failing(error)
    async with world(environment=environment) as made:
        for _ in range(2):
            with pytest.raises(type(error)):
                await made.scope.execute(TRUE)
        with pytest.raises(ToolRunEnded):
            await made.tools.call(ToolName.WRITE_TEXT, {"path": "a", "text": ""})
    assert made.calls.count("provision") == 1


@pytest.mark.parametrize("error", GONE, ids=lambda each: each.code)
async def test_after_a_loss_the_next_command_begins_in_an_empty_workspace_and_is_told(
    error: PortError,
) -> None:
    environment = Failing(error)
    async with world(environment=environment) as made:
        await made.tools.call(ToolName.WRITE_TEXT, {"path": "a", "text": ""})
        with pytest.raises(ToolRefused, match="begins in an empty workspace"):
            await made.tools.call(ToolName.RUN_COMMAND, {"command": ["true"]})
        listed = await made.tools.call(ToolName.LIST, {})
        assert listed.value["entries"] == []
        await made.tools.call(ToolName.RUN_COMMAND, {"command": ["true"]})
    assert made.calls.count("provision") == 2


async def test_an_approval_in_time_keeps_the_environment(autojump_clock: MockClock) -> None:
    async def approval() -> str:
        await trio.sleep(299)
        return "yes"

    async with world() as made:
        before = await made.scope.environment()
        assert await made.scope.hold(approval) == "yes"
        assert await made.scope.environment() == before


async def test_after_300_seconds_the_environment_is_gone_and_the_scope_with_it(
    autojump_clock: MockClock,
) -> None:
    async with world() as made:
        await made.scope.environment()
        begun = trio.current_time()
        with pytest.raises(HoldExceeded):
            await made.scope.hold(anyio.sleep_forever)
        assert trio.current_time() - begun == pytest.approx(300, abs=0.1)
        assert made.calls == ["provision", "destroy"]
        with pytest.raises(ScopeEnded):
            await made.scope.execute(TRUE)
        with pytest.raises(ToolRunEnded):
            await made.tools.call(ToolName.RUN_COMMAND, {"command": ["true"]})
    assert made.calls == ["provision", "destroy"]


class Holding(FakeExecutionEnvironment):
    """A fake whose commands are held over their bridge for longer than their worker waits."""

    async def execute(
        self, environment: EnvironmentHandle, command: ExecutionCommand
    ) -> ExecutionResult:
        await super().execute(environment, command)
        raise BridgeHoldExceeded("no answer within 300 seconds")


def test_a_bridge_hold_that_is_exceeded_releases_the_environment_and_ends_the_run(
    backend: str,
) -> None:
    async def main() -> None:
        async with world(environment=Holding(SCRIPT)) as made:
            with pytest.raises(ToolRunEnded, match="no answer within 300 seconds"):
                await made.tools.call(ToolName.RUN_COMMAND, {"command": ["true"]})
            assert made.calls == ["provision", "execute", "destroy"]
            assert made.scope.handle is None
            with pytest.raises(ScopeEnded):
                await made.scope.execute(TRUE)
        async with world(environment=Holding(SCRIPT)) as made:
            with pytest.raises(HoldExceeded):
                await made.scope.execute(TRUE)
            assert made.calls == ["provision", "execute", "destroy"]

    run(backend, main)


async def test_a_hold_ends_with_the_environments_own_time(autojump_clock: MockClock) -> None:
    environment = FakeExecutionEnvironment(SCRIPT)
    async with RunScope(environment, SPECIFICATION, environment.workspace) as scope:
        handle = await scope.environment()
        lifetime = (handle.expires_at - handle.created_at).total_seconds()
        await trio.sleep(lifetime - 40)
        begun = trio.current_time()
        with pytest.raises(HoldExceeded):
            await scope.hold(anyio.sleep_forever)
        assert trio.current_time() - begun == pytest.approx(40, abs=5)


@pytest.mark.parametrize("days", [1, -1, 400])
async def test_a_hold_is_as_long_whatever_the_wall_clock_says(
    autojump_clock: MockClock, days: int
) -> None:
    """The daemon's host and this one need not agree on the date, and either may be set."""
    environment = FakeExecutionEnvironment(
        SCRIPT, wall_clock=lambda: datetime.now(UTC) + timedelta(days=days)
    )
    async with RunScope(environment, SPECIFICATION, environment.workspace) as scope:
        await scope.environment()
        begun = trio.current_time()
        with pytest.raises(HoldExceeded):
            await scope.hold(anyio.sleep_forever)
        assert trio.current_time() - begun == pytest.approx(300, abs=5)


async def test_a_refused_approval_keeps_the_environment() -> None:
    async def refuse() -> None:
        raise PermissionError

    async with world() as made:
        before = await made.scope.environment()
        with pytest.raises(PermissionError):
            await made.scope.hold(refuse)
        assert await made.scope.environment() == before


@pytest.mark.parametrize("seconds", [0, -1, 301, float("nan")])
def test_a_hold_is_at_most_300_seconds(seconds: float) -> None:
    environment = FakeExecutionEnvironment(SCRIPT)
    with pytest.raises(ValueError, match="hold_seconds"):
        RunScope(environment, SPECIFICATION, environment.workspace, hold_seconds=seconds)


async def test_a_scope_outside_its_block_does_nothing() -> None:
    async with world() as made:
        pass
    with pytest.raises(ScopeEnded):
        await made.scope.execute(TRUE)
    assert made.calls == []


async def test_an_environment_that_is_made_too_late_is_destroyed() -> None:
    begun, go_on = trio.Event(), trio.Event()

    class Slow(FakeExecutionEnvironment):
        async def provision(self, specification: EnvironmentSpec) -> EnvironmentHandle:
            begun.set()
            await go_on.wait()
            return await super().provision(specification)

    environment = Slow(SCRIPT)

    async def first_call(scope: RunScope) -> None:
        with pytest.raises(ScopeEnded):
            await scope.environment()

    async with trio.open_nursery() as nursery:
        async with world(environment=environment) as made:
            nursery.start_soon(first_call, made.scope)
            await begun.wait()
        go_on.set()
    assert made.calls == ["provision", "destroy"]


async def test_an_expired_environment_is_replaced_by_an_empty_one() -> None:
    script = Script(by_argv={("true",): Outcome()})
    environment = FakeExecutionEnvironment(script)
    async with world(environment=environment) as made:
        first = await made.scope.environment()
        await environment.destroy(first)
        with pytest.raises(ExecutionRejected):
            await made.scope.execute(TRUE)
        assert made.scope.handle is None
        await made.scope.execute(TRUE)
        assert made.scope.handle not in (None, first)


def test_a_plain_script_has_the_same_and_leaves_nothing() -> None:
    environment = FakeExecutionEnvironment(SCRIPT)

    @asynccontextmanager
    async def opened() -> AsyncIterator[RunScope]:
        async with world(environment=environment) as made:
            yield made.scope

    class Bug(Exception):
        pass

    def script() -> None:
        with blocking_scope(opened) as sandbox:
            sandbox.write("numbers.txt", b"1\n2\n")
            assert sandbox.read("numbers.txt") == b"1\n2\n"
            assert sandbox.run(["python3", "sum.py", "numbers.txt"]).stdout == b"3\n"
            assert {each.path for each in sandbox.listdir()} == {"numbers.txt", "total.csv"}
            with pytest.raises(ExecutionRejected, match=r'write \["ls", "-la"\]'):
                sandbox.run("ls -la")
            raise Bug

    with pytest.raises(Bug):
        script()
    assert type(environment.calls[-1]).__name__ == "DestroyCall"


class Registrar:
    """Grants every lease and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def register(self, tenant_id: str, run_id: str, lease_epoch: int) -> object:
        self.told.append(f"register {tenant_id} {run_id} {lease_epoch}")
        return object()

    async def bind(self, lease: object, environment_id: str) -> None:
        self.told.append("bind")

    async def release(self, lease: object) -> None:
        self.told.append("release")


async def test_with_a_registrar_no_environment_is_made_without_a_lease_and_none_is_kept() -> None:
    environment, registrar = FakeExecutionEnvironment(SCRIPT), Registrar()
    leased = LeasedEnvironments(environment, registrar)  # type: ignore[arg-type]
    async with RunScope(leased, SPECIFICATION, environment.workspace) as scope:
        assert registrar.told == []
        await scope.execute(TRUE)
        assert registrar.told == ["register tenant-a run-1 1", "bind"]
    assert registrar.told[2:] == ["release"]
    assert type(environment.calls[-1]).__name__ == "DestroyCall"


@pytest.mark.parametrize("what", ["nothing", "command"])
async def test_a_cancellation_that_takes_the_connection_too_leaves_it_until_all_is_destroyed(
    autojump_clock: MockClock, what: str
) -> None:
    """The whole worker is cancelled, its connection among it: nothing waits for the grace."""
    told: list[object] = []
    async with memory_daemon(SCRIPT) as daemon:
        begun = trio.current_time()
        with trio.CancelScope() as outer:
            async with daemon.channel() as channel:
                hooks = Hooks(on_cancelled=told.append)
                environment = RemoteExecutionEnvironment(channel, hooks=hooks)
                async with RunScope(
                    environment, SPECIFICATION, remote_workspaces(environment)
                ) as scope:
                    await scope.execute(TRUE)
                    assert len(await daemon.environments.list()) == 1
                    if what == "nothing":
                        outer.cancel()
                        await trio.sleep_forever()
                    outer.deadline = trio.current_time() + 5
                    await scope.execute(command("forever"))
        assert await daemon.environments.list() == ()
        assert trio.current_time() - begun < 10
    assert len(told) == (what == "command")


async def test_a_connection_outlives_its_cancelled_block_for_30_seconds_at_most(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        with trio.CancelScope() as outer:
            async with daemon.channel() as channel:
                environment = RemoteExecutionEnvironment(channel)
                outer.cancel()
                with trio.CancelScope(shield=True):
                    handle = await environment.provision(SPECIFICATION)
                    await trio.sleep(29)
                    await environment.destroy(handle)  # the positive control
                    await trio.sleep(2)
                    with pytest.raises(ExecutionUnavailable) as caught:
                        await environment.provision(SPECIFICATION)
        assert caught.value.code is UnavailableCode.UNREACHABLE
