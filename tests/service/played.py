"""A daemon that a test plays message by message, for tests of the client."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import ByteStream

from sbxd.port.command import Evidence, ExecutionCommand, KillReason, Usage
from sbxd.wire import messages as m
from sbxd.wire.connection import Pause, ServerConnection
from sbxd.wire.legality import Role
from tests.service.raw import WELCOME

WITHIN_SECONDS = 60
COMMAND = ExecutionCommand(
    argv=("true",),
    working_directory=".",
    timeout_seconds=60,
    stdin=None,
    maximum_output_bytes=2**23,
)


def executed(request_id: int, killed_by: KillReason | None = None) -> m.Executed:
    return m.Executed(
        request_id=request_id,
        exit_code=None if killed_by else 0,
        signal=None,
        stdout_truncated=False,
        stderr_truncated=False,
        timed_out=killed_by is KillReason.TIMEOUT,
        killed_by=killed_by,
        files_changed_truncated=False,
        duration_ms=1,
        evidence=Evidence(),
        usage=Usage(),
    )


def output(request_id: int, data: bytes) -> m.Output:
    return m.Output(request_id=request_id, stream=m.OutputStream.STDOUT, data=data)


@dataclass
class Daemon:
    """The daemon's end of one connection, played message by message."""

    stream: ByteStream
    connection: ServerConnection = field(default_factory=lambda: ServerConnection(role=Role.WORKER))

    async def receive(self) -> m.Message | None:
        """The client's next message; None at the end."""
        while True:
            event = self.connection.next_event()
            if event is Pause.CLOSED:
                return None
            if not isinstance(event, Pause):
                return event
            try:
                self.connection.receive_data(await self.stream.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                if self.connection.buffered_bytes:
                    return None  # within a frame
                self.connection.receive_data(b"")

    async def expect(self, kind: type[m.Message]) -> Any:
        message = await self.receive()
        assert isinstance(message, kind), message
        return message

    async def send(self, message: m.Message) -> None:
        await self.stream.send(self.connection.send(message))

    async def greet(self) -> None:
        await self.expect(m.Hello)
        await self.send(WELCOME)


Play = Callable[[Daemon], Awaitable[None]]


@asynccontextmanager
async def playing(path: str, *plays: Play) -> AsyncIterator[None]:
    """A daemon that serves one connection after another, each by its play, to its end."""
    async with await anyio.create_unix_listener(path) as listener:
        finished = anyio.Event()

        async def serve() -> None:
            for play in plays:
                async with await listener.accept() as stream:
                    await play(Daemon(stream))
            finished.set()

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            yield
            with anyio.fail_after(WITHIN_SECONDS):
                await finished.wait()


def run(backend: str, main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` in an event loop of this kind; what hangs fails."""

    async def bounded() -> None:
        with anyio.fail_after(2 * WITHIN_SECONDS):
            await main()

    anyio.run(bounded, backend=backend)
