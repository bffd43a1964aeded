"""The backend for deepagents: its standard tests in a real sandbox, and an agent of the real
package whose model is a script, over the fake."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage

from sbxd.client.blocking import blocking_sandbox, blocking_scope
from sbxd.client.remote import RunDeadline
from sbxd.client.run_scope import RunScope, ScopeEnded
from sbxd.fake.environment import DestroyCall, ExecuteCall, FakeExecutionEnvironment
from sbxd.fake.script import Invocation, Outcome, Script
from sbxd.port.errors import RunBudgetTooLow
from sbxd.tools.deepagents_backend import RunBackend
from sbxd.tools.tool import DEFAULT_ALLOWED, Profile, SideEffect
from tests.redteam.live import LIMITS, WORKER_SOCKET, default_image, specification
from tests.tools.world import SPECIFICATION

REPOSITORY = Path(__file__).parents[2]


def shell(invocation: Invocation, begun: threading.Event) -> Outcome:
    """What the fake answers to a shell line. begun: a line that does not end has begun."""
    line = invocation.argv[-1].removeprefix("exec 2>&1\n")
    match line:
        case "cat a.txt":
            return Outcome(stdout=invocation.files["a.txt"])
        case "long":
            return Outcome(stdout=b"x" * 2_000_000)
        case "forever":
            begun.set()
            return Outcome(sleep_seconds=float("inf"))
        case "brief":
            return Outcome(exit_code=3, sleep_seconds=0.05)
        case "fails":
            return Outcome(exit_code=3, stdout=b"no\n")
    # The preflight of the package's own write: what it asks is its own matter.
    return Outcome()


@contextmanager
def backend(
    environment: FakeExecutionEnvironment,
    *,
    profile: Profile | None = None,
    deadline: RunDeadline | None = None,
) -> Iterator[RunBackend]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[RunScope]:
        async with RunScope(
            environment, SPECIFICATION, environment.workspace, deadline=deadline
        ) as scope:
            yield scope

    with blocking_scope(opened) as sandbox:
        yield RunBackend(sandbox, profile=profile)


def fake(begun: threading.Event | None = None) -> FakeExecutionEnvironment:
    answer = partial(shell, begun=begun or threading.Event())
    return FakeExecutionEnvironment(Script(by_program={"sh": answer}))


def commands(environment: FakeExecutionEnvironment) -> list[ExecuteCall]:
    return [call for call in environment.calls if isinstance(call, ExecuteCall)]


@pytest.mark.needs("daemon")
@pytest.mark.also("gvisor")
def test_the_standard_tests_of_sandboxes_pass_in_a_real_one() -> None:
    finished = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-c", "tests/frameworks/standard.ini",
            "tests/frameworks/deepagents_standard.py",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-8000:]
    # The control: the suite was there and ran, and nothing was left out. Of what is expected to
    # fail, as much as deepagents_standard.py names.
    last = finished.stdout.splitlines()[-1]
    counted = {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", last)}
    assert counted["passed"] >= 79, last
    assert counted.get("xfailed", 0) + counted.get("xpassed", 0) == 7, last
    assert counted.get("skipped", 0) == 0, last


@contextmanager
def real_backend() -> Iterator[RunBackend]:
    image = anyio.run(default_image, backend="trio")
    with blocking_sandbox(WORKER_SOCKET, specification(image, LIMITS)) as sandbox:
        yield RunBackend(sandbox)


@pytest.mark.needs("daemon")
@pytest.mark.also("gvisor")
@pytest.mark.parametrize("size", [15_000, 45_000, 200_000])
def test_an_edit_of_any_size_is_made(size: int) -> None:
    old, new = "old " * (size // 8), "new " * (size // 8)
    with real_backend() as sandbox:
        assert sandbox.upload_files([("/workspace/a.txt", f"<{old}>".encode())])[0].error is None
        edited = sandbox.edit("/workspace/a.txt", old, new)
        assert (edited.error, edited.occurrences) == (None, 1)
        assert sandbox.download_files(["/workspace/a.txt"])[0].content == f"<{new}>".encode()
        assert sandbox.execute("ls -A /tmp").output == "", "its two texts are gone"


class Scripted(GenericFakeChatModel):
    """A model that takes tools and says what its script has."""

    def bind_tools(self, tools: Any, **options: Any) -> "Scripted":
        return self


def calls(*steps: tuple[str, dict[str, Any]]) -> Scripted:
    said = [
        AIMessage(content="", tool_calls=[{"name": name, "args": given, "id": f"call-{at}"}])
        for at, (name, given) in enumerate(steps)
    ]
    return Scripted(messages=iter([*said, AIMessage(content="done")]))


def test_an_agent_of_the_package_runs_in_the_sandbox_and_leaves_none() -> None:
    environment = fake()
    with backend(environment) as sandbox:
        sandbox.upload_files([("/workspace/a.txt", b"42\n")])
        agent = create_deep_agent(
            model=calls(("execute", {"command": "cat a.txt"}), ("execute", {"command": "fails"})),
            backend=sandbox,
        )
        result = agent.invoke({"messages": [{"role": "user", "content": "show it"}]})
        told = [each.content for each in result["messages"] if isinstance(each, ToolMessage)]
        assert "42" in told[0]
        assert "no" in told[1]
        assert "3" in told[1]
    assert isinstance(environment.calls[-1], DestroyCall)
    assert all(call.command.network_enabled is False for call in commands(environment))


def test_a_run_that_asks_for_nothing_makes_nothing() -> None:
    environment = fake()
    with backend(environment) as sandbox:
        assert sandbox.id == SPECIFICATION.run_id
    assert environment.calls == []


def test_files_are_below_the_workspace_and_nowhere_else() -> None:
    environment = fake()
    with backend(environment) as sandbox:
        good, *bad = sandbox.upload_files(
            [
                ("/workspace/d/a", b"1"), ("/etc/passwd", b""), ("/workspace/../etc/a", b""),
                ("/workspace//a", b""), ("a", b""), ("/workspace/", b""), ("/workspace", b""),
            ]
        )  # fmt: skip
        assert good.error is None
        assert {each.error for each in bad} == {"invalid_path"}
        there, folder, missing = sandbox.download_files(
            ["/workspace/d/a", "/workspace/d", "/workspace/no"]
        )
        assert (there.content, there.error) == (b"1", None)
        assert (folder.content, folder.error) == (None, "is_directory")
        assert missing.error == "file_not_found"


def test_a_kill_is_told_and_bounds_hold_whatever_the_model_wishes() -> None:
    environment = fake()
    with backend(environment) as sandbox:
        cut = sandbox.execute("long")
        assert cut.truncated
        assert cut.exit_code == 137
        assert cut.output.endswith("[the sandbox ended the command: OUTPUT_LIMIT]\n")
        for wish, sent in ((None, 300), (0, 300), (-1, 300), (5, 5), (9000, 300)):
            sandbox.execute("x", timeout=wish)
            assert commands(environment)[-1].command.timeout_seconds == sent


def test_the_profile_has_the_say_over_code_and_network() -> None:
    environment = fake()
    with backend(environment, profile=Profile(frozenset())) as sandbox:
        denied = sandbox.execute("cat a.txt")
        assert (denied.exit_code, commands(environment)) == (126, [])
        assert "denied" in denied.output
    network = Profile(DEFAULT_ALLOWED | {SideEffect.SANDBOX_NETWORK})
    with backend(environment, profile=network) as sandbox:
        sandbox.execute("x")
        assert commands(environment)[-1].command.network_enabled is True


def test_what_ends_the_run_is_raised_and_no_answer() -> None:
    environment = fake()
    late = RunDeadline(clock=lambda: 0.0, at=1.0)
    with backend(environment, deadline=late) as sandbox:
        with pytest.raises(RunBudgetTooLow):
            sandbox.execute("x")
        with pytest.raises(RunBudgetTooLow):
            asyncio.run(sandbox.aexecute("x"))
        assert environment.calls == []
        inner = sandbox._sandbox
        inner._portal.call(inner._scope.suspend)
        with pytest.raises(ScopeEnded):
            sandbox.execute("x")


def test_a_cancelled_call_kills_its_command_and_the_next_has_its_turn() -> None:
    begun = threading.Event()
    environment = fake(begun)

    async def main(sandbox: RunBackend) -> None:
        running = asyncio.create_task(sandbox.aexecute("forever"))
        assert await asyncio.to_thread(begun.wait, 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(60):
            assert (await sandbox.aexecute("fails")).exit_code == 3

    with backend(environment) as sandbox:
        asyncio.run(main(sandbox))


def test_many_threads_at_once_take_turns() -> None:
    environment = fake()

    async def main(sandbox: RunBackend) -> None:
        async with asyncio.TaskGroup() as tasks:
            ran = [tasks.create_task(asyncio.to_thread(sandbox.execute, "brief")) for _ in range(8)]
        assert {each.result().exit_code for each in ran} == {3}

    with backend(environment) as sandbox:
        asyncio.run(main(sandbox))
    assert len(commands(environment)) == 8
