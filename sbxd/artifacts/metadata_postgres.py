"""PostgreSQL as the metadata's database, through psycopg: for several hosts or many workers.

Invariants: each transaction has a connection of its own out of a bounded set; one that failed is
thrown away; a statement is bounded by STATEMENT_SECONDS at the server; a deadlock is tried again,
ATTEMPTS times in all. Deliberately absent: a password. libpq finds it (a password file, peer or
certificate authentication) by what the operator's connection string says.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TypeVar, final

import psycopg
from psycopg.errors import DeadlockDetected, LockNotAvailable, SerializationFailure

from sbxd.artifacts.bridge import AsyncioBridge, open_bridge
from sbxd.artifacts.database import Database, Dialect, Row, Session, Value
from sbxd.artifacts.migrations import migrate
from sbxd.port.artifact import ArtifactUnavailable, ArtifactUnavailableCode

ResultT = TypeVar("ResultT")

CONNECTIONS_MAX = 4
CONNECT_SECONDS = 10
STATEMENT_SECONDS = 30
ATTEMPTS = 5
# Any number, as long as it is always the same one: "sbxd" in ASCII.
MIGRATION_LOCK = 0x73627864

# A commit that is acknowledged is on disk; what is stricter than that stays as the operator has it.
_SETTINGS = (
    f"SET statement_timeout = '{STATEMENT_SECONDS}s'".encode(),
    b"SELECT set_config('synchronous_commit', 'on', false)"
    b" WHERE current_setting('synchronous_commit') = 'off'",
)
_PARAMETER = re.compile(r":([a-z_][a-z0-9_]*)")
_AGAIN = (DeadlockDetected, SerializationFailure, LockNotAvailable)


@lru_cache(maxsize=256)
def _native(sql: str) -> bytes:
    """The statement with psycopg's parameters."""
    return _PARAMETER.sub(r"%(\1)s", sql).encode()


@final
class _PostgresSession:
    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self._connection = connection

    async def execute(self, sql: str, values: Mapping[str, Value] | None = None) -> Sequence[Row]:
        cursor = await self._connection.execute(_native(sql), values or {})
        return [] if cursor.description is None else await cursor.fetchall()


@final
class PostgresDatabase:
    """Made by `open_postgres`."""

    now_statement = "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"

    def __init__(self, conninfo: str, bridge: AsyncioBridge) -> None:
        self._conninfo = conninfo
        self._bridge = bridge
        self._idle: list[psycopg.AsyncConnection] = []
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)

    async def transaction(self, work: Callable[[Session], Awaitable[ResultT]]) -> ResultT:
        """As `Database.transaction`."""
        return await self._bridge.run(lambda: self._transaction(work))

    async def prepare(self) -> None:
        """Migrate; processes that do so at once wait for each other."""

        async def work(session: Session) -> int:
            await session.execute("SELECT pg_advisory_xact_lock(:lock)", {"lock": MIGRATION_LOCK})
            return await migrate(session, Dialect.POSTGRESQL)

        await self.transaction(work)

    async def close(self) -> None:
        """Close what is idle; on the bridge's loop."""
        while self._idle:
            await self._idle.pop().close()

    async def _transaction(self, work: Callable[[Session], Awaitable[ResultT]]) -> ResultT:
        async with self._free:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return await self._attempt(work)
                except _AGAIN as problem:
                    if attempt == ATTEMPTS:
                        raise _unavailable(problem) from None
                except psycopg.Error as problem:
                    raise _unavailable(problem) from None
        raise AssertionError

    async def _attempt(self, work: Callable[[Session], Awaitable[ResultT]]) -> ResultT:
        connection = await self._connection()
        try:
            async with connection.transaction():
                result = await work(_PostgresSession(connection))
        finally:
            # One that the server ended, or that a failure left in a state, is closed.
            if connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                self._idle.append(connection)
            else:
                await connection.close()
        return result

    async def _connection(self) -> psycopg.AsyncConnection:
        """An idle connection that still answers, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            try:
                await connection.execute(b"")
            except psycopg.Error:
                await connection.close()  # the server was restarted meanwhile
                continue
            return connection
        connection = await psycopg.AsyncConnection.connect(
            self._conninfo, autocommit=True, connect_timeout=CONNECT_SECONDS
        )
        try:
            for statement in _SETTINGS:
                await connection.execute(statement)
        except BaseException:
            await connection.close()
            raise
        return connection


@asynccontextmanager
async def open_postgres(conninfo: str) -> AsyncIterator[Database]:
    """The database of this libpq connection string or URI, migrated if need be.

    Raises: ArtifactUnavailable(METADATA or SCHEMA).
    """
    async with open_bridge() as bridge:
        database = PostgresDatabase(conninfo, bridge)
        try:
            await database.prepare()
            yield database
        finally:
            bridge.run_blocking(database.close)


def _unavailable(problem: psycopg.Error) -> ArtifactUnavailable:
    # The server's text may repeat the address or the values: its code says enough.
    name = problem.sqlstate or type(problem).__name__
    full = problem.sqlstate is not None and problem.sqlstate.startswith("53")
    code = ArtifactUnavailableCode.NO_SPACE if full else ArtifactUnavailableCode.METADATA
    return ArtifactUnavailable(code, f"the database: {name}")
