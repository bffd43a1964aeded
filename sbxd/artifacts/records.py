"""The metadata port: what is known of artifacts, behind one protocol.

A row lives through PENDING (its name is known before a file has it), STORED (acknowledged) and
REMOVING (not found any more; its object may be there). So a process that dies at any step leaves a
row that names what it left, and a sweep finds it.

Invariants of every implementation (one contract suite): a row is STORED only by `acknowledge`,
which charges the tenant in the same transaction; `find` sees STORED rows that have not expired and
no others; a row goes only by `forget`, after its object; each method is one transaction, all or
nothing, also when it is cancelled.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from sbxd.port.artifact import (
    ArtifactId,
    ArtifactMetadata,
    ArtifactOrigin,
    ContentFlag,
    TrustLevel,
)
from sbxd.port.ids import RunId, TenantId


class Removal(StrEnum):
    """Why an artifact goes. ABANDONED: it was never acknowledged."""

    RETENTION = "RETENTION"
    REQUEST = "REQUEST"
    ABANDONED = "ABANDONED"


class Intent(Struct, frozen=True, kw_only=True):
    """What is known before the first byte.

    begun_at: when the put began, by the database's clock (created_at may be a sender's).
    """

    artifact_id: ArtifactId
    tenant_id: TenantId
    run_id: RunId | None
    origin: ArtifactOrigin
    filename: str
    media_type: str
    trust: TrustLevel
    begun_at: datetime
    created_at: datetime
    expires_at: datetime | None


class StoredArtifact(Struct, frozen=True, kw_only=True):
    artifact_id: ArtifactId
    metadata: ArtifactMetadata


class Doomed(Struct, frozen=True, kw_only=True):
    """A row whose object is to be removed."""

    artifact_id: ArtifactId
    tenant_id: TenantId


class Usage(Struct, frozen=True, kw_only=True):
    """Of one tenant: what is stored (until it is swept), and what went since the beginning."""

    tenant_id: TenantId
    stored_bytes: int = 0
    stored_count: int = 0
    removed_by_retention_bytes: int = 0
    removed_by_request_bytes: int = 0


class Caps(Struct, frozen=True, kw_only=True):
    """What one tenant's stored artifacts may be, together."""

    bytes_max: int
    count_max: int


class MetadataStore(Protocol):
    """Every method raises ArtifactUnavailable(METADATA) when the database does not answer; then
    nothing is changed, or (a lost connection during a commit) the change is whole.

    Times are aware datetimes; microseconds are kept.
    """

    async def now(self) -> datetime:
        """The time by the database's own clock, which all who share the store share."""
        ...

    async def store_id(self) -> str | None:
        """The tree that these rows are of; None for a database that has none yet."""
        ...

    async def adopt(self, store_id: str) -> str:
        """Take this tree if there is none yet; returns the one that it is now."""
        ...

    async def intend(self, intent: Intent) -> Usage:
        """A PENDING row, durable when this returns; and what its tenant holds by now."""
        ...

    async def acknowledge(
        self,
        artifact_id: ArtifactId,
        *,
        size_bytes: int,
        sha256: str,
        flags: frozenset[ContentFlag],
        caps: Caps,
    ) -> None:
        """PENDING becomes STORED and the tenant is charged; durable when this returns.

        Raises: ArtifactRejected(TENANT_CAP) when the tenant would hold more than the caps;
        ArtifactUnavailable(ABANDONED) when the row is not PENDING any more.
        """
        ...

    async def find(self, artifact_id: ArtifactId, *, now: datetime) -> StoredArtifact | None:
        """A STORED artifact that has not expired. The caller compares the tenant."""
        ...

    async def claim(
        self, tenant_id: TenantId, artifact_id: ArtifactId, run_id: RunId, *, now: datetime
    ) -> bool:
        """Give an UPLOAD to a run and let it live; True also when it is this run's already."""
        ...

    async def attach(
        self,
        tenant_id: TenantId,
        run_id: RunId,
        artifact_ids: Sequence[ArtifactId],
        *,
        now: datetime,
    ) -> bool:
        """Let a run's exports live. All of them or, False, none."""
        ...

    async def expire(self, tenant_id: TenantId, artifact_id: ArtifactId, *, now: datetime) -> bool:
        """End an artifact now, by request. False when it was not there."""
        ...

    async def usage(self, tenant_id: TenantId) -> Usage: ...

    async def usages(self, *, limit: int) -> tuple[Sequence[Usage], Usage]:
        """The tenants that hold most, and the sum of all the others."""
        ...

    async def doom_expired(self, *, now: datetime, limit: int) -> int:
        """STORED rows that have expired become REMOVING; how many."""
        ...

    async def pending(
        self, *, begun_before: datetime, after: ArtifactId | None, limit: int
    ) -> Sequence[Doomed]:
        """PENDING rows whose put began before, in the order of their ids, from behind `after`."""
        ...

    async def doomed(self, *, after: ArtifactId | None, limit: int) -> Sequence[Doomed]:
        """REMOVING rows in the order of their ids, from behind `after`."""
        ...

    async def abandon(self, artifact_id: ArtifactId) -> bool:
        """A PENDING row becomes REMOVING, for a put that did not come to its end. False when the
        row is STORED, which it then stays: its acknowledgment had come through."""
        ...

    async def forget(self, artifact_id: ArtifactId) -> tuple[Removal, int] | None:
        """Drop a REMOVING row and discharge its tenant: why it went, and its bytes. None when
        another dropped it."""
        ...
