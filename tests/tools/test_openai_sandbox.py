"""A run's sandbox as a live session of the OpenAI Agents SDK: its own agent, with a model that is a
script, and the interface's words one by one."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agents import RunConfig, Runner
from agents.sandbox import (
    ExecTimeoutError,
    ExecTransportError,
    SandboxAgent,
    SandboxError,
    SandboxRunConfig,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.capabilities import Shell
from agents.testing import ScriptedModel

from sbxd.client.remote import connect
from sbxd.client.run_scope import RunScope, remote_workspaces
from sbxd.fake.environment import ExecuteCall, FakeExecutionEnvironment
from sbxd.fake.script import Invocation, Outcome, Script
from sbxd.tools.openai_sandbox import RunSession
from sbxd.tools.tool import DEFAULT_ALLOWED, Profile, SideEffect
from tests.artifacts.world import run
from tests.redteam.live import WORKER_SOCKET, default_image, specification
from tests.tools.test_openai_agents import answer, call
from tests.tools.world import SPECIFICATION


def program(invocation: Invocation) -> Outcome:
    """What the fake answers to a shell line of the agent's."""
    match invocation.argv[-1]:
        case "cat a.txt":
            return Outcome(stdout=invocation.files["a.txt"])
        case "slow":
            return Outcome(sleep_seconds=float("inf"))
        case "brief":
            return Outcome(exit_code=3, sleep_seconds=0.05)
        case "long":
            return Outcome(stdout=b"x" * 5_000_000)
    return Outcome(exit_code=3, stderr=b"no\n")


SCRIPT = Script(by_program={"sh": program, "mkdir": lambda _: Outcome()})


@asynccontextmanager
async def session(
    environment: FakeExecutionEnvironment, profile: Profile | None = None
) -> AsyncIterator[RunSession]:
    async with RunScope(environment, SPECIFICATION, environment.workspace) as scope:
        yield RunSession(scope, profile=profile)


def names(environment: FakeExecutionEnvironment) -> list[str]:
    return [type(call).__name__ for call in environment.calls]


async def agent_run(live: RunSession, steps: list[list[Any]]) -> Any:
    agent = SandboxAgent(
        name="analyst", model=ScriptedModel(steps), capabilities=[Shell()], instructions="work"
    )
    config = RunConfig(tracing_disabled=True, sandbox=SandboxRunConfig(session=live))
    return await Runner.run(agent, "show it", run_config=config)


def outputs(result: Any) -> list[str]:
    return [each["output"] for each in result.to_input_list() if "output" in each]


def test_an_agent_of_the_package_runs_in_the_sandbox_and_leaves_none() -> None:
    environment = FakeExecutionEnvironment(SCRIPT)

    async def main() -> None:
        async with session(environment) as live:
            await live.write(Path("a.txt"), io.BytesIO(b"42\n"))
            result = await agent_run(
                live,
                [
                    call(0, "exec_command", json.dumps({"cmd": "cat a.txt"})),
                    call(1, "exec_command", json.dumps({"cmd": "fails"})),
                    answer("42"),
                ],
            )
            assert result.final_output == "42"
            first, second = outputs(result)
            assert "42" in first
            assert "exited with code 3" in second
            # A session that the caller made outlives the agent's run.
            assert await live.running()

    run("asyncio", main)
    assert names(environment)[0] == "ProvisionCall"
    assert names(environment)[-1] == "DestroyCall"
    assert names(environment).count("ProvisionCall") == 1


def test_closing_the_session_ends_the_environment_at_once() -> None:
    environment = FakeExecutionEnvironment(SCRIPT)

    async def main() -> None:
        async with session(environment) as live:
            assert not await live.running()
            async with live:
                assert await live.running()
            assert not await live.running()
            assert names(environment)[-1] == "DestroyCall"
            with pytest.raises(ExecTransportError, match="has ended"):
                await live.exec("cat a.txt")

    run("asyncio", main)


