"""The egress policy as data: which destinations an environment may reach.

What a destination means, and how an address is judged, is `sbxd.policy.egress`. There is
deliberately no mode that allows everything, no scheme, no default port and no address form.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct


class EgressMode(StrEnum):
    DENY = "deny"
    ALLOWLIST = "allowlist"


class EgressDestination(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One host (at most one leftmost wildcard label) and its explicit ports."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    ports: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=65535)], ...], Meta(min_length=1, max_length=64)
    ]


class EgressPolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`deny` carries no destination; `allowlist` carries exactly what may be reached."""

    mode: EgressMode = EgressMode.DENY
    destinations: Annotated[tuple[EgressDestination, ...], Meta(max_length=1024)] = ()

    def __post_init__(self) -> None:
        if self.mode is EgressMode.DENY and self.destinations:
            raise ValueError("mode `deny` takes no destinations: remove them or use `allowlist`")


DENY_ALL = EgressPolicy()
