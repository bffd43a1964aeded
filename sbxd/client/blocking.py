"""The run scope for plain scripts: no event loop, no await.

    with blocking_sandbox("/run/sbxd/worker.sock", specification) as sandbox:
        sandbox.write("in.txt", b"data")
        result = sandbox.run(["wc", "-c", "in.txt"])

Invariants: everything that is asynchronous runs on an event loop in a thread of its own, which
ends with the block; leaving the block, also by an exception or by Ctrl-C, destroys the
environment; any thread may call, and calls take turns. Deliberately absent: streaming.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial

import anyio
import anyio.from_thread
from anyio.from_thread import BlockingPortal

from sbxd.client.remote import RunDeadline, connect
from sbxd.client.run_scope import RunScope, remote_workspaces
from sbxd.policy.command import validate_argv
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.environment import EnvironmentSpec
from sbxd.port.limits import MIB
from sbxd.port.workspace import Listing

OpenScope = Callable[[], AbstractAsyncContextManager[RunScope]]


class BlockingSandbox:
    """Made by `blocking_sandbox`. Each method raises what its counterpart of RunScope raises."""

    def __init__(self, portal: BlockingPortal, scope: RunScope) -> None:
        self._portal = portal
        self._scope = scope
        self._turn = anyio.Lock()

    def run(
        self,
        argv: Sequence[str],
        *,
        working_directory: str = ".",
        timeout_seconds: int = 300,
        stdin: bytes | None = None,
        maximum_output_bytes: int = MIB,
    ) -> ExecutionResult:
        """Run one argument vector to its end. Raises ExecutionRejected(INVALID_COMMAND) for one
        string, before anything is asked for."""
        validate_argv(argv)
        command = ExecutionCommand(
            argv=tuple(argv),
            working_directory=working_directory,
            timeout_seconds=timeout_seconds,
            stdin=stdin,
            maximum_output_bytes=maximum_output_bytes,
        )
        return self.execute(command)

    def execute(self, command: ExecutionCommand) -> ExecutionResult:
        """As `RunScope.execute`."""
        return self._portal.call(self._execute, command)

    def submit(self, command: ExecutionCommand) -> "Future[ExecutionResult]":
        """The same without waiting. Cancelling the future kills the command."""
        return self._portal.start_task_soon(self._execute, command)

    @property
    def specification(self) -> EnvironmentSpec:
        """What the sandbox is made by."""
        return self._scope.specification

    def read(self, path: str) -> bytes:
        """A whole file of the workspace, of at most 64 MiB."""
        return self._portal.call(self._read, path)

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file of the workspace."""
        self._portal.call(self._write, path, data)

    def listdir(self, path: str = ".") -> Listing:
        """The entries of one directory of the workspace, and whether it holds more."""
        return self._portal.call(self._listdir, path)

    async def _execute(self, command: ExecutionCommand) -> ExecutionResult:
        async with self._turn:
            return await self._scope.execute(command)

    async def _read(self, path: str) -> bytes:
        async with self._turn:
            return await (await self._scope.workspace()).read(path)

    async def _write(self, path: str, data: bytes) -> None:
        async with self._turn:
            await (await self._scope.workspace()).write(path, data)

    async def _listdir(self, path: str) -> Listing:
        async with self._turn:
            return await (await self._scope.workspace()).listdir(path)


@contextmanager
def blocking_sandbox(
    path: str,
    specification: EnvironmentSpec,
    *,
    credential: bytes | None = None,
    deadline: RunDeadline | None = None,
) -> Iterator[BlockingSandbox]:
    """One run's sandbox behind a daemon's worker socket.

    Raises: what `sbxd.client.remote.connect` raises.
    """
    opened = partial(_connected, path, specification, credential=credential, deadline=deadline)
    with blocking_scope(opened) as sandbox:
        yield sandbox


@contextmanager
def blocking_scope(opened: OpenScope) -> Iterator[BlockingSandbox]:
    """The same over any scope; `opened` is called on the event loop."""
    with (
        anyio.from_thread.start_blocking_portal(backend="asyncio") as portal,
        portal.wrap_async_context_manager(opened()) as scope,
    ):
        yield BlockingSandbox(portal, scope)


@asynccontextmanager
async def _connected(
    path: str,
    specification: EnvironmentSpec,
    *,
    credential: bytes | None,
    deadline: RunDeadline | None,
) -> AsyncIterator[RunScope]:
    async with (
        connect(path, credential=credential, client_name="sbxd.blocking") as environment,
        RunScope(
            environment, specification, remote_workspaces(environment), deadline=deadline
        ) as scope,
    ):
        yield scope
