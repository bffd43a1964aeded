"""Artifact types (S1). The bytes and their metadata live on the worker's side alone."""

from collections.abc import AsyncIterator
from datetime import datetime
from enum import StrEnum
from typing import NewType, Protocol

from msgspec import Struct

from sbxd.port.ids import RunId, TenantId

ArtifactId = NewType("ArtifactId", str)


class TrustLevel(StrEnum):
    INTERNAL_TOOL = "INTERNAL_TOOL"
    EXTERNAL_UNTRUSTED = "EXTERNAL_UNTRUSTED"


class ArtifactOrigin(StrEnum):
    SANDBOX_EXPORT = "SANDBOX_EXPORT"
    TOOL_OUTPUT = "TOOL_OUTPUT"
    MODEL_OUTPUT = "MODEL_OUTPUT"
    UPLOAD = "UPLOAD"
    TRAJECTORY_EXPORT = "TRAJECTORY_EXPORT"
    KNOWLEDGE_SOURCE = "KNOWLEDGE_SOURCE"


class ArtifactMetadata(Struct, frozen=True, kw_only=True):
    """What the store knows of an artifact. filename is metadata and never a path."""

    tenant_id: TenantId
    run_id: RunId | None
    origin: ArtifactOrigin
    filename: str
    media_type: str
    size_bytes: int
    sha256: str
    trust: TrustLevel
    created_at: datetime
    expires_at: datetime | None


class ArtifactRef(Struct, frozen=True, kw_only=True):
    """What travels: an opaque id and three facts about bytes."""

    artifact_id: ArtifactId
    sha256: str
    size_bytes: int
    media_type: str


class ArtifactStore(Protocol):
    """Holds bytes by a derived key. Not an authorization boundary: callers authorize first."""

    async def put(
        self, stream: AsyncIterator[bytes], metadata: ArtifactMetadata
    ) -> ArtifactRef: ...

    async def open(self, ref: ArtifactRef) -> AsyncIterator[bytes]: ...


class ArtifactWriter(Protocol):
    """What a tool is handed: it names bytes, and the pipeline supplies identity and digest."""

    async def create(
        self, stream: AsyncIterator[bytes], filename: str, media_type: str, trust: TrustLevel
    ) -> ArtifactRef: ...


class CredentialRef(Struct, frozen=True, kw_only=True):
    """Names a credential without holding it."""

    name: str


class SecretValue:
    """A secret that redacts itself in text. Not a boundary: whoever holds it can reveal it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __str__(self) -> str:
        return "<redacted>"

    def __repr__(self) -> str:
        return "SecretValue(<redacted>)"

    def __reduce__(self) -> str:
        raise TypeError("a SecretValue does not survive serialization")


class CredentialUnavailable(Exception):
    """No credential is resolved for this holder (always so for a sandbox's resolver)."""


class CredentialResolver(Protocol):
    async def resolve(self, reference: CredentialRef) -> SecretValue: ...
