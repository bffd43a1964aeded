"""sbxctl on a terminal of its own: what it writes there, and what is typed."""

import fcntl
import os
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.service.fake_socket import CLIENT_SECONDS

ROWS, COLUMNS = 24, 80


class Terminal:
    """The far end of a terminal: `seen` is all that has been written to it, byte for byte."""

    def __init__(self, master: trio.lowlevel.FdStream, process: trio.Process) -> None:
        self.seen = b""
        self.process = process
        self._master = master

    async def type(self, text: str) -> None:
        """As a person would, without an echo."""
        await self._master.send_all(text.encode())

    async def until(self, wanted: bytes, *, after: int = 0) -> int:
        """Wait for bytes at or after an offset; returns the offset behind them."""
        while (found := self.seen.find(wanted, after)) < 0:
            if not await self._more():
                raise AssertionError(f"{wanted!r} never came: {self.seen[after:]!r}")
        return found + len(wanted)

    async def end(self) -> int:
        """Everything to the end; returns the exit code."""
        while await self._more():
            pass
        return await self.process.wait()

    async def _more(self) -> bool:
        try:
            data = await self._master.receive_some()
        except trio.BrokenResourceError:
            return False  # EIO: nobody has the other end any more
        self.seen += data
        return bool(data)


@asynccontextmanager
async def on_terminal(
    *arguments: str,
    socket: Path,
    term: str = "xterm-256color",
    environment: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stdin: int | None = None,
) -> AsyncIterator[Terminal]:
    """`python -m sbxctl` with its three streams on a terminal that neither echoes nor translates.
    stdout, stdin: descriptors in the place of the terminal."""
    master, slave = os.openpty()
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with trio.fail_after(CLIENT_SECONDS):
        stream = trio.lowlevel.FdStream(master)
        try:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "sbxctl", "--socket", str(socket), *arguments],
                stdin=slave if stdin is None else stdin,
                stdout=slave if stdout is None else stdout,
                stderr=slave,
                env={**inherited, "TERM": term, "LANG": "C.UTF-8", **(environment or {})},
                start_new_session=True,
            )
        finally:
            os.close(slave)
        try:
            async with stream:
                yield Terminal(stream, process)
        finally:
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def shown(
    *arguments: str,
    socket: Path,
    term: str = "xterm-256color",
    environment: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """The exit code, and all that was written to the terminal."""
    async with on_terminal(
        *arguments, socket=socket, term=term, environment=environment, stdin=subprocess.DEVNULL
    ) as terminal:
        return await terminal.end(), terminal.seen
