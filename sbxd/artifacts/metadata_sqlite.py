"""SQLite as the metadata's database, through aiosqlite: the default, which needs no server.

Invariants: one connection, one transaction at a time; WAL with synchronous=FULL, so what is
committed is on disk; the file is its owner's alone; other processes (a sweep, another worker) are
waited for, BUSY_SECONDS at most.
"""

import asyncio
import fcntl
import os
import sqlite3
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar, final

import aiosqlite

from sbxd.artifacts.bridge import AsyncioBridge, open_bridge
from sbxd.artifacts.database import Database, Dialect, Row, Session, Value
from sbxd.artifacts.migrations import migrate
from sbxd.port.artifact import ArtifactUnavailable, ArtifactUnavailableCode

ResultT = TypeVar("ResultT")

BUSY_SECONDS = 30

_MADE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@final
class _SqliteSession:
    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection

    async def execute(self, sql: str, values: Mapping[str, Value] | None = None) -> Sequence[Row]:
        return list(await self._connection.execute_fetchall(sql, values or {}))


@final
class SqliteDatabase:
    """Made by `open_sqlite`."""

    # In one statement 'now' is one time. Milliseconds are what SQLite has.
    now_statement = (
        "SELECT CAST(strftime('%s', 'now') AS INTEGER) * 1000000"
        " + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER) * 1000"
    )

    def __init__(self, connection: aiosqlite.Connection, bridge: AsyncioBridge) -> None:
        self._connection = connection
        self._bridge = bridge
        self._one = asyncio.Lock()

    async def transaction(self, work: Callable[[Session], Awaitable[ResultT]]) -> ResultT:
        """As `Database.transaction`."""
        return await self._bridge.run(lambda: self._transaction(work))

    async def _transaction(self, work: Callable[[Session], Awaitable[ResultT]]) -> ResultT:
        async with self._one:
            try:
                return await _in_transaction(self._connection, work)
            except sqlite3.Error as problem:
                raise _unavailable(problem) from None


@asynccontextmanager
async def open_sqlite(path: Path) -> AsyncIterator[Database]:
    """The database in this file, which is made and migrated if need be.

    Raises: ArtifactUnavailable(METADATA, NO_SPACE or SCHEMA).
    """
    async with open_bridge() as bridge:
        connection = await bridge.run(lambda: _connect(path))
        try:
            yield SqliteDatabase(connection, bridge)
        finally:
            bridge.run_blocking(connection.close)


async def _connect(path: Path) -> aiosqlite.Connection:
    # The lock is beside the database: closing a descriptor of that would drop SQLite's own locks,
    # of this process's other connections too. It is made by itself, and for its modes alone.
    with _translated():
        lock_fd = os.open(path.with_name(f"{path.name}.lock"), _MADE, 0o600)
    try:
        # Two that turn a new file to WAL at once do not wait for each other by themselves.
        await asyncio.to_thread(fcntl.flock, lock_fd, fcntl.LOCK_EX)
        return await _prepared(path)
    finally:
        os.close(lock_fd)


async def _prepared(path: Path) -> aiosqlite.Connection:
    with _translated(), suppress(FileExistsError):
        os.close(os.open(path, _MADE | os.O_EXCL, 0o600))
    with _translated():
        facts = os.stat(path, follow_symlinks=False)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        code = ArtifactUnavailableCode.REFUSED
        raise ArtifactUnavailable(code, "the database is no regular file of this user")
    try:
        connection = await aiosqlite.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    except sqlite3.Error as problem:
        raise _unavailable(problem) from None
    try:
        (mode,) = [row[0] for row in await connection.execute_fetchall("PRAGMA journal_mode = WAL")]
        if mode != "wal":
            code = ArtifactUnavailableCode.METADATA
            raise ArtifactUnavailable(code, f"the database cannot keep a log: mode {mode}")
        await connection.execute_fetchall("PRAGMA synchronous = FULL")
        await _in_transaction(connection, lambda session: migrate(session, Dialect.SQLITE))
    except sqlite3.Error as problem:
        await connection.close()
        raise _unavailable(problem) from None
    except BaseException:
        await connection.close()
        raise
    return connection


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as problem:
        code = ArtifactUnavailableCode.METADATA
        raise ArtifactUnavailable(code, f"the database: {problem.strerror}") from None


async def _in_transaction(
    connection: aiosqlite.Connection, work: Callable[[Session], Awaitable[ResultT]]
) -> ResultT:
    await connection.execute_fetchall("BEGIN IMMEDIATE")
    try:
        result = await work(_SqliteSession(connection))
        await connection.execute_fetchall("COMMIT")
    except BaseException:
        # A full disk has undone it already.
        if connection.in_transaction:
            await connection.execute_fetchall("ROLLBACK")
        raise
    return result


def _unavailable(problem: sqlite3.Error) -> ArtifactUnavailable:
    name = getattr(problem, "sqlite_errorname", type(problem).__name__)
    full = name == "SQLITE_FULL"
    code = ArtifactUnavailableCode.NO_SPACE if full else ArtifactUnavailableCode.METADATA
    return ArtifactUnavailable(code, f"the database: {name}")
