"""Whatever comes out of a sandbox carries its trust label, by every adapter."""

import ast
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agents.tool_context import ToolContext
from mcp import Client

from sbxd import tools
from sbxd.client.blocking import blocking_scope
from sbxd.client.run_scope import RunScope
from sbxd.fake.environment import FakeExecutionEnvironment
from sbxd.port.artifact import TrustLevel
from sbxd.tools.deepagents_backend import RunBackend
from sbxd.tools.mcp_server import TRUST_KEY, McpSession, make_server
from sbxd.tools.openai_agents import function_tools
from sbxd.tools.openai_sandbox import RunSession
from sbxd.tools.tool import UNTRUSTED_NOTE, Profile, ToolName
from tests.tools.test_openai_sandbox import SCRIPT as SHELL
from tests.tools.world import RUN, SCRIPT, SPECIFICATION, TENANT, store, world

UNTRUSTED = TrustLevel.EXTERNAL_UNTRUSTED
# Each tool with arguments that give something, in an order in which they do, and one that fails.
CALLS: list[tuple[ToolName, dict[str, Any]]] = [
    (ToolName.WRITE_TEXT, {"path": "numbers.txt", "text": "1\n2\n"}),
    (ToolName.RUN_COMMAND, {"command": ["python3", "sum.py", "numbers.txt"]}),
    (ToolName.READ_TEXT, {"path": "total.csv"}),
    (ToolName.LIST, {"path": "."}),
    (ToolName.EXPORT, {"path": "total.csv"}),
    (ToolName.READ_TEXT, {"path": "missing"}),
]
# What a framework's answer is made of when it has no label.
WITHOUT_A_LABEL = {
    "BlobResourceContents", "BytesIO", "CallToolResult", "ExecResult", "ExecuteResponse",
    "FileDownloadResponse", "ReadResourceResult", "ResourceLink", "TextResourceContents",
}  # fmt: skip


def test_every_tool_is_called_here() -> None:
    assert {name for name, _ in CALLS} == set(ToolName)


def test_mcp_labels_results_errors_links_and_resources(tmp_path: Path) -> None:
    @asynccontextmanager
    async def sessions() -> AsyncIterator[McpSession]:
        async with world(store(tmp_path)) as made:
            yield McpSession(made.tools, made.artifacts, TENANT, RUN)

    async def main() -> None:
        async with Client(make_server(sessions)) as client:
            uri = None
            for name, arguments in CALLS:
                result: Any = await client.call_tool(name.replace(".", "_"), arguments)
                assert (result.meta or {}).get(TRUST_KEY) in set(TrustLevel), name
                if name is not ToolName.WRITE_TEXT:
                    assert result.meta[TRUST_KEY] == UNTRUSTED, name
                for each in result.content:
                    if each.type == "resource_link":
                        assert each.meta[TRUST_KEY] == UNTRUSTED
                        uri = each.uri
            assert result.is_error
            assert uri is not None
            fetched: Any = await client.read_resource(uri)
            assert fetched.meta[TRUST_KEY] == UNTRUSTED
            assert [each.meta[TRUST_KEY] for each in fetched.contents] == [UNTRUSTED]

    asyncio.run(main())


def test_function_tools_label_results_and_errors(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(store(tmp_path)) as made:
            offered = {each.name: each for each in function_tools(made.tools)}
            for name, arguments in CALLS:
                tool = offered[name.replace(".", "_")]
                text = json.dumps(arguments)
                context: ToolContext[Any] = ToolContext(
                    context=None, tool_name=tool.name, tool_call_id="1", tool_arguments=text
                )
                told = json.loads(await tool.on_invoke_tool(context, text))
                assert told["trust"] in set(TrustLevel), name
                if name is not ToolName.WRITE_TEXT:
                    assert told["trust"] == UNTRUSTED, name

    asyncio.run(main())


def test_a_sandbox_session_labels_output_and_files() -> None:
    async def main() -> None:
        environment = FakeExecutionEnvironment(SHELL)
        async with RunScope(environment, SPECIFICATION, environment.workspace) as scope:
            session = RunSession(scope)
            await (await scope.workspace()).write("a.txt", b"from inside")
            for line in ("cat a.txt", "fails", "missing"):
                result: Any = await session.exec(line)
                assert result.trust is UNTRUSTED
            absent: Any = await session.exec("nothing-of-that-name", shell=False)
            assert absent.trust is UNTRUSTED
            content: Any = await session.read(Path("a.txt"))
            assert (content.read(), content.trust) == (b"from inside", UNTRUSTED)
            beginning: Any = await session._read_bounded(Path("a.txt"), max_bytes=4)
            assert (beginning, beginning.trust) == (b"from", UNTRUSTED)

    asyncio.run(main())


@pytest.mark.parametrize("allowed", [True, False])
def test_a_backend_labels_output_and_files(allowed: bool) -> None:
    environment = FakeExecutionEnvironment(SHELL)

    @asynccontextmanager
    async def opened() -> AsyncIterator[RunScope]:
        async with RunScope(environment, SPECIFICATION, environment.workspace) as scope:
            yield scope

    with blocking_scope(opened) as sandbox:
        backend = RunBackend(sandbox, profile=None if allowed else Profile(frozenset()))
        backend.upload_files([("/workspace/a.txt", b"from inside")])
        responses: list[Any] = [backend.execute("cat a.txt"), backend.execute("fails")]
        responses.append(asyncio.run(backend.aexecute("cat a.txt")))
        responses += backend.download_files(["/workspace/a.txt", "/workspace/missing", "/etc"])
        assert [each.trust for each in responses] == [UNTRUSTED] * 6
        assert ("[not run" in responses[0].output) is not allowed


def test_no_adapter_makes_an_answer_that_has_no_label() -> None:
    folder = Path(str(tools.__file__)).parent
    found = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                name = node.func.id if isinstance(node.func, ast.Name) else name
                if name in WITHOUT_A_LABEL:
                    found.append(f"{path.name}:{node.lineno} {name}")
    assert found == []


def test_a_model_is_told_what_the_label_means(tmp_path: Path) -> None:
    @asynccontextmanager
    async def sessions() -> AsyncIterator[McpSession]:
        async with world(environment=FakeExecutionEnvironment(SCRIPT)) as made:
            yield McpSession(made.tools, made.artifacts, TENANT, RUN)

    assert UNTRUSTED_NOTE in (make_server(sessions).instructions or "")
