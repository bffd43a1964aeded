"""Artifact types (S1). The bytes and their metadata live on the worker's side alone.

Invariants: what a caller supplies (filename, media type) is metadata and never part of a key; an
ArtifactRef names nothing but random bits and three facts about bytes; no error repeats a host
path. Deliberately absent: a way to open content by anything but a reference that a service has
authorised.
"""

from collections.abc import AsyncIterator
from datetime import datetime
from enum import StrEnum
from typing import NewType, Protocol

from msgspec import Struct

from sbxd.port.ids import RunId, TenantId

ArtifactId = NewType("ArtifactId", str)

ARTIFACT_ID_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\Z"
FILENAME_CHARACTERS_MAX = 4096


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


class ContentFlag(StrEnum):
    """What a content holds that a reader should know of: of text, what is in it; of any content,
    which archive or packed stream it is (ARCHIVE_). The bytes are never altered."""

    NUL = "NUL"
    NOT_UTF8 = "NOT_UTF8"
    BYTE_ORDER_MARK = "BYTE_ORDER_MARK"
    LONE_CARRIAGE_RETURN = "LONE_CARRIAGE_RETURN"
    UNICODE_LINE_SEPARATOR = "UNICODE_LINE_SEPARATOR"
    BIDIRECTIONAL_CONTROL = "BIDIRECTIONAL_CONTROL"
    ESCAPE_SEQUENCE = "ESCAPE_SEQUENCE"
    FORMULA_LIKE = "FORMULA_LIKE"
    ARCHIVE_7Z = "ARCHIVE_7Z"
    ARCHIVE_AR = "ARCHIVE_AR"
    ARCHIVE_BZIP2 = "ARCHIVE_BZIP2"
    ARCHIVE_CAB = "ARCHIVE_CAB"
    ARCHIVE_COMPRESS = "ARCHIVE_COMPRESS"
    ARCHIVE_CPIO = "ARCHIVE_CPIO"
    ARCHIVE_GZIP = "ARCHIVE_GZIP"
    ARCHIVE_ISO9660 = "ARCHIVE_ISO9660"
    ARCHIVE_LZ4 = "ARCHIVE_LZ4"
    ARCHIVE_RAR = "ARCHIVE_RAR"
    ARCHIVE_TAR = "ARCHIVE_TAR"
    ARCHIVE_XZ = "ARCHIVE_XZ"
    ARCHIVE_ZIP = "ARCHIVE_ZIP"
    ARCHIVE_ZSTD = "ARCHIVE_ZSTD"


class ContentRule(StrEnum):
    """ANY: whatever bytes. TEXT: UTF-8 without NUL, or nothing is stored."""

    ANY = "ANY"
    TEXT = "TEXT"


class ArtifactMetadata(Struct, frozen=True, kw_only=True):
    """What the store knows of an artifact. filename is metadata and never a path.

    run_id: None only for an upload that no message has claimed, and for a knowledge source.
    expires_at: None for what lives until it is deleted.
    flags: what the store saw in the bytes: which archive it is, and of text what is in it.
    """

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
    flags: frozenset[ContentFlag] = frozenset()


class ArtifactRef(Struct, frozen=True, kw_only=True):
    """What travels: an opaque id and three facts about bytes."""

    artifact_id: ArtifactId
    sha256: str
    size_bytes: int
    media_type: str


class ContentDigest(Struct, frozen=True, kw_only=True):
    """What a sender says of the bytes that it sent. sha256: 64 hex digits, lower case."""

    sha256: str
    size_bytes: int


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


class ArtifactRejectedCode(StrEnum):
    TOO_LARGE = "TOO_LARGE"
    TENANT_CAP = "TENANT_CAP"
    INVALID_NAME = "INVALID_NAME"
    INVALID_MEDIA_TYPE = "INVALID_MEDIA_TYPE"
    INVALID_IDENTIFIER = "INVALID_IDENTIFIER"
    NOT_TEXT = "NOT_TEXT"
    ARCHIVE = "ARCHIVE"
    NOT_CLAIMABLE = "NOT_CLAIMABLE"
    NOT_ATTACHABLE = "NOT_ATTACHABLE"


class ArtifactUnavailableCode(StrEnum):
    """NO_SPACE: the disk or its quota is full. IO: the file system failed. REFUSED: the tree is
    not as the store made it. METADATA: the database failed or was not reached. SCHEMA: its schema
    is not one that this version knows. MISMATCH: database and tree are not of one store.
    ABANDONED: the put took longer than a sweep waits."""

    NO_SPACE = "NO_SPACE"
    IO = "IO"
    REFUSED = "REFUSED"
    METADATA = "METADATA"
    SCHEMA = "SCHEMA"
    MISMATCH = "MISMATCH"
    ABANDONED = "ABANDONED"


class ArtifactError(Exception):
    """Abstract: raise one of the subclasses. `detail` is for people and holds no host path."""

    def __init__(self, detail: str) -> None:
        if type(self) is ArtifactError:
            raise TypeError("ArtifactError is abstract: raise one of its subclasses")
        super().__init__(detail)
        self.detail = detail


class ArtifactNotFound(ArtifactError):
    """No such artifact for this tenant: never was, another's, expired or deleted, all alike."""

    def __init__(self) -> None:
        super().__init__("no such artifact")


class ArtifactIntegrityError(ArtifactError):
    """The bytes are not the bytes that were sent or stored. Of a put, nothing was stored."""


class ArtifactRejected(ArtifactError):
    """The request is wrong and will stay wrong; nothing was stored or changed."""

    def __init__(self, code: ArtifactRejectedCode, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class ArtifactUnavailable(ArtifactError):
    """The store or its metadata cannot do it now; nothing was acknowledged."""

    def __init__(self, code: ArtifactUnavailableCode, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
