"""A client of the MCP server: in memory and over the loopback."""

import base64
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx2
import uvicorn
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from sbxd.fake.environment import FakeExecutionEnvironment
from sbxd.tools.mcp_http import http_door
from sbxd.tools.mcp_server import TRUST_KEY, McpSession, OpenSession
from tests.artifacts.world import Folder
from tests.tools.world import RUN, SCRIPT, TENANT, world

REPOSITORY = Path(__file__).parents[2]
TOKEN = "t" * 32
MODES = ["legacy", "auto"]
HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"},
    },
}  # fmt: skip
GOOD = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json, text/event-stream"}
# What the fake's script stands for, and a real sandbox runs.
PROGRAM = """\
import sys
total = sum(int(line) for line in open(sys.argv[1]))
print(total)
open("total.csv", "w").write(f"total\\n{total}\\n")
"""


@dataclass
class Sessions:
    """Opens sessions over the fake; remembers what each asked of the port."""

    folder: Folder
    environments: list[FakeExecutionEnvironment]

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[McpSession]:
        environment = FakeExecutionEnvironment(SCRIPT)
        self.environments.append(environment)
        async with world(self.folder, environment=environment) as made:
            yield McpSession(made.tools, made.artifacts, TENANT, RUN)

    def calls(self, position: int) -> list[str]:
        return [type(call).__name__ for call in self.environments[position].calls]


async def use(client: Client) -> str:
    """What a first-time user does: look, write, run, read, export, fetch. The artifact's URI."""
    listed = await client.list_tools()
    names = [tool.name for tool in listed.tools]
    assert names == [
        "sandbox_run_command", "artifact_export", "workspace_read_text", "workspace_write_text",
        "workspace_list",
    ]  # fmt: skip
    assert "discarded" in (listed.tools[0].description or "")
    written = await client.call_tool(
        "workspace_write_text", {"path": "numbers.txt", "text": "1\n2\n39\n"}
    )
    assert not written.is_error
    await client.call_tool("workspace_write_text", {"path": "sum.py", "text": PROGRAM})
    ran = await client.call_tool(
        "sandbox_run_command", {"command": ["python3", "sum.py", "numbers.txt"]}
    )
    assert value_of(ran)["stdout"] == "42\n"
    assert value_of(ran)["files_changed"][0]["path"] == "total.csv"
    assert (ran.meta or {})[TRUST_KEY] == "EXTERNAL_UNTRUSTED"
    assert ran.structured_content is None, "a model is shown it once"
    read = await client.call_tool("workspace_read_text", {"path": "total.csv"})
    assert value_of(read)["text"] == "total\n42\n"
    exported = await client.call_tool("artifact_export", {"path": "total.csv"})
    link = exported.content[1]
    assert link.type == "resource_link"
    fetched = await client.read_resource(link.uri)
    contents: Any = fetched.contents[0]
    assert base64.b64decode(contents.blob) == b"total\n42\n"
    resources = (await client.list_resources()).resources
    assert [str(each.uri) for each in resources] == [str(link.uri)]
    return str(link.uri)


def text_of(result: Any) -> str:
    return str(result.content[0].text)


def value_of(result: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text_of(result))
    return value


@asynccontextmanager
async def http_server(
    sessions: OpenSession, *, idle_seconds: float = 600, sessions_max: int = 64
) -> AsyncIterator[str]:
    """The URL of a door that is served on the loopback."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        async with http_door(
            sessions, TOKEN, idle_seconds=idle_seconds, sessions_max=sessions_max
        ) as app:
            config = uvicorn.Config(app, lifespan="off", log_level="warning")
            server = uvicorn.Server(config)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: server.serve(sockets=[listening]))
                try:
                    yield f"http://127.0.0.1:{port}/mcp"
                finally:
                    server.should_exit = True


@asynccontextmanager
async def http_client(url: str, *, mode: str = "auto", token: str = TOKEN) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client
