"""The messages of the egress boundary, for operators: what is configured, and how it judges.

Deliberately absent: a message that changes the policy, or that lets a destination through.
"""

from typing import Annotated

from msgspec import Meta, Struct

from sbxd.port.egress import EgressPolicy
from sbxd.wire.base import Message, Request, RequestIdField

HOST_CHARACTERS_MAX = 1024
PORT_ASKED_MAX = 999_999


class EgressCheck(Request, frozen=True, tag="egress_check", kw_only=True):
    """How the operator's policy judges one destination now: looked up, never dialled. host, port:
    as somebody would ask for them; what is no host or port is an answer as well."""

    host: Annotated[str, Meta(max_length=HOST_CHARACTERS_MAX)]
    port: Annotated[int, Meta(ge=0, le=PORT_ASKED_MAX)]


class EgressShow(Request, frozen=True, tag="egress_show", kw_only=True):
    """What is configured and what has been decided since the daemon started."""


class EgressChecked(Message, frozen=True, tag="egress_checked", kw_only=True):
    """reason: None exactly when it is allowed, else of `sbxd.policy.egress.EgressRefusal`.
    addresses: which would be dialled, empty when it is refused. rule: the destination that covers
    the host, where one does. address, address_range: what was refused and the range that refuses
    it, where an address was the reason. detail, remedy: for people, empty when it is allowed."""

    request_id: RequestIdField
    host: str
    port: int
    reason: str | None
    addresses: tuple[str, ...]
    rule: str | None
    address: str | None
    address_range: str | None
    detail: str
    remedy: str

    def __post_init__(self) -> None:
        if (self.reason is None) is not bool(self.addresses):
            raise ValueError("a reason is given exactly when there is no address to dial")


class EgressCaps(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What bounds the proxy of each environment: `sbxd.settings.EgressSettings`."""

    require_matching_sni: bool
    tunnels_max: int
    connections_waiting_max: int
    head_seconds: int
    resolve_seconds: int
    dial_seconds: int
    idle_seconds: int
    denials_per_second: int


class EgressShown(Message, frozen=True, tag="egress_shown", kw_only=True):
    """policy: the operator's, canonical. host_network: prefixes that are never dialled since they
    are the host's own; empty in mode `deny`, where nothing is dialled. allowed, refused: how many
    connections since the daemon started, the refused ones by reason."""

    request_id: RequestIdField
    policy: EgressPolicy
    caps: EgressCaps
    host_network: tuple[str, ...]
    allowed: int
    refused: dict[str, int]


EgressRequest = EgressCheck | EgressShow
EgressReply = EgressChecked | EgressShown
