"""The application's door to artifacts: authorise the tenant, then metadata or content.

Invariants: the one caller of `ArtifactStore.open`; the tenant is compared before anything is said
or opened; another tenant's artifact, an expired one and one that never was are the same
ArtifactNotFound; content leaves with the headers that make it an attachment, always. Deliberately
absent: HTTP. A route passes the tenant that it has authenticated and copies the headers.
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, final, runtime_checkable

from msgspec import Struct

from sbxd.artifacts.records import MetadataStore, StoredArtifact
from sbxd.artifacts.retention import SharedClock
from sbxd.policy.attachment import attachment_headers
from sbxd.port.artifact import (
    ARTIFACT_ID_PATTERN,
    ArtifactId,
    ArtifactMetadata,
    ArtifactNotFound,
    ArtifactRef,
    ArtifactRejected,
    ArtifactRejectedCode,
    ArtifactStore,
)
from sbxd.port.ids import RunId, TenantId


@runtime_checkable
class _Closes(Protocol):
    async def aclose(self) -> None: ...


class ArtifactContent(Struct, frozen=True, kw_only=True):
    """An artifact on its way out. chunks: iterated once, within the block that gave it."""

    metadata: ArtifactMetadata
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


@final
class ArtifactService:
    """tenant_id, everywhere: whom the caller has authenticated. Every method raises
    ArtifactNotFound and ArtifactUnavailable."""

    def __init__(self, store: ArtifactStore, metadata: MetadataStore, now: SharedClock) -> None:
        self._store = store
        self._metadata = metadata
        self._now = now

    async def describe(self, tenant_id: TenantId, artifact_id: ArtifactId) -> ArtifactMetadata:
        """What is known of an artifact. Its filename is as it came: for display, escape it."""
        return (await self._authorised(tenant_id, artifact_id)).metadata

    async def refer(self, tenant_id: TenantId, artifact_id: ArtifactId) -> ArtifactRef:
        """The reference that travels."""
        return _ref(await self._authorised(tenant_id, artifact_id))

    @asynccontextmanager
    async def content(
        self, tenant_id: TenantId, artifact_id: ArtifactId
    ) -> AsyncIterator[ArtifactContent]:
        """The bytes and the headers that they are served with.

            async with service.content(tenant_id, artifact_id) as content:
                async for piece in content.chunks: ...

        Raises: ArtifactIntegrityError, at the latest instead of the last piece. Leaving the block
        early closes the object.
        """
        found = await self._authorised(tenant_id, artifact_id)
        metadata = found.metadata
        chunks = await self._store.open(_ref(found))
        try:
            yield ArtifactContent(
                metadata=metadata,
                headers=attachment_headers(
                    metadata.filename, metadata.media_type, metadata.size_bytes
                ),
                chunks=chunks,
            )
        finally:
            if isinstance(chunks, _Closes):
                await chunks.aclose()

    async def claim(
        self, tenant_id: TenantId, artifact_id: ArtifactId, run_id: RunId
    ) -> ArtifactRef:
        """A sent message takes an upload: it lives as long as its conversation, until `delete`.

        Idempotent for one run. Raises ArtifactRejected(NOT_CLAIMABLE) for what is no upload, or
        another run's.
        """
        found = await self._authorised(tenant_id, artifact_id)
        if not await self._metadata.claim(tenant_id, artifact_id, run_id, now=await self._now()):
            raise ArtifactRejected(
                ArtifactRejectedCode.NOT_CLAIMABLE, "no upload that this run may claim"
            )
        return _ref(found)

    async def attach(
        self, tenant_id: TenantId, run_id: RunId, artifact_ids: Sequence[ArtifactId]
    ) -> None:
        """A run's final reply attaches exports of its own: they live on, until `delete`.

        All of them or none. Idempotent. Raises ArtifactRejected(NOT_ATTACHABLE) when one is not
        this run's SANDBOX_EXPORT or MODEL_OUTPUT.
        """
        for artifact_id in artifact_ids:
            await self._authorised(tenant_id, artifact_id)
        if not await self._metadata.attach(tenant_id, run_id, artifact_ids, now=await self._now()):
            raise ArtifactRejected(
                ArtifactRejectedCode.NOT_ATTACHABLE, "not all are exports of this run"
            )

    async def delete(self, tenant_id: TenantId, artifact_id: ArtifactId) -> None:
        """End an artifact: not found from now on, its bytes removed by the next sweep."""
        await self._authorised(tenant_id, artifact_id)
        if not await self._metadata.expire(tenant_id, artifact_id, now=await self._now()):
            raise ArtifactNotFound

    async def _authorised(self, tenant_id: TenantId, artifact_id: ArtifactId) -> StoredArtifact:
        if not re.match(ARTIFACT_ID_PATTERN, artifact_id):
            raise ArtifactNotFound
        found = await self._metadata.find(artifact_id, now=await self._now())
        if found is None or found.metadata.tenant_id != tenant_id:
            raise ArtifactNotFound
        return found


def _ref(found: StoredArtifact) -> ArtifactRef:
    return ArtifactRef(
        artifact_id=found.artifact_id,
        sha256=found.metadata.sha256,
        size_bytes=found.metadata.size_bytes,
        media_type=found.metadata.media_type,
    )
