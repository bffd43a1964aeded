"""Whether a host and port may be dialled, and at which addresses: one function, two callers.

The sandbox proxy and the worker's outbound guard call `evaluate`; a structural test holds that
nobody else does and that nothing else dials. Order: the host's grammar, the port, the rule, one
resolution, every address. Invariants: nothing is looked up for a request that no rule covers; one
resolution for one evaluation; one refused address refuses all; the addresses of `Allowed` are the
ones that were judged, and the caller dials no other. Library-neutral: the injected resolver is the
only thing awaited. Deliberately absent: dialling, a time limit (the resolver's), a cache.
"""

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct, structs

from sbxd.policy.addresses import (
    AddressMalformed,
    AddressReason,
    OwnNetwork,
    RefusedAddress,
    judge_address,
    parse_address,
)
from sbxd.policy.destinations import (
    PORT_MAX,
    DestinationInvalid,
    canonical_host,
    canonical_requested_host,
    host_covers,
)
from sbxd.policy.routes import OnHostNetwork
from sbxd.port.egress import EgressMode, EgressPolicy

ADDRESSES_MAX = 128
HOST_SHOWN_MAX = 255

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Looks one canonical fully qualified name up, exactly as it is (no search domains), and returns
every address in text. Raises TimeoutError when it took too long and another OSError when it
failed; bounds its own time."""


class EgressRefusal(StrEnum):
    """Why a destination is refused. The first two are malformed requests: nothing was judged."""

    HOST_MALFORMED = "host_malformed"
    PORT_MALFORMED = "port_malformed"
    MODE_DENY = "mode_deny"
    HOST_NOT_LISTED = "host_not_listed"
    PORT_NOT_LISTED = "port_not_listed"
    HOST_NOT_QUALIFIED = "host_not_qualified"
    RESOLUTION_FAILED = "resolution_failed"
    RESOLUTION_TIMED_OUT = "resolution_timed_out"
    NO_ADDRESS = "no_address"
    ADDRESS_MALFORMED = "address_malformed"
    TOO_MANY_ADDRESSES = "too_many_addresses"
    ADDRESS_REFUSED = "address_refused"
    HOST_NETWORK = "host_network"
    HOST_NETWORK_UNKNOWN = "host_network_unknown"
    PAGE_NOT_PUBLIC_HTTPS = "page_not_public_https"
    UNSUBSCRIBE_NOT_PUBLIC_HTTPS = "unsubscribe_not_public_https"


MALFORMED = frozenset({EgressRefusal.HOST_MALFORMED, EgressRefusal.PORT_MALFORMED})
"""Answered as a bad request (400); every other refusal as forbidden (403)."""


class Allowed(Struct, frozen=True, kw_only=True):
    """Dial one of `addresses`, and none else.

    host: canonical. addresses: canonical text, in the resolver's order, each once, at least one.
    rule: the entry that covers it, as "host:port,port".
    """

    host: str
    port: int
    addresses: tuple[str, ...]
    rule: str


class Refused(Struct, frozen=True, kw_only=True):
    """Dial nothing.

    host: canonical, or (HOST_MALFORMED) escaped and cut to 255 characters. rule: the entry that
    covers the host, where one does. address, address_range: what was refused and the row that
    refuses it, for a refusal by address. detail: what is wrong. remedy: what to do about it. Every
    text is one line of printable ASCII.
    """

    reason: EgressRefusal
    host: str
    port: int
    detail: str
    remedy: str
    rule: str | None = None
    address: str | None = None
    address_range: str | None = None


class HostRule(Protocol):
    """A rule of code instead of an operator's list: `sbxd.policy.public_https`."""

    def rule_for(self, host: str, port: int) -> "str | Refused":
        """The rule that covers a canonical host and a port, or the refusal."""
        ...


