"""The fake records, plays its script and keeps time, and needs neither trio nor a daemon."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import anyio
import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.fake.environment import (
    DestroyCall,
    ExecuteCall,
    FakeExecutionEnvironment,
    ProvisionCall,
)
from sbxd.fake.script import Invocation, Outcome, Script
from sbxd.port.command import ExecutionCommand, KillReason
from sbxd.port.egress import DENY_ALL, EgressDestination, EgressMode
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    UnavailableCode,
)
from sbxd.port.limits import MIB
from sbxd.settings import EgressSettings
from tests.service.requests import SPECIFICATION, specification


def command(*argv: str, timeout_seconds: int = 60) -> ExecutionCommand:
    return ExecutionCommand(
        argv=argv,
        working_directory=".",
        timeout_seconds=timeout_seconds,
        stdin=None,
        maximum_output_bytes=MIB,
    )


def test_the_worker_side_imports_no_trio_no_asyncio_and_nothing_of_the_daemon() -> None:
    code = (
        "import sys\n"
        "import sbxd.fake.environment, sbxd.client.remote, sbxd.client.workspace\n"
        "import sbxd.client.admin\n"
        "bad = [n for n in sys.modules if n.split('.')[0] in {'trio', 'subprocess', 'pystemd'}\n"
        "  or n.startswith(('sbxd.lifecycle', 'sbxd.mechanism', 'sbxd.service',"
        " 'sbxd.launcher'))]\n"
        "print(bad)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    planted = subprocess.run(
        [sys.executable, "-c", "import sbxd.fake.service\n" + code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "sbxd.lifecycle" in planted.stdout


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_runs_in_either_event_loop_and_records_what_it_was_asked(backend: str) -> None:
    fake = FakeExecutionEnvironment(Script(by_argv={("hi",): Outcome(stdout=b"hi")}))

    async def main() -> None:
        handle = await fake.provision(SPECIFICATION)
        assert (await fake.execute(handle, command("hi"))).stdout == b"hi"
        with pytest.raises(ExecutionRejected):
            await fake.execute(handle, command("unknown"))
        await fake.destroy(handle)

    anyio.run(main, backend=backend)
    assert [type(call) for call in fake.calls] == [
        ProvisionCall,
        ExecuteCall,
        ExecuteCall,
        DestroyCall,
    ]


def test_a_script_answers_by_the_whole_vector_then_by_the_program_then_otherwise() -> None:
    script = Script(
        by_argv={("a", "b"): Outcome(exit_code=1)},
        by_program={"a": lambda call: Outcome(exit_code=len(call.argv) + 10)},
        otherwise=Outcome(exit_code=3),
    )

    def code(*argv: str) -> int:
        found = script.answer(
            Invocation(argv, b"", environment={}, working_directory="/workspace", files={})
        )
        assert found is not None
        return found.exit_code

    assert (code("a", "b"), code("a"), code("z")) == (1, 11, 3)


@pytest.mark.parametrize("reason", [KillReason.MEMORY, KillReason.PIDS])
async def test_a_scripted_kill_keeps_the_output(reason: KillReason) -> None:
    fake = FakeExecutionEnvironment(Script(otherwise=Outcome(stdout=b"x", killed_by=reason)))
    handle = await fake.provision(SPECIFICATION)
    result = await fake.execute(handle, command("any"))
    assert (result.killed_by, result.exit_code, result.stdout) == (reason, None, b"x")


async def test_a_command_that_fills_the_workspace_is_killed_for_it() -> None:
    limits = msgspec.structs.replace(SPECIFICATION.limits, workspace_bytes=16 * MIB)
    fake = FakeExecutionEnvironment(Script(otherwise=Outcome(writes={"a": bytes(17 * MIB)})))
    handle = await fake.provision(msgspec.structs.replace(SPECIFICATION, limits=limits))
    assert (await fake.execute(handle, command("any"))).killed_by is KillReason.DISK


class Wall:
    """A wall clock that follows the mock clock of the loop."""

    def __call__(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=trio.current_time())


async def test_the_end_of_an_environments_life_ends_its_command(
    autojump_clock: MockClock,
) -> None:
    limits = msgspec.structs.replace(FAKE_SETTINGS.limits, environment_lifetime_seconds=100)
    fake = FakeExecutionEnvironment(
        Script(otherwise=Outcome(sleep_seconds=float("inf"))),
        settings=msgspec.structs.replace(FAKE_SETTINGS, limits=limits),
        wall_clock=Wall(),
    )
    handle = await fake.provision(SPECIFICATION)
    assert handle.expires_at - handle.created_at == timedelta(seconds=100)
    await trio.sleep(70)
    result = await fake.execute(handle, command("any", timeout_seconds=60))
    assert result.killed_by is KillReason.EXPIRED
    assert not result.timed_out
    assert trio.current_time() == 100
    with pytest.raises(ExecutionRejected) as caught:
        await fake.execute(handle, command("any"))
    assert caught.value.code is RejectedCode.ENVIRONMENT_GONE


async def test_an_expired_environment_is_gone_without_being_used(
    autojump_clock: MockClock,
) -> None:
    limits = msgspec.structs.replace(FAKE_SETTINGS.limits, environment_lifetime_seconds=10)
    fake = FakeExecutionEnvironment(
        Script(otherwise=Outcome()),
        settings=msgspec.structs.replace(FAKE_SETTINGS, limits=limits),
        wall_clock=Wall(),
    )
    handle = await fake.provision(SPECIFICATION)
    await trio.sleep(10)
    with pytest.raises(ExecutionRejected):
        await fake.execute(handle, command("any"))


async def test_no_more_environments_than_allowed_live_at_once() -> None:
    limits = msgspec.structs.replace(FAKE_SETTINGS.limits, environments_max=2)
    settings = msgspec.structs.replace(FAKE_SETTINGS, limits=limits)
    fake = FakeExecutionEnvironment(Script(), settings=settings)
    first = await fake.provision(specification("1"))
    await fake.provision(specification("2"))
    with pytest.raises(ExecutionUnavailable) as full:
        await fake.provision(specification("3"))
    assert full.value.code is UnavailableCode.CAPACITY
    assert full.value.retry_after_seconds == 30.0
    await fake.destroy(first)
    await fake.provision(specification("3"))


async def test_no_more_memory_is_promised_than_may_be() -> None:
    most = 2 * SPECIFICATION.limits.memory_bytes - 1
    limits = msgspec.structs.replace(FAKE_SETTINGS.limits, memory_committed_max_bytes=most)
    settings = msgspec.structs.replace(FAKE_SETTINGS, limits=limits)
    fake = FakeExecutionEnvironment(Script(), settings=settings)
    first = await fake.provision(specification("1"))
    with pytest.raises(ExecutionUnavailable) as full:
        await fake.provision(specification("2"))
    assert full.value.code is UnavailableCode.CAPACITY
    assert full.value.retry_after_seconds == 30.0
    await fake.destroy(first)
    await fake.provision(specification("2"))


def test_a_specification_is_checked_as_on_the_wire() -> None:
    wrong: EnvironmentSpec = msgspec.structs.replace(SPECIFICATION, image_digest="latest")

    async def main() -> None:
        with pytest.raises(ExecutionRejected) as caught:
            await FakeExecutionEnvironment(Script()).provision(wrong)
        assert caught.value.code is RejectedCode.PROTOCOL

    anyio.run(main)


async def test_it_grants_what_its_settings_list() -> None:
    assert await FakeExecutionEnvironment(Script()).network_grant() == DENY_ALL
    listed = (EgressDestination(host="pypi.example.org", ports=(443,)),)
    settings = msgspec.structs.replace(
        FAKE_SETTINGS, egress=EgressSettings(mode=EgressMode.ALLOWLIST, destinations=listed)
    )
    grant = await FakeExecutionEnvironment(Script(), settings=settings).network_grant()
    assert (grant.mode, grant.destinations) == (EgressMode.ALLOWLIST, listed)
