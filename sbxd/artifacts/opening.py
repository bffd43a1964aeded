"""Where the parts of the artifact package meet: one folder and one database become a store.

Invariant: tree and database are of one another. The tree has an id and the database remembers it;
with another database (an empty one, one restored beside the wrong folder) nothing is opened, since
a sweep by it would judge objects that it does not know.
"""

import re
import secrets
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import final

import anyio.to_thread
from msgspec import Struct

from sbxd.artifacts.database import Database
from sbxd.artifacts.identifiers import ArtifactIds
from sbxd.artifacts.metadata_sqlite import open_sqlite
from sbxd.artifacts.metrics import TENANTS_MAX, render
from sbxd.artifacts.records import MetadataStore
from sbxd.artifacts.retention import Retention, SharedClock, utc_now
from sbxd.artifacts.service import ArtifactService
from sbxd.artifacts.sql import SqlMetadata
from sbxd.artifacts.store import DurableArtifactStore
from sbxd.artifacts.sweeper import Sweeper
from sbxd.artifacts.tree import ArtifactTree
from sbxd.artifacts.writer import RunArtifactWriter
from sbxd.policy.attachment import is_media_type
from sbxd.port.artifact import (
    ArtifactOrigin,
    ArtifactUnavailable,
    ArtifactUnavailableCode,
    TrustLevel,
)
from sbxd.port.ids import RunId, TenantId

_PASSWORD = re.compile(r"//[^/@?]*:[^/@?]*@|[?&](?:ssl)?password=", re.IGNORECASE)
_POSTGRES_SCHEMES = ("postgresql://", "postgres://")


class ArtifactSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where artifacts are kept.

    directory: an existing folder of this user that nobody else can write to.
    metadata: a PostgreSQL connection URI; empty for SQLite in `directory`.
    archives: the media types as which a run may export an archive or a packed stream; none by
    default.
    """

    directory: str
    metadata: str = ""
    retention: Retention = Retention()
    archives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.metadata and not self.metadata.startswith(_POSTGRES_SCHEMES):
            raise ValueError("metadata is a postgresql:// URI, or empty for SQLite")
        if _PASSWORD.search(self.metadata):
            # Settings are shown, logged and backed up.
            raise ValueError("metadata holds a password: use libpq's password file")
        for each in self.archives:
            if not is_media_type(each) or each != each.lower() or ";" in each:
                raise ValueError(f"archives: {each!a} is no media type as application/zip")


@final
class Artifacts:
    """Made by `open_artifacts`; what a worker holds."""

    def __init__(
        self,
        tree: ArtifactTree,
        metadata: MetadataStore,
        *,
        retention: Retention,
        ids: ArtifactIds,
        now: SharedClock,
        archives: frozenset[str] = frozenset(),
    ) -> None:
        self._metadata = metadata
        self._store = DurableArtifactStore(
            tree, metadata, retention=retention, ids=ids, now=now, archives=archives
        )
        self.service = ArtifactService(self._store, metadata, now)
        self.sweeper = Sweeper(tree, metadata, retention, now)

    def writer(
        self,
        tenant_id: TenantId,
        run_id: RunId | None,
        origin: ArtifactOrigin,
        *,
        trust_max: TrustLevel = TrustLevel.EXTERNAL_UNTRUSTED,
    ) -> RunArtifactWriter:
        """The capability to hand to a tool of this run."""
        return RunArtifactWriter(
            self._store, tenant_id=tenant_id, run_id=run_id, origin=origin, trust_max=trust_max
        )

    async def metrics(self) -> str:
        """OpenMetrics text (`sbxd.artifacts.metrics.CONTENT_TYPE`)."""
        return render(*await self._metadata.usages(limit=TENANTS_MAX))


@asynccontextmanager
async def open_artifacts(
    settings: ArtifactSettings, *, now: SharedClock | None = None
) -> AsyncIterator[Artifacts]:
    """The store of these settings, on asyncio or trio. now: when an artifact begins and ends; by
    default the database says it.

    Raises: ArtifactUnavailable: REFUSED, METADATA, SCHEMA, MISMATCH, NO_SPACE or IO.
    """
    root = Path(settings.directory)
    tree = await anyio.to_thread.run_sync(lambda: ArtifactTree(root, str(uuid.uuid4())))
    try:
        async with open_database(settings) as database:
            metadata = SqlMetadata(database)
            await pair(tree, metadata)
            ids = ArtifactIds(lambda: int(utc_now().timestamp() * 1000), secrets.token_bytes)
            clock = metadata.now if now is None else now
            yield Artifacts(
                tree,
                metadata,
                retention=settings.retention,
                ids=ids,
                now=clock,
                archives=frozenset(settings.archives),
            )
    finally:
        tree.close()


def open_database(settings: ArtifactSettings) -> AbstractAsyncContextManager[Database]:
    """The database that the settings name."""
    if not settings.metadata:
        return open_sqlite(Path(settings.directory) / "metadata.sqlite")
    # Only a deployment that names PostgreSQL needs its library.
    from sbxd.artifacts.metadata_postgres import open_postgres

    return open_postgres(settings.metadata)


async def pair(tree: ArtifactTree, metadata: MetadataStore) -> None:
    """Check that database and tree are of one store, or make them so when both are new.

    Raises: ArtifactUnavailable(MISMATCH).
    """
    # In this order: who stores the first object has made the database remember the tree before.
    empty = await anyio.to_thread.run_sync(tree.is_empty)
    known = await metadata.store_id()
    if known is None:
        if not empty:
            raise ArtifactUnavailable(
                ArtifactUnavailableCode.MISMATCH,
                "the folder has artifacts and the database is new: name the database that knows "
                "them, or another folder",
            )
        known = await metadata.adopt(tree.store_id)
    if known != tree.store_id:
        raise ArtifactUnavailable(
            ArtifactUnavailableCode.MISMATCH,
            "the database is of another folder: name the two that belong together",
        )