async def evaluate(
    policy: EgressPolicy | HostRule,
    host: str,
    port: int,
    resolve: Resolve,
    host_network: OwnNetwork,
) -> Allowed | Refused:
    """Judge one destination, with at most one lookup.

    Args:
        policy: what may be reached; an entry that is outside the grammar covers nothing.
        host: as it was requested. port: likewise.
        resolve: see Resolve.
        host_network: what is the host's own; `sbxd.policy.routes.LiveHostNetwork` asks the kernel
            for each address.

    Raises:
        Whatever `resolve` raises besides OSError.

    Cancellation: nothing is left behind.
    """
    matched = match_destination(policy, host, port)
    if isinstance(matched, Refused):
        return matched
    try:
        answers = await resolve(matched.host)
    except TimeoutError:
        return unresolved(matched, EgressRefusal.RESOLUTION_TIMED_OUT, "no answer in time")
    except OSError as error:
        cause = error.strerror or type(error).__name__
        return unresolved(matched, EgressRefusal.RESOLUTION_FAILED, cause)
    return judge_answers(matched, answers, host_network)


class Matched(Struct, frozen=True, kw_only=True):
    """A canonical host and a port that a rule covers; nothing was looked up."""

    host: str
    port: int
    rule: str


def match_destination(policy: EgressPolicy | HostRule, host: str, port: int) -> Matched | Refused:
    """The part of `evaluate` before the lookup."""
    try:
        name = canonical_requested_host(host)
    except DestinationInvalid as invalid:
        return Refused(
            reason=EgressRefusal.HOST_MALFORMED,
            host=shown(host),
            port=port,
            detail=invalid.detail,
            remedy="Give one plain host name in ASCII, without a trailing dot; never an address.",
        )
    if not 1 <= port <= PORT_MAX:
        return Refused(
            reason=EgressRefusal.PORT_MALFORMED,
            host=name,
            port=port,
            detail=f"{port} is not a port (1 to {PORT_MAX})",
            remedy="Give a port from 1 to 65535.",
        )
    if isinstance(policy, EgressPolicy):
        rule = _listed(policy, name, port)
    else:
        rule = policy.rule_for(name, port)
    if isinstance(rule, Refused):
        return rule
    if "." not in name:
        return Refused(
            reason=EgressRefusal.HOST_NOT_QUALIFIED,
            host=name,
            port=port,
            rule=rule,
            detail=f"{name} has one label, and only fully qualified names are looked up",
            remedy="Use the full name of the host, with its domain.",
        )
    return Matched(host=name, port=port, rule=rule)


def _listed(policy: EgressPolicy, name: str, port: int) -> str | Refused:
    if policy.mode is EgressMode.DENY:
        return Refused(
            reason=EgressRefusal.MODE_DENY,
            host=name,
            port=port,
            detail="the policy denies every destination (mode `deny`)",
            remedy="Work without the network, or ask the operator to list this destination.",
        )
    covering = []
    for destination in policy.destinations:
        if host_covers(destination.host.lower(), name) and _is_canonical(destination.host):
            rule = f"{destination.host.lower()}:{','.join(map(str, destination.ports))}"
            if port in destination.ports:
                return rule
            covering.append(rule)
    if covering:
        return Refused(
            reason=EgressRefusal.PORT_NOT_LISTED,
            host=name,
            port=port,
            rule=covering[0],
            detail=f"{name} is listed, but not with port {port}: {' and '.join(covering[:4])}",
            remedy="Use a listed port, or ask the operator to list this one.",
        )
    return Refused(
        reason=EgressRefusal.HOST_NOT_LISTED,
        host=name,
        port=port,
        detail=f"none of the {len(policy.destinations)} listed destinations covers {name}",
        remedy=f"Use a listed destination, or ask the operator to list {name} with port {port}.",
    )


def _is_canonical(host: str) -> bool:
    """Whether an entry is one at all: what is outside the grammar covers nothing."""
    try:
        return canonical_host(host) == host.lower()
    except DestinationInvalid:
        return False


