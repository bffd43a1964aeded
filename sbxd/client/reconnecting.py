"""The port over a connection that is made anew when it was lost, for clients that live long.

    async with reconnecting(lambda: connect(path)) as environments:
        async with RunScope(environments, specification, environments.workspace) as scope:
            ...

Invariants: a connection is made when an environment is asked for and at no other time, so a daemon
may be down meanwhile; a request is never sent twice, but for one to make an environment that the
daemon had no time to answer; an environment ends with the connection that made it, and what asks
for it on another is told that it is gone. Runs under asyncio and trio.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import final

import anyio

from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.client.workspace import RemoteWorkspace
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    UnavailableCode,
)

Connect = Callable[[], AbstractAsyncContextManager[RemoteExecutionEnvironment]]

# The connection, and with it every environment of its owner, is gone or about to go.
CONNECTION_ENDS = frozenset({UnavailableCode.UNREACHABLE, UnavailableCode.SHUTTING_DOWN})

# How long a connection outlives the cancellation of what uses it.
CLOSE_SECONDS = 30.0

_LOG = logging.getLogger("sbxd.client")


@asynccontextmanager
async def reconnecting(connect: Connect) -> AsyncIterator["ReconnectingEnvironment"]:
    """connect: makes one connection, as `sbxd.client.remote.connect` does.

    Raises nothing of its own at the start: a daemon that is down is told by the first `provision`.

    Cancellation: the connection is closed; the daemon ends what was made on it.
    """
    async with anyio.create_task_group() as tasks:
        environments = ReconnectingEnvironment(connect)
        tasks.start_soon(environments.keep)
        try:
            yield environments
        finally:
            environments.close()
            tasks.cancel_scope.cancel()


@final
class ReconnectingEnvironment:
    """Implements `sbxd.port.environment.ExecutionEnvironment`. Made by `reconnecting`."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._current: RemoteExecutionEnvironment | None = None
        self._problem: PortError | None = None
        self._made_on: dict[str, RemoteExecutionEnvironment] = {}
        self._asked = anyio.Event()
        self._answered = anyio.Event()
        self._dropped = anyio.Event()
        self._connecting = anyio.Lock()

    async def keep(self) -> None:
        """The task that holds the connections, one after another. Does not return."""
        while True:
            await self._asked.wait()
            self._asked, self._dropped = anyio.Event(), anyio.Event()
            try:
                async with self._connect() as connection:
                    self._current = connection
                    self._answered.set()
                    try:
                        await self._dropped.wait()
                    finally:
                        # What the block is left by may still need it: a cancelled run its destroy.
                        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                            await self._dropped.wait()
            except (ExecutionUnavailable, ExecutionRejected) as problem:
                self._problem = problem
            finally:
                self._current = None
                self._answered.set()

    def close(self) -> None:
        """Let the connection go."""
        self._dropped.set()

    async def provision(self, specification: EnvironmentSpec) -> EnvironmentHandle:
        """As the port. Connects where there is no connection that lives."""
        connection = await self._connected()
        try:
            handle = await connection.provision(specification)
        except ExecutionUnavailable as problem:
            if problem.code not in CONNECTION_ENDS:
                raise
            # It was lost, or is being closed, since the last request: nothing was made there.
            _LOG.warning("connecting to the sandbox service again: %s", problem.detail)
            await self._drop(connection)
            connection = await self._connected()
            handle = await connection.provision(specification)
        self._made_on = {handle.environment_id: connection, **self._lasting()}
        return handle

    async def execute(
        self, environment: EnvironmentHandle, command: ExecutionCommand
    ) -> ExecutionResult:
        """As the port."""
        return await self._maker(environment).execute(environment, command)

    async def destroy(self, environment: EnvironmentHandle) -> None:
        """As the port."""
        connection = self._made_on.pop(environment.environment_id, None)
        if connection is not None and _lives(connection):
            await connection.destroy(environment)

    def workspace(self, environment: EnvironmentHandle) -> RemoteWorkspace:
        """The files of an environment. Raises as `execute` where its connection is gone."""
        return RemoteWorkspace(self._maker(environment).channel, environment)

    def _maker(self, environment: EnvironmentHandle) -> RemoteExecutionEnvironment:
        try:
            return self._made_on[environment.environment_id]
        except KeyError:
            raise ExecutionRejected(
                RejectedCode.ENVIRONMENT_GONE,
                "the environment ended with the connection that made it",
                field="environment_id",
            ) from None

    def _lasting(self) -> dict[str, RemoteExecutionEnvironment]:
        return {name: each for name, each in self._made_on.items() if each is self._current}

    async def _connected(self) -> RemoteExecutionEnvironment:
        async with self._connecting:
            if self._current is not None and not _lives(self._current):
                await self._end_current()
            if self._current is None:
                self._problem, self._answered = None, anyio.Event()
                self._asked.set()
                await self._answered.wait()
            if self._current is None:
                assert self._problem is not None, "it ended without a reason"
                raise self._problem
            return self._current

    async def _drop(self, connection: RemoteExecutionEnvironment) -> None:
        async with self._connecting:
            if self._current is connection:
                await self._end_current()

    async def _end_current(self) -> None:
        self._answered = anyio.Event()
        self._dropped.set()
        await self._answered.wait()


def _lives(connection: RemoteExecutionEnvironment) -> bool:
    try:
        connection.channel.raise_if_lost()
    except PortError:
        return False
    return True
