"""What the daemon tells of itself: an environment, an image, a thing that the host can enforce.

Parts of the replies of `sbxd.wire.messages`, no messages themselves.
"""

from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct

from sbxd.port.command import Usage
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.limits import ResourceLimits


class EnvironmentInfo(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One live environment as an operator sees it."""

    handle: EnvironmentHandle
    state: str
    image_digest: str
    limits: ResourceLimits
    owner_uid: int
    commands_run: int
    running_argv: tuple[bytes, ...] | None
    usage: Usage
    scope: str


class ImageInfo(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    digest: str
    label: str
    aliases: tuple[str, ...]
    size_bytes: int
    imported_at: datetime
    in_use: int


class PostureItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One thing that this host can or cannot enforce, and the exact fix when it cannot."""

    name: str
    state: Annotated[str, Meta(pattern=r"^(ok|degraded|missing|not_checked)\Z")]
    detail: str
    fix: str = ""
