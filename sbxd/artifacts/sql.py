"""The metadata in SQL that both databases speak: one implementation, two drivers below it.

Invariants: as `sbxd.artifacts.records` says; where two transactions could touch the same rows they
take an artifact's row before its tenant's, and several artifacts in the order of their ids.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import final

from sbxd.artifacts.database import Database, Row, Session
from sbxd.artifacts.records import (
    Caps,
    Doomed,
    Intent,
    Removal,
    StoredArtifact,
    Usage,
)
from sbxd.port.artifact import (
    ArtifactId,
    ArtifactMetadata,
    ArtifactOrigin,
    ArtifactRejected,
    ArtifactRejectedCode,
    ArtifactUnavailable,
    ArtifactUnavailableCode,
    ContentFlag,
    TrustLevel,
)
from sbxd.port.ids import RunId, TenantId

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ALIVE = "state = 'STORED' AND (expires_at IS NULL OR expires_at > :now)"
_USAGE = (
    "tenant_id, stored_bytes, stored_count, removed_by_retention_bytes, removed_by_request_bytes"
)


class _Undo(Exception):
    """Ends a transaction without a trace."""


@final
class SqlMetadata:
    """Implements `sbxd.artifacts.records.MetadataStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def now(self) -> datetime:
        async def work(session: Session) -> datetime:
            rows = await session.execute(self._database.now_statement)
            return _time(_int(rows[0][0]))

        return await self._database.transaction(work)

    async def store_id(self) -> str | None:
        async def work(session: Session) -> str | None:
            rows = await session.execute("SELECT store_id FROM artifact_stores")
            return str(rows[0][0]) if rows else None

        return await self._database.transaction(work)

    async def adopt(self, store_id: str) -> str:
        async def work(session: Session) -> str:
            await session.execute(
                "INSERT INTO artifact_stores (only_one, store_id) VALUES (1, :store_id)"
                " ON CONFLICT (only_one) DO NOTHING",
                {"store_id": store_id},
            )
            rows = await session.execute("SELECT store_id FROM artifact_stores")
            return str(rows[0][0])

        return await self._database.transaction(work)

    async def intend(self, intent: Intent) -> Usage:
        async def work(session: Session) -> Usage:
            await session.execute(
                "INSERT INTO artifacts (artifact_id, tenant_id, run_id, origin, filename,"
                " media_type, trust, begun_at, created_at, expires_at, state) VALUES"
                " (:artifact_id, :tenant_id, :run_id, :origin, :filename, :media_type, :trust,"
                " :begun_at, :created_at, :expires_at, 'PENDING')",
                {
                    "artifact_id": intent.artifact_id,
                    "tenant_id": intent.tenant_id,
                    "run_id": intent.run_id,
                    "origin": intent.origin.value,
                    "filename": intent.filename.encode("utf-8", "surrogatepass"),
                    "media_type": intent.media_type,
                    "trust": intent.trust.value,
                    "begun_at": _microseconds(intent.begun_at),
                    "created_at": _microseconds(intent.created_at),
                    "expires_at": (
                        None if intent.expires_at is None else _microseconds(intent.expires_at)
                    ),
                },
            )
            return await _usage(session, intent.tenant_id)

        return await self._database.transaction(work)

    async def acknowledge(
        self,
        artifact_id: ArtifactId,
        *,
        size_bytes: int,
        sha256: str,
        flags: frozenset[ContentFlag],
        caps: Caps,
    ) -> None:
        async def work(session: Session) -> None:
            rows = await session.execute(
                "UPDATE artifacts SET state = 'STORED', size_bytes = :size, sha256 = :sha256,"
                " flags = :flags WHERE artifact_id = :artifact_id AND state = 'PENDING'"
                " RETURNING tenant_id",
                {
                    "artifact_id": artifact_id,
                    "size": size_bytes,
                    "sha256": sha256,
                    "flags": " ".join(sorted(flags)),
                },
            )
            if not rows:
                raise ArtifactUnavailable(
                    ArtifactUnavailableCode.ABANDONED, "the put took too long and was swept"
                )
            tenant = {"tenant_id": str(rows[0][0])}
            await session.execute(
                "INSERT INTO artifact_usage (tenant_id) VALUES (:tenant_id)"
                " ON CONFLICT (tenant_id) DO NOTHING",
                tenant,
            )
            charged = await session.execute(
                "UPDATE artifact_usage SET stored_bytes = stored_bytes + :size,"
                " stored_count = stored_count + 1 WHERE tenant_id = :tenant_id"
                " AND stored_bytes + :size <= :bytes_max AND stored_count < :count_max"
                " RETURNING stored_bytes",
                {
                    **tenant,
                    "size": size_bytes,
                    "bytes_max": caps.bytes_max,
                    "count_max": caps.count_max,
                },
            )
            if not charged:
                raise ArtifactRejected(
                    ArtifactRejectedCode.TENANT_CAP, "the tenant holds as much as it may"
                )

        await self._database.transaction(work)

    async def find(self, artifact_id: ArtifactId, *, now: datetime) -> StoredArtifact | None:
        async def work(session: Session) -> StoredArtifact | None:
            rows = await session.execute(
                "SELECT artifact_id, tenant_id, run_id, origin, filename, media_type, size_bytes,"
                " sha256, trust, created_at, expires_at, flags FROM artifacts"
                f" WHERE artifact_id = :artifact_id AND {_ALIVE}",
                {"artifact_id": artifact_id, "now": _microseconds(now)},
            )
            return _stored(rows[0]) if rows else None

        return await self._database.transaction(work)

    async def claim(
        self, tenant_id: TenantId, artifact_id: ArtifactId, run_id: RunId, *, now: datetime
    ) -> bool:
        async def work(session: Session) -> bool:
            rows = await session.execute(
                "UPDATE artifacts SET run_id = :run_id, expires_at = NULL"
                " WHERE artifact_id = :artifact_id AND tenant_id = :tenant_id"
                " AND origin = 'UPLOAD' AND (run_id IS NULL OR run_id = :run_id)"
                f" AND {_ALIVE} RETURNING artifact_id",
                {
                    "artifact_id": artifact_id,
                    "tenant_id": tenant_id,
                    "run_id": run_id,
                    "now": _microseconds(now),
                },
            )
            return bool(rows)

        return await self._database.transaction(work)

    async def attach(
        self,
        tenant_id: TenantId,
        run_id: RunId,
        artifact_ids: Sequence[ArtifactId],
        *,
        now: datetime,
    ) -> bool:
        async def work(session: Session) -> None:
            for artifact_id in sorted(set(artifact_ids)):
                rows = await session.execute(
                    "UPDATE artifacts SET expires_at = NULL WHERE artifact_id = :artifact_id"
                    " AND tenant_id = :tenant_id AND run_id = :run_id"
                    " AND origin IN ('SANDBOX_EXPORT', 'MODEL_OUTPUT')"
                    f" AND {_ALIVE} RETURNING artifact_id",
                    {
                        "artifact_id": artifact_id,
                        "tenant_id": tenant_id,
                        "run_id": run_id,
                        "now": _microseconds(now),
                    },
                )
                if not rows:
                    raise _Undo

        try:
            await self._database.transaction(work)
        except _Undo:
            return False
        return True

    async def expire(self, tenant_id: TenantId, artifact_id: ArtifactId, *, now: datetime) -> bool:
        async def work(session: Session) -> bool:
            rows = await session.execute(
                "UPDATE artifacts SET expires_at = :now, removal = 'REQUEST'"
                " WHERE artifact_id = :artifact_id AND tenant_id = :tenant_id"
                f" AND {_ALIVE} RETURNING artifact_id",
                {
                    "artifact_id": artifact_id,
                    "tenant_id": tenant_id,
                    "now": _microseconds(now),
                },
            )
            return bool(rows)

        return await self._database.transaction(work)

    async def usage(self, tenant_id: TenantId) -> Usage:
        return await self._database.transaction(lambda session: _usage(session, tenant_id))

    async def usages(self, *, limit: int) -> tuple[Sequence[Usage], Usage]:
        async def work(session: Session) -> tuple[Sequence[Usage], Usage]:
            rows = await session.execute(
                f"SELECT {_USAGE} FROM artifact_usage"
                " ORDER BY stored_bytes DESC, tenant_id LIMIT :limit",
                {"limit": limit},
            )
            sums = await session.execute(
                "SELECT coalesce(sum(stored_bytes), 0), coalesce(sum(stored_count), 0),"
                " coalesce(sum(removed_by_retention_bytes), 0),"
                " coalesce(sum(removed_by_request_bytes), 0) FROM artifact_usage"
            )
            listed = [_usage_of(row) for row in rows]
            whole = _usage_of(("*", *sums[0]))
            rest = Usage(
                tenant_id=TenantId("*"),
                stored_bytes=whole.stored_bytes - sum(u.stored_bytes for u in listed),
                stored_count=whole.stored_count - sum(u.stored_count for u in listed),
                removed_by_retention_bytes=whole.removed_by_retention_bytes
                - sum(u.removed_by_retention_bytes for u in listed),
                removed_by_request_bytes=whole.removed_by_request_bytes
                - sum(u.removed_by_request_bytes for u in listed),
            )
            return listed, rest

        return await self._database.transaction(work)

    async def doom_expired(self, *, now: datetime, limit: int) -> int:
        which = "state = 'STORED' AND expires_at <= :now"

        async def work(session: Session) -> int:
            # The condition stands twice: a row that another transaction changed while this one
            # waited for it is judged again by the outer one.
            rows = await session.execute(
                "UPDATE artifacts SET state = 'REMOVING'"
                f" WHERE artifact_id IN (SELECT artifact_id FROM artifacts WHERE {which}"
                f" ORDER BY artifact_id LIMIT :limit) AND {which} RETURNING artifact_id",
                {"now": _microseconds(now), "limit": limit},
            )
            return len(rows)

        return await self._database.transaction(work)

    async def pending(
        self, *, begun_before: datetime, after: ArtifactId | None, limit: int
    ) -> Sequence[Doomed]:
        async def work(session: Session) -> Sequence[Doomed]:
            rows = await session.execute(
                "SELECT artifact_id, tenant_id FROM artifacts WHERE state = 'PENDING'"
                " AND begun_at < :before AND artifact_id > :after"
                " ORDER BY artifact_id LIMIT :limit",
                {"before": _microseconds(begun_before), "after": after or "", "limit": limit},
            )
            return [
                Doomed(artifact_id=ArtifactId(str(row[0])), tenant_id=TenantId(str(row[1])))
                for row in rows
            ]

        return await self._database.transaction(work)

    async def doomed(self, *, after: ArtifactId | None, limit: int) -> Sequence[Doomed]:
        async def work(session: Session) -> Sequence[Doomed]:
            rows = await session.execute(
                "SELECT artifact_id, tenant_id FROM artifacts WHERE state = 'REMOVING'"
                " AND state <> 'STORED' AND artifact_id > :after ORDER BY artifact_id LIMIT :limit",
                {"after": after or "", "limit": limit},
            )
            return [
                Doomed(artifact_id=ArtifactId(str(row[0])), tenant_id=TenantId(str(row[1])))
                for row in rows
            ]

        return await self._database.transaction(work)

    async def abandon(self, artifact_id: ArtifactId) -> bool:
        async def work(session: Session) -> bool:
            await session.execute(
                "UPDATE artifacts SET state = 'REMOVING', removal = 'ABANDONED'"
                " WHERE artifact_id = :artifact_id AND state = 'PENDING'",
                {"artifact_id": artifact_id},
            )
            rows = await session.execute(
                "SELECT state FROM artifacts WHERE artifact_id = :artifact_id AND state = 'STORED'",
                {"artifact_id": artifact_id},
            )
            return not rows

        return await self._database.transaction(work)

    async def forget(self, artifact_id: ArtifactId) -> tuple[Removal, int] | None:
        async def work(session: Session) -> tuple[Removal, int] | None:
            rows = await session.execute(
                "DELETE FROM artifacts WHERE artifact_id = :artifact_id AND state = 'REMOVING'"
                " RETURNING tenant_id, removal, size_bytes",
                {"artifact_id": artifact_id},
            )
            if not rows:
                return None
            tenant_id, reason, size = rows[0]
            removal = Removal(str(reason))
            if removal is Removal.ABANDONED:
                return removal, 0
            size_bytes = _int(size)
            column = (
                "removed_by_request_bytes"
                if removal is Removal.REQUEST
                else "removed_by_retention_bytes"
            )
            await session.execute(
                "UPDATE artifact_usage SET stored_bytes = stored_bytes - :size,"
                f" stored_count = stored_count - 1, {column} = {column} + :size"
                " WHERE tenant_id = :tenant_id",
                {"tenant_id": str(tenant_id), "size": size_bytes},
            )
            return removal, size_bytes

        return await self._database.transaction(work)


async def _usage(session: Session, tenant_id: TenantId) -> Usage:
    rows = await session.execute(
        f"SELECT {_USAGE} FROM artifact_usage WHERE tenant_id = :tenant_id",
        {"tenant_id": tenant_id},
    )
    return _usage_of(rows[0]) if rows else Usage(tenant_id=tenant_id)


def _usage_of(row: Row) -> Usage:
    return Usage(
        tenant_id=TenantId(str(row[0])),
        stored_bytes=_int(row[1]),
        stored_count=_int(row[2]),
        removed_by_retention_bytes=_int(row[3]),
        removed_by_request_bytes=_int(row[4]),
    )


def _stored(row: Row) -> StoredArtifact:
    filename = row[4]
    assert isinstance(filename, bytes)
    return StoredArtifact(
        artifact_id=ArtifactId(str(row[0])),
        metadata=ArtifactMetadata(
            tenant_id=TenantId(str(row[1])),
            run_id=None if row[2] is None else RunId(str(row[2])),
            origin=ArtifactOrigin(str(row[3])),
            filename=filename.decode("utf-8", "surrogatepass"),
            media_type=str(row[5]),
            size_bytes=_int(row[6]),
            sha256=str(row[7]),
            trust=TrustLevel(str(row[8])),
            created_at=_time(_int(row[9])),
            expires_at=None if row[10] is None else _time(_int(row[10])),
            flags=frozenset(ContentFlag(name) for name in str(row[11]).split()),
        ),
    )


def _int(value: object) -> int:
    """A number of either database (a sum of PostgreSQL is a Decimal)."""
    return int(str(value))


def _microseconds(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise ValueError("a time without a zone")
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _time(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)
