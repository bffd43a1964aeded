"""The MCP server, driven by the official client: in memory, over a pipe and over the loopback."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx2
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.tools import mcp_http
from sbxd.tools.mcp_http import http_door
from sbxd.tools.mcp_server import TRUST_KEY, McpSession, make_server
from tests.artifacts.world import Folder, run
from tests.tools.mcp_world import (
    GOOD,
    HELLO,
    MODES,
    TOKEN,
    Sessions,
    http_client,
    http_server,
    text_of,
    use,
    value_of,
)
from tests.tools.world import PICTURE, RUN, TENANT, store


@pytest.mark.parametrize("mode", MODES)
def test_a_client_lists_runs_reads_and_exports_and_leaves_nothing(
    tmp_path: Path, backend: str, mode: str
) -> None:
    sessions = Sessions(store(tmp_path), [])

    async def main() -> None:
        async with Client(make_server(sessions), mode=mode) as client:
            await use(client)
        assert len(sessions.environments) == 1
        assert sessions.calls(0) == ["ProvisionCall", "ExecuteCall", "DestroyCall"]

    run(backend, main)


def test_a_session_that_calls_nothing_makes_nothing(tmp_path: Path) -> None:
    sessions = Sessions(store(tmp_path), [])

    async def main() -> None:
        async with Client(make_server(sessions)) as client:
            await client.list_tools()
            await client.call_tool("workspace_list", {})
        assert sessions.calls(0) == []

    run("asyncio", main)


WRONG_CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("sandbox_run_command", {"command": "ls"}, '["python3", "script.py"]'),
    ("sandbox_run_command", {"command": ["nothing"]}, "no such program"),
    ("workspace_read_text", {"path": "../x"}, "dot components"),
    ("sandbox.run_command", {"command": []}, "array"),
    ("shell", {}, "no tool"),
]


def test_a_refusal_is_a_result_that_the_model_reads(tmp_path: Path) -> None:
    sessions = Sessions(store(tmp_path), [])

    async def main() -> None:
        async with Client(make_server(sessions)) as client:
            for name, arguments, said in WRONG_CALLS:
                result = await client.call_tool(name, arguments)
                assert result.is_error
                assert said in text_of(result)

    run("asyncio", main)


def test_a_plot_that_is_exported_is_shown_as_an_image(tmp_path: Path) -> None:
    sessions = Sessions(store(tmp_path), [])

    async def main() -> None:
        async with Client(make_server(sessions)) as client:
            await client.call_tool("sandbox_run_command", {"command": ["plot"]})
            exported = await client.call_tool("artifact_export", {"path": "plot.png"})
        kinds = [each.type for each in exported.content]
        assert kinds == ["text", "resource_link", "image"]
        image: Any = exported.content[2]
        assert (image.mime_type, base64.b64decode(image.data)) == ("image/png", PICTURE)
        assert image.meta[TRUST_KEY] == "EXTERNAL_UNTRUSTED"

    run("asyncio", main)


def test_an_artifact_of_another_run_is_not_given_out(tmp_path: Path) -> None:
    sessions = Sessions(store(tmp_path), [])

    @asynccontextmanager
    async def another() -> AsyncIterator[McpSession]:
        async with sessions() as session:
            yield McpSession(session.tools, session.artifacts, TENANT, type(RUN)("run-2"))

    async def main() -> None:
        async with Client(make_server(sessions)) as client:
            uri = await use(client)
        async with Client(make_server(another)) as client:
            for wrong in (uri, "sbxd-artifact:../../etc/passwd", "file:///etc/passwd"):
                with pytest.raises(MCPError):
                    await client.read_resource(wrong)

    run("asyncio", main)


def test_a_client_that_vanishes_in_a_command_leaves_no_environment(tmp_path: Path) -> None:
    sessions = Sessions(store(tmp_path), [])

    async def call() -> None:
        async with Client(make_server(sessions), mode="legacy") as client:
            await client.call_tool("sandbox_run_command", {"command": ["forever"]})

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            while not sessions.environments or sessions.calls(0)[-1:] != ["ExecuteCall"]:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert sessions.calls(0) == ["ProvisionCall", "ExecuteCall", "DestroyCall"]

    run("asyncio", main)


@pytest.mark.parametrize("mode", MODES)
def test_over_http_each_session_has_its_own_environment_until_it_ends(
    tmp_path: Path, mode: str
) -> None:
    sessions = Sessions(store(tmp_path), [])

    async def main() -> None:
        async with http_server(sessions) as url:
            async with http_client(url, mode=mode) as one, http_client(url, mode=mode) as other:
                await use(one)
                listed = await other.call_tool("workspace_list", {})
                assert value_of(listed)["entries"] == []
                await use(other)
            with anyio.fail_after(60):
                while any(calls[-1:] != ["DestroyCall"] for calls in map(sessions.calls, (0, 1))):
                    await anyio.lowlevel.checkpoint()
        assert len(sessions.environments) == 2

    run("asyncio", main)


def test_over_http_nothing_is_looked_at_without_the_token_or_from_another_origin(
    tmp_path: Path,
) -> None:
    sessions = Sessions(store(tmp_path), [])

    async def main() -> None:
        async with http_server(sessions) as url, httpx2.AsyncClient(timeout=60) as http:
            cases = [
                ({}, 401),
                ({"Authorization": "Bearer wrong"}, 401),
                ({"Authorization": TOKEN}, 401),
                ({**GOOD, "Host": "evil.example"}, 421),
                ({**GOOD, "Origin": "https://evil.example"}, 403),
                ({**GOOD, "Mcp-Session-Id": "0" * 32}, 404),
                ({**GOOD, "MCP-Protocol-Version": "2026-07-28"}, 400),
            ]
            for headers, status in cases:
                answer = await http.post(url, json=HELLO, headers=headers)
                assert (answer.status_code, headers) == (status, headers)
            # What fails to begin a session leaves none behind.
            assert (await http.post(url, json={}, headers=GOOD)).status_code == 400
            assert [each.calls for each in sessions.environments if each.calls] == []
            begun = await http.post(url, json=HELLO, headers=GOOD)
            assert begun.status_code == 200
            assert begun.headers["mcp-session-id"]

    run("asyncio", main)


def test_over_http_an_idle_session_ends_and_the_number_of_them_is_bounded(tmp_path: Path) -> None:
    sessions = Sessions(store(tmp_path), [])

    async def main() -> None:
        async with (
            http_server(sessions, idle_seconds=0.3, sessions_max=1) as url,
            httpx2.AsyncClient(timeout=60, headers=GOOD) as http,
        ):
            first = await http.post(url, json=HELLO)
            assert first.status_code == 200
            statuses = set()
            with anyio.fail_after(60):
                while 200 not in statuses:
                    statuses.add((await http.post(url, json=HELLO)).status_code)
            assert statuses <= {200, 503}

    run("asyncio", main)


def test_over_http_a_session_whose_daemon_is_gone_ends_alone(tmp_path: Path) -> None:
    sessions = Sessions(store(tmp_path), [])
    up = [True]

    @asynccontextmanager
    async def sometimes() -> AsyncIterator[McpSession]:
        if not up[0]:
            raise ExecutionUnavailable(UnavailableCode.UNREACHABLE, "no daemon")
        async with sessions() as session:
            yield session

    async def refused(url: str) -> None:
        async with http_client(url, mode="legacy"):
            raise AssertionError

    async def main() -> None:
        async with http_server(sometimes) as url, http_client(url) as one:
            up[0] = False
            with anyio.fail_after(60), pytest.raises(BaseExceptionGroup) as caught:
                await refused(url)
            assert not caught.group_contains(AssertionError)
            up[0] = True
            await use(one)
            async with http_client(url) as other:
                await use(other)

    run("asyncio", main)


def test_a_short_token_opens_no_door() -> None:
    async def main() -> None:
        async with http_door(Sessions(Folder(Path("/nowhere")), []), "short"):
            raise AssertionError

    with pytest.raises(ValueError, match="token"):
        anyio.run(main)
    assert mcp_http.TOKEN_BYTES_MIN == 16
