"""How long an artifact lives, as one table and one function. Pure.

Invariant: every origin has a row; a lifetime is decided when the artifact is made, when an upload
is claimed and when a reply attaches an export, and never by counting who refers to it.
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated

from msgspec import Meta, Struct

from sbxd.port.artifact import ArtifactOrigin

WallClock = Callable[[], datetime]
# What decides whether an artifact has ended: the clock that all who share the store share.
SharedClock = Callable[[], Awaitable[datetime]]

_SECONDS_MAX = 3650 * 86_400
Lifetime = Annotated[int, Meta(ge=1, le=_SECONDS_MAX)]

# Lives on when the run's final reply attaches it.
ATTACHABLE = frozenset({ArtifactOrigin.SANDBOX_EXPORT, ArtifactOrigin.MODEL_OUTPUT})


class Retention(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator decides. Seconds and bytes.

    tenant_bytes_max: what one tenant's stored artifacts may hold together; a put beyond it is
    refused, nothing is evicted. tenant_artifacts_max: the same by number (empty ones take room
    too). artifact_bytes_max: the largest single one. abandoned_put_seconds: a put must end within
    half of it, and a sweep removes what one has left after all of it.
    """

    default_seconds: Lifetime = 30 * 86_400
    unclaimed_upload_seconds: Lifetime = 24 * 3600
    artifact_bytes_max: Annotated[int, Meta(ge=1, le=2**50)] = 512 * 1024 * 1024
    tenant_bytes_max: Annotated[int, Meta(ge=1, le=2**60)] = 64 * 1024**3
    tenant_artifacts_max: Annotated[int, Meta(ge=1, le=2**40)] = 1_000_000
    abandoned_put_seconds: Annotated[int, Meta(ge=60, le=30 * 86_400)] = 24 * 3600


def expiry(retention: Retention, origin: ArtifactOrigin, created_at: datetime) -> datetime | None:
    """When an artifact that is made now ends; None for one that lives until it is deleted."""
    match origin:
        case ArtifactOrigin.KNOWLEDGE_SOURCE:
            return None
        case ArtifactOrigin.UPLOAD:
            return created_at + timedelta(seconds=retention.unclaimed_upload_seconds)
        case (
            ArtifactOrigin.SANDBOX_EXPORT
            | ArtifactOrigin.TOOL_OUTPUT
            | ArtifactOrigin.MODEL_OUTPUT
            | ArtifactOrigin.TRAJECTORY_EXPORT
        ):
            return created_at + timedelta(seconds=retention.default_seconds)


def utc_now() -> datetime:
    """This host's wall clock: for the ids of artifacts, never for a decision."""
    return datetime.now(UTC)
