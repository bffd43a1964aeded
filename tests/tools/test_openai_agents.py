"""The tools in the OpenAI Agents SDK's own loop, with a model that is a script."""

import json
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, RunConfig, Runner
from agents.exceptions import AgentsException
from agents.testing import ScriptedModel
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage

from sbxd.client.remote import RunDeadline
from sbxd.tools.openai_agents import function_tools
from sbxd.tools.tool import Profile, ToolRunEnded
from tests.artifacts.world import Folder, run
from tests.tools.world import store, world

QUIET = RunConfig(tracing_disabled=True)
CALLS: list[tuple[str, str]] = [
    ("workspace_write_text", json.dumps({"path": "numbers.txt", "text": "1\n2\n39\n"})),
    ("sandbox_run_command", json.dumps({"command": "python3 sum.py numbers.txt"})),
    ("sandbox_run_command", "[1]"),
    ("sandbox_run_command", json.dumps({"command": ["python3", "sum.py", "numbers.txt"]})),
    ("artifact_export", json.dumps({"path": "total.csv"})),
]


def call(position: int, name: str, arguments: str) -> list[Any]:
    return [
        ResponseFunctionToolCall(
            type="function_call", call_id=f"call-{position}", name=name, arguments=arguments
        )
    ]


def answer(text: str) -> list[Any]:
    return [
        ResponseOutputMessage.model_validate(
            {
                "id": "m", "type": "message", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
            }
        )
    ]  # fmt: skip


def outputs(result: Any) -> list[dict[str, Any]]:
    items = result.to_input_list()
    return [json.loads(each["output"]) for each in items if "output" in each]


def test_an_agent_writes_runs_and_exports_and_its_sandbox_is_gone(tmp_path: Path) -> None:
    folder: Folder = store(tmp_path)

    async def main() -> None:
        async with world(folder) as made:
            steps = [call(at, *each) for at, each in enumerate(CALLS)]
            agent = Agent(
                name="analyst",
                model=ScriptedModel([*steps, answer("42")]),
                tools=list(function_tools(made.tools)),
            )
            result = await Runner.run(agent, "add the numbers", run_config=QUIET)
            assert result.final_output == "42"
            told = outputs(result)
            assert told[1]["error"] == "VALIDATION"
            assert '["python3", "script.py"]' in told[1]["message"]
            assert told[2]["error"] == "VALIDATION"
            assert told[3]["trust"] == "EXTERNAL_UNTRUSTED"
            assert told[3]["result"]["stdout"] == "42\n"
            assert told[4]["result"]["media_type"] == "text/csv"
        assert made.calls == ["provision", "execute", "destroy"]

    run("asyncio", main)
    assert len(folder.objects()) == 1


def test_a_run_without_a_budget_ends_instead_of_going_on() -> None:
    async def main() -> None:
        async with world(deadline=RunDeadline(clock=lambda: 0.0, at=1.0)) as made:
            model = ScriptedModel([call(0, "sandbox_run_command", '{"command": ["true"]}')])
            agent = Agent(name="late", model=model, tools=list(function_tools(made.tools)))
            with pytest.raises((ToolRunEnded, AgentsException)):
                await Runner.run(agent, "go", run_config=QUIET)
        assert made.calls == []

    run("asyncio", main)


async def test_only_what_the_profile_allows_is_offered() -> None:
    async with world() as made:
        assert len(function_tools(made.tools)) == 5
    async with world(profile=Profile(frozenset())) as made:
        assert function_tools(made.tools) == []
