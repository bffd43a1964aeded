"""The artifacts of one run, as its tools may use them: add some, and describe what they added.

Invariants: tenant and run are bound here, by the pipeline; a tool names bytes. Everything that
comes out of a run is EXTERNAL_UNTRUSTED: out of a sandbox because code made it that nobody trusts,
and out of a model because what it wrote may repeat what it read.
"""

from collections.abc import AsyncIterator, Callable
from typing import Protocol, final

from sbxd.artifacts.opening import Artifacts
from sbxd.port.artifact import (
    ArtifactMetadata,
    ArtifactOrigin,
    ArtifactRef,
    ContentDigest,
    ContentRule,
    TrustLevel,
)
from sbxd.port.ids import RunId, TenantId

Expected = Callable[[], ContentDigest]


class RunArtifacts(Protocol):
    """What the tools are handed."""

    async def create(
        self,
        origin: ArtifactOrigin,
        stream: AsyncIterator[bytes],
        *,
        filename: str,
        media_type: str,
        expected: Expected | None = None,
        rule: ContentRule = ContentRule.ANY,
    ) -> ArtifactRef:
        """Store a stream; `expected` is asked at its end. Raises the errors of artifacts."""
        ...

    async def describe(self, ref: ArtifactRef) -> ArtifactMetadata:
        """What the store knows of one, with what it saw in the bytes."""
        ...


@final
class StoreOfRun:
    """Implements `RunArtifacts` over the store of a worker tier."""

    def __init__(self, artifacts: Artifacts, tenant_id: TenantId, run_id: RunId) -> None:
        self._artifacts = artifacts
        self._tenant_id = tenant_id
        self._run_id = run_id

    async def create(
        self,
        origin: ArtifactOrigin,
        stream: AsyncIterator[bytes],
        *,
        filename: str,
        media_type: str,
        expected: Expected | None = None,
        rule: ContentRule = ContentRule.ANY,
    ) -> ArtifactRef:
        """As the protocol."""
        writer = self._artifacts.writer(self._tenant_id, self._run_id, origin)
        return await writer.create(
            stream,
            filename,
            media_type,
            TrustLevel.EXTERNAL_UNTRUSTED,
            expected=expected,
            rule=rule,
        )

    async def describe(self, ref: ArtifactRef) -> ArtifactMetadata:
        """As the protocol."""
        return await self._artifacts.service.describe(self._tenant_id, ref.artifact_id)
