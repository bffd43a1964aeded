"""The schema of the metadata and how it came to be: forward only.

Each migration runs once, in a transaction with the row that says so, under the database's own
exclusion (SQLite: BEGIN IMMEDIATE; PostgreSQL: an advisory lock), so that any number of processes
may start at once. A database that is newer than this code is refused and left as it is.

Invariant: a migration that was released is never changed; a later one corrects it. Times are
microseconds since 1970 UTC. A filename is bytes (UTF-8, lone surrogates passed through), since
neither database takes every text that a name can be.
"""

from typing import NamedTuple

from sbxd.artifacts.database import Dialect, Session
from sbxd.port.artifact import ArtifactUnavailable, ArtifactUnavailableCode


class Migration(NamedTuple):
    version: int
    statements: tuple[str, ...]


MIGRATIONS: tuple[Migration, ...] = (
    Migration(
        1,
        (
            """CREATE TABLE artifact_stores (
                only_one INTEGER PRIMARY KEY CHECK (only_one = 1),
                store_id TEXT NOT NULL
            )""",
            """CREATE TABLE artifacts (
                artifact_id TEXT PRIMARY KEY,
                tenant_id TEXT NOT NULL,
                run_id TEXT,
                origin TEXT NOT NULL,
                filename {bytes} NOT NULL,
                media_type TEXT NOT NULL,
                trust TEXT NOT NULL,
                begun_at BIGINT NOT NULL,
                created_at BIGINT NOT NULL,
                expires_at BIGINT,
                state TEXT NOT NULL CHECK (state IN ('PENDING', 'STORED', 'REMOVING')),
                removal TEXT NOT NULL DEFAULT 'RETENTION',
                size_bytes BIGINT,
                sha256 TEXT,
                flags TEXT NOT NULL DEFAULT '',
                CHECK (state <> 'STORED' OR (size_bytes IS NOT NULL AND sha256 IS NOT NULL))
            )""",
            "CREATE INDEX artifacts_by_end ON artifacts (expires_at) WHERE state = 'STORED'",
            "CREATE INDEX artifacts_in_passing ON artifacts (artifact_id) WHERE state <> 'STORED'",
            """CREATE TABLE artifact_usage (
                tenant_id TEXT PRIMARY KEY,
                stored_bytes BIGINT NOT NULL DEFAULT 0 CHECK (stored_bytes >= 0),
                stored_count BIGINT NOT NULL DEFAULT 0 CHECK (stored_count >= 0),
                removed_by_retention_bytes BIGINT NOT NULL DEFAULT 0,
                removed_by_request_bytes BIGINT NOT NULL DEFAULT 0
            )""",
        ),
    ),
)

_VERSIONS = """CREATE TABLE IF NOT EXISTS artifact_schema (
    version INTEGER PRIMARY KEY
)"""
_BYTES = {Dialect.SQLITE: "BLOB", Dialect.POSTGRESQL: "BYTEA"}


async def migrate(
    session: Session, dialect: Dialect, migrations: tuple[Migration, ...] = MIGRATIONS
) -> int:
    """Bring the schema up to date within the caller's exclusive transaction.

    Returns: how many migrations ran. Raises: ArtifactUnavailable(SCHEMA) for a newer database.
    """
    await session.execute(_VERSIONS)
    rows = await session.execute("SELECT version FROM artifact_schema")
    done = {int(str(row[0])) for row in rows}
    unknown = done - {migration.version for migration in migrations}
    if unknown:
        raise ArtifactUnavailable(
            ArtifactUnavailableCode.SCHEMA,
            f"the database's schema is of version {max(unknown)}, which this version does not know",
        )
    due = [migration for migration in migrations if migration.version not in done]
    for migration in due:
        for statement in migration.statements:
            await session.execute(statement.replace("{bytes}", _BYTES[dialect]))
        await session.execute(
            "INSERT INTO artifact_schema (version) VALUES (:version)",
            {"version": migration.version},
        )
    return len(due)
