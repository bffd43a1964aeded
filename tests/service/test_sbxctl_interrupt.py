"""Ctrl-C at `sbxctl run` and `exec`: the command is cancelled, and its verdict is shown."""

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sbxctl.exits import Exit
from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.fake.script import Outcome, Script
from tests.service.fake_socket import SocketDaemon, socket_daemon
from tests.service.on_terminal import Terminal, on_terminal
from tests.service.requests import SPECIFICATION

IMAGE = ("--image", "sha256:" + "a" * 64)
SCRIPT = Script(
    by_program={
        "forever": Outcome(stdout=b"partial\n", sleep_seconds=float("inf")),
        "true": Outcome(),
    }
)


@asynccontextmanager
async def interrupted(daemon: SocketDaemon, *arguments: str) -> AsyncIterator[Terminal]:
    async with on_terminal(*arguments, socket=daemon.path) as terminal:
        await terminal.until(b"partial")
        os.kill(terminal.process.pid, signal.SIGINT)
        yield terminal


async def test_run_shows_the_verdict_and_leaves_nothing(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        async with interrupted(daemon, "run", *IMAGE, "--", "forever") as terminal:
            await terminal.until(b"CANCELLED")
            assert await terminal.end() == Exit.INTERRUPTED
        left = await daemon.sbxctl("ls", "--json")
    assert json.loads(left.stdout) == []


async def test_exec_shows_the_verdict_and_leaves_the_environment(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        words = ("exec", handle.environment_id, "--", "forever")
        async with interrupted(daemon, *words) as terminal:
            await terminal.until(b"CANCELLED")
            assert await terminal.end() == Exit.INTERRUPTED
        again = await daemon.sbxctl("exec", handle.environment_id, "--", "true")
    assert again.code == 0, "the control: it is there, and runs the next command"