def test_files_go_by_the_workspace_and_what_is_refused_says_why() -> None:
    async def main() -> None:
        async with session(FakeExecutionEnvironment(SCRIPT)) as live:
            await live.write(Path("/workspace/d/a"), io.BytesIO(b"0123456789"))
            assert (await live.read(Path("d/a"))).read() == b"0123456789"
            assert await live.read_bounded(Path("d/a"), max_bytes=4) == b"0123"
            with pytest.raises(WorkspaceReadNotFoundError):
                await live.read(Path("no"))
            with pytest.raises(WorkspaceArchiveReadError):
                await live.read(Path("d"))
            for outside in ("/etc/passwd", "../etc/passwd", "/workspace/../etc/passwd"):
                with pytest.raises(SandboxError):
                    await live.read(Path(outside))
                with pytest.raises(SandboxError):
                    await live.write(Path(outside), io.BytesIO(b""))
            with pytest.raises(WorkspaceArchiveReadError) as other:
                await live.read(Path("d/a"), user="root")
            assert "one user" in str(other.value.context)
            with pytest.raises(WorkspaceArchiveReadError) as archive:
                await live.persist_workspace()
            assert "as long as its run" in str(archive.value.context)
            with pytest.raises(WorkspaceArchiveWriteError):
                await live.hydrate_workspace(io.BytesIO())

    run("asyncio", main)


def test_kills_and_what_cannot_run_are_told_in_the_interfaces_words() -> None:
    async def main() -> None:
        async with session(FakeExecutionEnvironment(SCRIPT)) as live:
            with pytest.raises(ExecTimeoutError):
                await live.exec("slow", timeout=0.2)
            cut = await live.exec("long")
            assert cut.exit_code == 137
            assert b"OUTPUT_LIMIT" in cut.stderr
            missing = await live.exec("nowhere", shell=False)
            assert missing.exit_code == 127
            with pytest.raises(ExecTransportError):
                await live.exec("./a/b", shell=False)

    run("asyncio", main)


def test_several_calls_at_once_take_turns() -> None:
    async def main() -> None:
        async with session(FakeExecutionEnvironment(SCRIPT)) as live:
            async with asyncio.TaskGroup() as tasks:
                ran = [tasks.create_task(live.exec("brief")) for _ in range(5)]
            assert {each.result().exit_code for each in ran} == {3}

    run("asyncio", main)


def test_the_profile_has_the_say_over_code_and_network() -> None:
    environment = FakeExecutionEnvironment(SCRIPT)

    async def main() -> None:
        async with session(environment, Profile(frozenset())) as live:
            with pytest.raises(ExecTransportError, match="denied"):
                await live.exec("cat a.txt")
        assert names(environment) == []
        for profile, expected in (
            (None, False),
            (Profile(DEFAULT_ALLOWED | {SideEffect.SANDBOX_NETWORK}), True),
        ):
            async with session(environment, profile) as live:
                await live.exec("fails")
            ran = [each for each in environment.calls if isinstance(each, ExecuteCall)]
            assert ran[-1].command.network_enabled is expected

    run("asyncio", main)


@pytest.mark.needs("daemon")
@pytest.mark.also("gvisor")
def test_the_interface_holds_in_a_real_sandbox() -> None:
    """What the SDK builds of commands: directories, listings, moving, removal, patches."""
    wanted = specification(run("trio", default_image))

    async def main() -> None:
        async with (
            connect(WORKER_SOCKET, client_name="tests") as environment,
            RunScope(environment, wanted, remote_workspaces(environment)) as scope,
        ):
            live = RunSession(scope)
            await live.start()
            await live.mkdir("d/e", parents=True)
            await live.write(Path("d/e/a.txt"), io.BytesIO(b"one\n"))
            listed = {each.path for each in await live.ls("d/e") if not each.is_dir()}
            assert listed == {"/workspace/d/e/a.txt"}
            await live.apply_patch(
                {"type": "update_file", "path": "d/e/a.txt", "diff": "@@\n-one\n+two\n"}
            )
            await live.mv("d/e/a.txt", "d/b.txt")
            assert (await live.exec("cat d/b.txt")).stdout == b"two\n"
            # The control: a command follows a link of its own, and the port does not.
            assert (await live.exec("ln -s /etc/passwd link && head -c7 link")).stdout == b"sandbox"
            with pytest.raises(WorkspaceArchiveReadError):
                await live.read(Path("link"))
            await live.rm("d", recursive=True)
            assert (await live.exec("ls")).stdout == b"link\n"

    run("asyncio", main)
