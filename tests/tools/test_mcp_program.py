"""`sbxd-worker mcp` as a program, driven by the official client."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client import stdio as mcp_stdio

from sbxd.client.admin import connect_admin
from tests.artifacts.world import run
from tests.contract.subjects import ADMIN_SOCKET, CREDENTIAL_FILE
from tests.tools.mcp_world import (
    REPOSITORY,
    TOKEN,
    http_client,
    text_of,
    use,
)

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


def program(config: Path) -> Any:
    """What a client starts the program with, and talks to it by."""
    return stdio_client(
        StdioServerParameters(
            command=sys.executable,
            args=["-m", "sbxd.worker_cli", "--config", str(config), "mcp"],
            cwd=REPOSITORY,
        )
    )


@pytest.mark.usefixtures("patient_client")
def test_the_program_serves_a_client_over_its_pipe(tmp_path: Path) -> None:
    async def main(config: Path) -> None:
        async with Client(program(config)) as client:
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
    command = {"command": ["python3", "sum.py", "numbers.txt"]}

    async def refused(client: Client) -> str:
        result = await client.call_tool("sandbox_run_command", command)
        assert result.is_error
        return text_of(result)

    async def main() -> None:
        async with Client(program(config)) as client:
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
        async with Client(program(config)) as client:
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
