"""The schema: made once, forward only, by any number of processes at once; and what a database
that fails looks like."""

import sqlite3
from pathlib import Path

import anyio
import psycopg
import pytest

from sbxd.artifacts import metadata_postgres
from sbxd.artifacts.database import Database, Dialect, Session
from sbxd.artifacts.migrations import MIGRATIONS, Migration, migrate
from sbxd.artifacts.opening import open_database
from sbxd.artifacts.sql import SqlMetadata
from sbxd.port.artifact import ArtifactUnavailable, ArtifactUnavailableCode
from tests.artifacts.world import ALICE, Folder, run


def dialect_of(folder: Folder) -> Dialect:
    return Dialect.POSTGRESQL if folder.metadata else Dialect.SQLITE


async def rows(database: Database, sql: str) -> list[tuple[object, ...]]:
    async def work(session: Session) -> list[tuple[object, ...]]:
        return [tuple(row) for row in await session.execute(sql)]

    return await database.transaction(work)


VERSIONS = "SELECT version FROM artifact_schema ORDER BY version"


def test_a_new_database_gets_each_migration_once(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        for _ in range(2):
            async with open_database(any_folder.settings()) as database:
                assert await rows(database, VERSIONS) == [(m.version,) for m in MIGRATIONS]

    run(backend, main)


def test_many_that_migrate_at_once_make_one_schema(backend: str, any_folder: Folder) -> None:
    opened = 0

    async def main() -> None:
        async def one() -> None:
            nonlocal opened
            async with open_database(any_folder.settings()) as database:
                await SqlMetadata(database).usage(ALICE)
                opened += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(one)

    run(backend, main)
    assert opened == 6


def test_a_later_migration_is_added_to_what_is_there(backend: str, any_folder: Folder) -> None:
    later = (*MIGRATIONS, Migration(2, ("ALTER TABLE artifacts ADD COLUMN note {bytes}",)))

    async def main() -> None:
        async with open_database(any_folder.settings()) as database:
            dialect = dialect_of(any_folder)
            assert await database.transaction(lambda s: migrate(s, dialect, later)) == 1
            assert await database.transaction(lambda s: migrate(s, dialect, later)) == 0
            assert await rows(database, "SELECT note FROM artifacts") == []

    run(backend, main)


def test_a_migration_that_fails_leaves_nothing_of_itself(backend: str, any_folder: Folder) -> None:
    broken = (*MIGRATIONS, Migration(2, ("CREATE TABLE half (x INTEGER)", "CREATE NONSENSE")))

    async def main() -> None:
        async with open_database(any_folder.settings()) as database:
            with pytest.raises(ArtifactUnavailable):
                await database.transaction(lambda s: migrate(s, dialect_of(any_folder), broken))
            assert await rows(database, VERSIONS) == [(1,)]
            with pytest.raises(ArtifactUnavailable):
                await rows(database, "SELECT x FROM half")

    run(backend, main)


def test_a_newer_database_is_refused_and_left_as_it_is(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        async with open_database(any_folder.settings()) as database:
            await rows(database, "INSERT INTO artifact_schema (version) VALUES (99)")
        with pytest.raises(ArtifactUnavailable) as caught:
            async with open_database(any_folder.settings()):
                raise AssertionError
        assert caught.value.code is ArtifactUnavailableCode.SCHEMA

    run(backend, main)


def test_what_raises_within_a_transaction_undoes_it(backend: str, any_folder: Folder) -> None:
    async def work(session: Session) -> None:
        await session.execute("INSERT INTO artifact_schema (version) VALUES (5)")
        raise LookupError

    async def main() -> None:
        async with open_database(any_folder.settings()) as database:
            with pytest.raises(LookupError):
                await database.transaction(work)
            assert await rows(database, VERSIONS) == [(1,)]

    run(backend, main)


def test_the_file_of_the_database_is_its_owners_alone(backend: str, folder: Folder) -> None:
    async def main() -> None:
        async with open_database(folder.settings()) as database:
            await SqlMetadata(database).adopt("x")
            for path in folder.path.iterdir():
                assert path.stat().st_mode & 0o777 == 0o600, path.name

    run(backend, main)


def test_a_damaged_file_is_a_typed_error(backend: str, folder: Folder) -> None:
    (folder.path / "metadata.sqlite").write_bytes(b"no database" * 1000)

    async def main() -> None:
        with pytest.raises(ArtifactUnavailable) as caught:
            async with open_database(folder.settings()):
                raise AssertionError
        assert caught.value.code is ArtifactUnavailableCode.METADATA
        assert str(folder.path) not in str(caught.value)

    run(backend, main)


def test_a_link_in_the_databases_place_is_not_followed(
    backend: str, folder: Folder, tmp_path: Path
) -> None:
    (folder.path / "metadata.sqlite").symlink_to(tmp_path / "elsewhere")

    async def main() -> None:
        with pytest.raises(ArtifactUnavailable):
            async with open_database(folder.settings()):
                raise AssertionError

    run(backend, main)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_is_told_from_other_failures(backend: str, folder: Folder) -> None:
    async def work(session: Session) -> None:
        await session.execute("PRAGMA max_page_count = 1")
        await session.execute("CREATE TABLE filler (x BLOB)")
        await session.execute("INSERT INTO filler VALUES (zeroblob(10000000))")

    async def main() -> None:
        async with open_database(folder.settings()) as database:
            with pytest.raises(ArtifactUnavailable) as caught:
                await database.transaction(work)
            assert caught.value.code is ArtifactUnavailableCode.NO_SPACE
            # The connection takes the next transaction.
            assert await rows(database, VERSIONS) == [(1,)]

    run(backend, main)


def test_a_server_that_is_not_there_is_a_typed_error(backend: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "store", f"postgresql://x@/x?host={tmp_path}")

    async def main() -> None:
        with pytest.raises(ArtifactUnavailable) as caught:
            async with open_database(folder.settings()):
                raise AssertionError
        assert caught.value.code is ArtifactUnavailableCode.METADATA
        assert str(tmp_path) not in str(caught.value)

    run(backend, main)


def test_a_connection_that_the_server_ended_is_replaced(backend: str, postgres_uri: str) -> None:
    async def main() -> None:
        async with metadata_postgres.open_postgres(postgres_uri) as database:
            with psycopg.connect(postgres_uri, autocommit=True) as other:
                ended = other.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE pid <> pg_backend_pid() AND datname = current_database()"
                ).fetchall()
            assert ended
            assert await rows(database, VERSIONS) == [(1,)]

    run(backend, main)


def test_a_connection_that_ends_within_a_transaction_is_an_error_and_the_next_one_works(
    backend: str, postgres_uri: str
) -> None:
    async def suicide(session: Session) -> None:
        await session.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    async def main() -> None:
        async with metadata_postgres.open_postgres(postgres_uri) as database:
            with pytest.raises(ArtifactUnavailable) as caught:
                await database.transaction(suicide)
            assert caught.value.code is ArtifactUnavailableCode.METADATA
            assert await rows(database, VERSIONS) == [(1,)]

    run(backend, main)


def test_a_deadlock_is_tried_again_and_no_more_than_so_often(
    backend: str, postgres_uri: str
) -> None:
    attempts = 0

    async def work(session: Session) -> None:
        nonlocal attempts
        attempts += 1
        await session.execute("DO $$ BEGIN RAISE deadlock_detected; END $$")

    async def main() -> None:
        async with metadata_postgres.open_postgres(postgres_uri) as database:
            with pytest.raises(ArtifactUnavailable):
                await database.transaction(work)

    run(backend, main)
    assert attempts == metadata_postgres.ATTEMPTS


def test_control_the_server_is_a_real_one(postgres_uri: str) -> None:
    with psycopg.connect(postgres_uri) as connection:
        row = connection.execute("SHOW server_version").fetchone()
    assert row is not None
    assert int(str(row[0]).partition(".")[0]) >= 15
    with pytest.raises(sqlite3.Error):
        sqlite3.connect(":memory:").execute("SHOW server_version")
