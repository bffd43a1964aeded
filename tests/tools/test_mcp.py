"""The MCP server, driven by the official client: in memory, over a pipe and over the loopback."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx2
import pytest
import uvicorn
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client import stdio as mcp_stdio
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from sbxd.client.admin import connect_admin
from sbxd.fake.environment import FakeExecutionEnvironment
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.tools import mcp_http
from sbxd.tools.mcp_http import http_door
from sbxd.tools.mcp_server import TRUST_KEY, McpSession, OpenSession, make_server
from tests.artifacts.world import Folder, run
from tests.contract.subjects import ADMIN_SOCKET, CREDENTIAL_FILE
from tests.tools.world import PICTURE, RUN, SCRIPT, TENANT, store, world

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


# --- over the loopback ----------------------------------------------------------------------------


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


# --- as a program ---------------------------------------------------------------------------------


@pytest.fixture
def patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's client kills a server that has not ended two seconds after its pipe was closed:
    on a busy machine before the session's environment is destroyed."""
    monkeypatch.setattr(mcp_stdio, "PROCESS_TERMINATION_TIMEOUT", 120.0)


@contextmanager
def daemon_program(tmp_path: Path) -> Iterator[None]:
    """A daemon with the fake, as a program."""
    socket_path = tmp_path / "worker.sock"
    socket_path.unlink(missing_ok=True)
    daemon = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.fake_daemon", str(socket_path), str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    try:
        assert daemon.stdout.readline() == b"ready\n"
        yield
    finally:
        daemon.stdin.close()
        daemon.wait(60)
        daemon.stdout.close()


def configuration(tmp_path: Path) -> Path:
    """Of a worker tier whose daemon is that program."""
    (tmp_path / "store").mkdir(mode=0o700)
    config = tmp_path / "worker.toml"
    config.write_text(
        f'[artifacts]\ndirectory = "{tmp_path}/store"\n'
        f'[mcp]\nsocket = "{tmp_path}/worker.sock"\ntenant_id = "tenant-a"\n'
        f'image_digest = "sha256:{"a" * 64}"\n'
    )
    return config


@contextmanager
def fake_daemon(tmp_path: Path) -> Iterator[Path]:
    """The configuration of a worker tier, with its daemon."""
    with daemon_program(tmp_path):
        yield configuration(tmp_path)


@pytest.mark.usefixtures("patient_client")
def test_the_program_serves_a_client_over_its_pipe(tmp_path: Path) -> None:
    async def main(config: Path) -> None:
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-m", "sbxd.worker_cli", "--config", str(config), "mcp"],
            cwd=REPOSITORY,
        )
        async with Client(stdio_client(parameters)) as client:
            await use(client)

    with fake_daemon(tmp_path) as config:
        run("asyncio", lambda: main(config))
        lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0].startswith("made mcp-")
    assert lines[1:] == ["ended"]


@pytest.mark.usefixtures("patient_client")
def test_a_session_goes_on_after_a_daemon_that_was_down_and_one_that_is_restarted(
    tmp_path: Path,
) -> None:
    config = configuration(tmp_path)
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "sbxd.worker_cli", "--config", str(config), "mcp"],
        cwd=REPOSITORY,
    )
    command = {"command": ["python3", "sum.py", "numbers.txt"]}

    async def refused(client: Client) -> str:
        result = await client.call_tool("sandbox_run_command", command)
        assert result.is_error
        return text_of(result)

    async def main() -> None:
        async with Client(stdio_client(parameters)) as client:
            down = await refused(client)
            assert "UNREACHABLE" in down
            assert down.count("\n") == 0, "one sentence"
            with daemon_program(tmp_path):
                await use(client)
            assert "workspace with it" in await refused(client), "what was lost is said"
            with daemon_program(tmp_path):
                await use(client)
                assert not (await client.call_tool("sandbox_run_command", command)).is_error

    run("asyncio", main)


def test_the_program_serves_the_loopback_and_ends_its_sessions_when_it_is_interrupted(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)

    async def main(url: str, server: "subprocess.Popen[str]") -> None:
        async with http_client(url) as client:
            await use(client)
            server.send_signal(signal.SIGINT)
            assert await anyio.to_thread.run_sync(server.wait) is not None

    with fake_daemon(tmp_path) as config:
        server = subprocess.Popen(
            [
                sys.executable, "-m", "sbxd.worker_cli", "--config", str(config), "mcp",
                "--http", "0", "--token-file", str(token),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert server.stdout is not None
        with server.stdout:
            url = server.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            try:
                run("asyncio", lambda: main(url, server))
            finally:
                server.kill()
                server.wait()
        lines = (tmp_path / "log").read_text().splitlines()
    assert lines[1:] == ["ended"]


@pytest.mark.needs("daemon", "image")
@pytest.mark.usefixtures("patient_client")
def test_the_program_gives_a_client_a_real_sandbox(tmp_path: Path) -> None:
    async def image() -> str:
        async with connect_admin(ADMIN_SOCKET) as admin:
            found = (await admin.describe()).default_image
        assert found is not None
        return found

    async def main() -> None:
        async with Client(stdio_client(parameters)) as client:
            await use(client)

    (tmp_path / "store").mkdir(mode=0o700)
    config = tmp_path / "worker.toml"
    config.write_text(
        f'[artifacts]\ndirectory = "{tmp_path}/store"\n'
        f'[mcp]\ntenant_id = "tenant-a"\nimage_digest = "{run("trio", image)}"\n'
        f'credential_file = "{CREDENTIAL_FILE}"\n'
        "[mcp.limits]\ncpu_millicores = 1000\nmemory_bytes = 134217728\npids_max = 64\n"
        "workspace_bytes = 33554432\ninodes_max = 1000\nwall_clock_seconds = 60\n"
    )
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "sbxd.worker_cli", "--config", str(config), "mcp"],
        cwd=REPOSITORY,
    )
    run("asyncio", main)


def worker(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sbxd.worker_cli", "--config", str(config), "mcp", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("", [], "no table [mcp]"),
        ("[mcp]\ntenant_id = 'a'\n", [], "image_digest"),
        ("GOOD[mcp.environment]\nAWS_REGION = 'x'\n", [], "tier-0"),
        ("GOODenvironment_file = 'LISTED'\n", [], "tier-0"),
        ("GOOD[mcp.environment]\nHOME = '/'\n", [], "set by the service itself"),
        ("GOOD", ["--http", "0"], "--token-file"),
        ("GOOD", ["--http", "0", "--token-file", "OPEN"], "chmod 600"),
        ("GOODcredential_file = '/nowhere'\n", [], "credential_file"),
    ],
)
def test_what_is_configured_wrongly_is_said_at_the_start(
    tmp_path: Path, text: str, arguments: list[str], said: str
) -> None:
    good = f"[mcp]\ntenant_id = 'a'\nimage_digest = 'sha256:{'a' * 64}'\n"
    config, token = tmp_path / "worker.toml", tmp_path / "token"
    listed = tmp_path / "environment.toml"
    listed.write_text("AWS_REGION = 'x'\n")
    config.write_text(text.replace("GOOD", good).replace("LISTED", str(listed)))
    token.write_text(TOKEN)
    os.chmod(token, 0o644)
    done = worker(config, *(str(token) if each == "OPEN" else each for each in arguments))
    assert done.returncode == 245, done
    assert said in done.stderr
