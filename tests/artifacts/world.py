"""What the tests of the artifact store are made of: a clock, drafts, streams, opened stores."""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import anyio

from sbxd.artifacts.opening import Artifacts, ArtifactSettings, open_artifacts
from sbxd.artifacts.retention import Retention
from sbxd.port.artifact import (
    ArtifactId,
    ArtifactOrigin,
    ArtifactRef,
    ContentDigest,
    ContentRule,
    TrustLevel,
)
from sbxd.port.ids import RunId, TenantId

ResultT = TypeVar("ResultT")

ALICE = TenantId("alice")
BOB = TenantId("bob")
RUN = RunId("run-1")
BEGIN = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


class Clock:
    """The time of a store, which stands until a test moves it."""

    def __init__(self) -> None:
        self.time = BEGIN

    async def __call__(self) -> datetime:
        return self.time


class Folder:
    """A store's folder, and what lies in it."""

    def __init__(self, path: Path, metadata: str = "") -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        self.path = path
        self.metadata = metadata
        self.clock = Clock()
        self.retention = Retention()

    def settings(self) -> ArtifactSettings:
        return ArtifactSettings(
            directory=str(self.path), metadata=self.metadata, retention=self.retention
        )

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Artifacts]:
        async with open_artifacts(self.settings(), now=self.clock) as artifacts:
            yield artifacts

    def objects(self) -> list[Path]:
        """Every file of an object."""
        return sorted(path for path in (self.path / "objects").rglob("*") if not path.is_dir())

    def partials(self) -> list[Path]:
        return sorted((self.path / "incoming").iterdir())


def run(backend: str, main: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run `main` in an event loop of this kind; what hangs fails."""

    async def bounded() -> ResultT:
        with anyio.fail_after(300):
            return await main()

    return anyio.run(bounded, backend=backend)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


def digest_of(data: bytes) -> ContentDigest:
    return ContentDigest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


async def fetched(artifacts: Artifacts, tenant_id: TenantId, artifact_id: ArtifactId) -> bytes:
    """The bytes, through the service."""
    found = bytearray()
    async with artifacts.service.content(tenant_id, artifact_id) as content:
        async for piece in content.chunks:
            found += piece
    return bytes(found)


async def exported(
    artifacts: Artifacts,
    data: bytes = b"data",
    *,
    tenant_id: TenantId = ALICE,
    run_id: RunId | None = RUN,
    origin: ArtifactOrigin = ArtifactOrigin.SANDBOX_EXPORT,
) -> ArtifactId:
    """One artifact, stored."""
    writer = artifacts.writer(tenant_id, run_id, origin)
    ref = await writer.create(
        pieces(data), "a.txt", "application/octet-stream", TrustLevel.EXTERNAL_UNTRUSTED
    )
    return ref.artifact_id


async def write(
    artifacts: Artifacts,
    data: bytes | AsyncIterator[bytes],
    *,
    name: str = "a.txt",
    media_type: str = "text/plain",
    rule: ContentRule = ContentRule.ANY,
    tenant_id: TenantId = ALICE,
    run_id: RunId | None = RUN,
    origin: ArtifactOrigin = ArtifactOrigin.SANDBOX_EXPORT,
) -> ArtifactRef:
    """One artifact of a stream, through a run's writer."""
    stream = pieces(data) if isinstance(data, bytes) else data
    writer = artifacts.writer(tenant_id, run_id, origin)
    return await writer.create(stream, name, media_type, TrustLevel.EXTERNAL_UNTRUSTED, rule=rule)
