"""The operator's questions about the egress boundary, as replies.

Deliberately absent: judging (whoever is asked does it as the proxies do), and changing anything.
"""

from typing import Protocol, assert_never

from msgspec import Struct, structs

from sbxd.policy.egress import Allowed, Refused
from sbxd.policy.network import network_grant
from sbxd.settings import EgressSettings
from sbxd.wire.egress import (
    EgressCaps,
    EgressCheck,
    EgressChecked,
    EgressReply,
    EgressRequest,
    EgressShow,
    EgressShown,
)


class EgressState(Struct, frozen=True, kw_only=True):
    """host_network: the host's own prefixes. allowed, refused: connections since the start, the
    refused ones by reason."""

    host_network: tuple[str, ...]
    allowed: int
    refused: dict[str, int]


class OperatorEgress(Protocol):
    """What the daemon's proxies tell an operator."""

    async def check(self, host: str, port: int) -> Allowed | Refused:
        """How a connection to this destination would be judged now, with one lookup at most.

        Cancellation: the lookup is given up.
        """
        ...

    def state(self) -> EgressState:
        """What there is, and what was decided."""
        ...


async def answer(
    request: EgressRequest, settings: EgressSettings, egress: OperatorEgress
) -> EgressReply:
    """The reply to one question."""
    match request:
        case EgressCheck():
            return checked(request.request_id, await egress.check(request.host, request.port))
        case EgressShow():
            state = egress.state()
            caps = {name: getattr(settings, name) for name in EgressCaps.__struct_fields__}
            return EgressShown(
                request_id=request.request_id,
                policy=network_grant(settings),
                caps=EgressCaps(**caps),
                host_network=state.host_network,
                allowed=state.allowed,
                refused=state.refused,
            )
        case _:
            assert_never(request)


def checked(request_id: int, judged: Allowed | Refused) -> EgressChecked:
    """A judgement as a reply."""
    if isinstance(judged, Allowed):
        return EgressChecked(
            request_id=request_id,
            host=judged.host,
            port=judged.port,
            reason=None,
            addresses=judged.addresses,
            rule=judged.rule,
            address=None,
            address_range=None,
            detail="",
            remedy="",
        )
    told = {**structs.asdict(judged), "reason": judged.reason.value}
    return EgressChecked(request_id=request_id, addresses=(), **told)
