"""A daemon over the in-memory environments behind a real Unix socket, for programs that connect."""

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from sbxd.audit.events import Door
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.fake.script import Script
from sbxd.service.egress import OperatorEgress
from sbxd.settings import Settings
from tests.service.memory import MemoryDaemon, memory_daemon

CLIENT_SECONDS = 60


@dataclass(frozen=True)
class Ran:
    """How a program ended, and its two streams."""

    code: int
    stdout: bytes
    stderr: str


@dataclass(frozen=True)
class SocketDaemon:
    """daemon: its inside. path: its admin socket."""

    daemon: MemoryDaemon
    path: Path

    async def sbxctl(
        self, *arguments: str, stdin: bytes = b"", directory: Path | None = None
    ) -> Ran:
        """Run `python -m sbxctl` against it."""
        return await sbxctl("--socket", str(self.path), *arguments, stdin=stdin, cwd=directory)


async def sbxctl(
    *arguments: str, stdin: bytes = b"", cwd: Path | None = None, user: int | None = None
) -> Ran:
    """Run `python -m sbxctl` and wait for its end, at most CLIENT_SECONDS."""
    with trio.fail_after(CLIENT_SECONDS):
        done = await trio.run_process(
            [sys.executable, "-m", "sbxctl", *arguments],
            stdin=stdin,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            cwd=cwd,
            user=user,
            extra_groups=None if user is None else [],
        )
    assert isinstance(done, subprocess.CompletedProcess)
    return Ran(done.returncode, done.stdout, done.stderr.decode())


@asynccontextmanager
async def socket_daemon(
    script: Script,
    folder: Path,
    *,
    settings: Settings = FAKE_SETTINGS,
    egress: OperatorEgress | None = None,
) -> AsyncIterator[SocketDaemon]:
    """A daemon whose admin socket lies in the folder, until the block ends."""
    path = folder / "admin.sock"
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await listening.bind(str(path))
    listening.listen(16)
    async with (
        memory_daemon(script, settings=settings, egress=egress) as daemon,
        trio.open_nursery() as nursery,
    ):
        offer = daemon.listeners[Door.ADMIN].offer
        nursery.start_soon(partial(_pass_on, trio.SocketListener(listening), offer))
        yield SocketDaemon(daemon, path)
        nursery.cancel_scope.cancel()


async def _pass_on(
    listener: trio.SocketListener, offer: Callable[[trio.abc.Stream], Awaitable[None]]
) -> None:
    async with listener:
        while True:
            await offer(await listener.accept())