def unresolved(matched: Matched, reason: EgressRefusal, cause: str) -> Refused:
    """The refusal of a name that could not be looked up."""
    return Refused(
        reason=reason,
        host=matched.host,
        port=matched.port,
        rule=matched.rule,
        detail=f"{matched.host} could not be resolved: {shown(cause)}",
        remedy="Check the name; if it is right, try again later.",
    )


def judge_answers(
    matched: Matched, answers: Sequence[str], host_network: OwnNetwork
) -> Allowed | Refused:
    """The part of `evaluate` after the lookup: every address, and the first bad one refuses all."""
    if not answers:
        return unresolved(matched, EgressRefusal.NO_ADDRESS, "it has no address")
    if len(answers) > ADDRESSES_MAX:
        return unresolved(
            matched,
            EgressRefusal.TOO_MANY_ADDRESSES,
            f"{len(answers)} addresses, and the most is {ADDRESSES_MAX}",
        )
    addresses = []
    for answer in answers:
        try:
            judged = judge_address(parse_address(answer), host_network, matched.port)
        except OSError as unknown:
            return _refused_on_host(matched, answer, unknown)
        except AddressMalformed as malformed:
            refused = unresolved(matched, EgressRefusal.ADDRESS_MALFORMED, str(malformed))
            return structs.replace(refused, address=shown(answer))
        if isinstance(judged, RefusedAddress):
            return _refused_address(matched, judged, len(answers))
        addresses.append(str(judged))
    return Allowed(
        host=matched.host,
        port=matched.port,
        addresses=tuple(dict.fromkeys(addresses)),
        rule=matched.rule,
    )


def refused_at_dial(allowed: Allowed, address: str, error: OSError) -> Refused:
    """The refusal of an allowed address that is on the host's network by the time it is dialled.

    error: `OnHostNetwork` or `HostNetworkUnknown` of `sbxd.policy.routes`.
    """
    matched = Matched(host=allowed.host, port=allowed.port, rule=allowed.rule)
    return _refused_on_host(matched, address, error)


def _refused_on_host(matched: Matched, address: str, error: OSError) -> Refused:
    is_known = isinstance(error, OnHostNetwork)
    cause = shown(error.strerror or type(error).__name__)
    return Refused(
        reason=EgressRefusal.HOST_NETWORK if is_known else EgressRefusal.HOST_NETWORK_UNKNOWN,
        host=matched.host,
        port=matched.port,
        rule=matched.rule,
        address=shown(address),
        address_range=cause if is_known else None,
        detail=f"{matched.host} resolves to {shown(address)}: {cause}",
        remedy="No configuration permits this address. Use a service with a public one."
        if is_known
        else "Try again; if it lasts, check that this process may ask the kernel for routes.",
    )


def _refused_address(matched: Matched, refused: RefusedAddress, count: int) -> Refused:
    carried = f", which carries {refused.embedded}" if refused.embedded else ""
    among = f" (one of {count} addresses; one refuses all)" if count > 1 else ""
    detail = f"{matched.host} resolves to {refused.address}{carried}{among}"
    match refused.reason:
        case AddressReason.RANGE:
            reason = EgressRefusal.ADDRESS_REFUSED
            detail += f", in a range that is never dialled: {refused.range_name}"
        case AddressReason.HOST_NETWORK:
            reason = EgressRefusal.HOST_NETWORK
            detail += f", in the host's own network: {refused.range_name}"
    return Refused(
        reason=reason,
        host=matched.host,
        port=matched.port,
        rule=matched.rule,
        address=refused.address,
        address_range=refused.range_name,
        detail=detail,
        remedy="No configuration permits this address. Use a service with a public one.",
    )


def shown(text: str) -> str:
    """Text of unknown origin as one bounded line of printable ASCII."""
    escaped = ascii(text[: HOST_SHOWN_MAX + 1])[1:-1]
    return escaped if len(escaped) <= HOST_SHOWN_MAX else escaped[: HOST_SHOWN_MAX - 3] + "..."
