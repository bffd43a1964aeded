"""What the kernel's route to one destination says about it: the host's own, a neighbour, or beyond.

An adapter asks the kernel twice (RTM_GETROUTE for the very destination): for the entry of the
routing table that matches, with every next hop that it may use, and for the route that is taken.
This module judges the answers. There are two adapters: `sbxd.egress.netlink` in the daemon and
`sbxd.client.routes` in a worker.

Invariants: pure; nothing is remembered from one question to the next; a destination is beyond the
host's links only when every next hop that may be used is a gateway other than the destination
itself; an answer that is missing or unknown is never "beyond".

A route without a gateway whose prefix is shorter than LENGTH_MIN is a way out and not a link: a
tunnel that takes all traffic.
"""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from sbxd.policy.addresses import Address, HostNetwork, Prefix

LENGTH_MIN: Final = {4: 8, 6: 16}
UNICAST: Final = 1
# rtnetlink(7): rtm_type. What is neither of these nor UNICAST is refused by its number.
_KINDS: Final = {2: "local", 3: "broadcast", 4: "anycast", 5: "multicast"}


class HostNetworkUnknown(OSError):
    """The kernel did not say where a destination is. It is not dialled."""


class NoWay(OSError):
    """The kernel has no route to a destination: connecting would fail as well."""


class OnHostNetwork(OSError):
    """A destination is the host's own address, or a neighbour on one of its links."""


class Flow(Struct, frozen=True, kw_only=True):
    """Which connection a question is about.

    port: of the destination. source, source_port: of a connection that is there, else None and 0.
    """

    destination: Address
    port: int
    source: Address | None = None
    source_port: int = 0


class Route(Struct, frozen=True, kw_only=True):
    """One answer of the kernel.

    kind: rtm_type. length: of the prefix that matches, in bits. hops: the gateway of each next hop,
    None for one without a gateway; empty where the answer names no next hop at all.
    """

    kind: int
    length: int
    hops: tuple[Address | None, ...]


class Answers(Struct, frozen=True, kw_only=True):
    """What the kernel says of a flow. matched: the entry of the table. taken: the route."""

    matched: Route
    taken: Route


Ask = Callable[[Flow], Answers]
"""Asks the kernel now, without waiting. Raises NoWay, HostNetworkUnknown."""


class LiveHostNetwork:
    """The host's network as the kernel has it at each question.

    ask: an adapter. known: what is refused besides: the prefixes on the host's links, as far as
    they were heard of, and what an operator adds.
    """

    def __init__(self, ask: Ask, known: Callable[[], HostNetwork] = HostNetwork) -> None:
        self._ask = ask
        self._known = known

    def range_of(self, address: Address, port: int) -> str | None:
        """As `sbxd.policy.addresses.OwnNetwork`. A destination without a route is not the host's
        own; `require` refuses it."""
        known = self._known().range_of(address, port)
        if known is not None:
            return known
        if address.version == 6 and address.value >> 32 == 0xFFFF:
            return None  # the kernel dials the IPv4 address, which is asked for by itself
        try:
            return judge_route(address, self._ask(Flow(destination=address, port=port)))
        except NoWay:
            return None

    def require(self, flow: Flow) -> None:
        """Refuse a flow that does not lead beyond the host's links.

        Raises: OnHostNetwork; NoWay; HostNetworkUnknown.
        """
        known = self._known().range_of(flow.destination, flow.port)
        found = judge_route(flow.destination, self._ask(flow)) if known is None else known
        if found is not None:
            raise OnHostNetwork(0, f"in the host's own network: {found}")


def judge_route(destination: Address, answers: Answers) -> str | None:
    """Why a destination is the host's own or a neighbour; None when it is beyond a gateway."""
    matched, taken = answers.matched, answers.taken
    for route in (taken, matched):
        if route.kind != UNICAST:
            return f"{_KINDS.get(route.kind, f'type {route.kind}')} route"
    is_way_out = matched.length < LENGTH_MIN[destination.version]
    # A next hop object may name no next hop in the table's entry; the route that is taken does.
    for hop in (*matched.hops, *(taken.hops or (None,))):
        if hop == destination:
            return "the destination is the gateway itself"
        if hop is None and not is_way_out:
            return f"route without a gateway ({_prefix(destination, matched.length)})"
    return None


def _prefix(destination: Address, length: int) -> Prefix:
    bits = 32 if destination.version == 4 else 128
    shift = bits - min(length, bits)
    return Prefix(destination.version, destination.value >> shift << shift, bits - shift)
