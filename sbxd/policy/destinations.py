"""The grammar of egress destinations, and which of them an operator's list covers.

Invariants: pure; names only, never an address, a scheme or a default port; a wildcard is exactly
one leftmost label; a name has one canonical form (lower case, no trailing dot) and every
comparison is between canonical forms. Deliberately absent: resolving a name and judging an
address.
"""

import re
from collections.abc import Iterable

from msgspec import Struct, structs

from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy

NAME_CHARACTERS_MAX = 253
PORT_MAX = 65535
_PORT = re.compile(r"[1-9][0-9]{0,4}")

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
# What some resolvers read as a number, and hence the whole name as an address.
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_WILDCARD = "*."


class DestinationInvalid(ValueError):
    """A destination outside the grammar. `part` is "host" or "ports"; text says what to write."""

    def __init__(self, part: str, detail: str) -> None:
        super().__init__(f"{part}: {detail}")
        self.part = part
        self.detail = detail


class DestinationProblem(Struct, frozen=True, kw_only=True):
    """One destination of a policy that is outside the grammar, by its position (from 0)."""

    position: int
    part: str
    detail: str


def canonical_host(host: str) -> str:
    """The canonical form of a destination's host: lower case, "*." kept.

    Raises:
        DestinationInvalid: not ASCII letters, digits and hyphens in labels of 1 to 63; longer
            than 253; a wildcard that is not the whole leftmost label or has nothing after it; a
            trailing dot; an address, or a name whose last label a resolver reads as a number.
    """
    if not host.isascii():
        raise DestinationInvalid("host", f"{host!a} is not ASCII: write the xn-- form of the name")
    name = host.lower()
    for mark, meaning in (("://", "a scheme"), ("/", "a path"), ("@", "user information")):
        if mark in name:
            raise DestinationInvalid("host", f"{host!a} holds {meaning}: give the name alone")
    if ":" in name or name.startswith("["):
        raise DestinationInvalid(
            "host", f"{host!a} is an address or carries a port: give a name, and ports separately"
        )
    if name.endswith("."):
        raise DestinationInvalid("host", f"{host!a} ends in a dot: remove it")
    bare = name.removeprefix(_WILDCARD)
    if "*" in bare:
        raise DestinationInvalid(
            "host", f"{host!a}: a wildcard is the whole leftmost label and nothing else (*.name)"
        )
    if len(name) > NAME_CHARACTERS_MAX:
        raise DestinationInvalid(
            "host", f"{len(name)} characters, and the most is {NAME_CHARACTERS_MAX}"
        )
    labels = bare.split(".")
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise DestinationInvalid(
                "host",
                f"{host!a}: {label!a} is not a label of 1 to 63 letters, digits and inner hyphens",
            )
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        raise DestinationInvalid(
            "host", f"{host!a} is an address or reads like one: only names can be listed"
        )
    return name


def canonical_requested_host(host: str) -> str:
    """The canonical form of a host that somebody wants to reach: the same grammar, no wildcard.

    Raises:
        DestinationInvalid: as `canonical_host`, with text that is bounded; or a wildcard.
    """
    if len(host) > NAME_CHARACTERS_MAX:
        raise DestinationInvalid(
            "host", f"{len(host)} characters, and the most is {NAME_CHARACTERS_MAX}"
        )
    name = canonical_host(host)
    if name.startswith(_WILDCARD):
        raise DestinationInvalid("host", f"{host!a} is a wildcard: name one host")
    return name


def canonical_destination(destination: EgressDestination) -> EgressDestination:
    """The destination with its canonical host and its ports sorted, each once.

    Raises:
        DestinationInvalid: the host is outside the grammar, is a single label (never looked up) or
            a wildcard above one (a whole top-level domain); the ports are none or out of range.
    """
    host = canonical_host(destination.host)
    if "." not in host.removeprefix(_WILDCARD):
        raise DestinationInvalid(
            "host",
            f"{destination.host!a} covers a whole top-level domain: list the domains"
            if host.startswith(_WILDCARD)
            else f"{destination.host!a} is a single label: write the full name, with its domain",
        )
    if not destination.ports:
        raise DestinationInvalid("ports", "no port: there is no default, list each one")
    for port in destination.ports:
        if not 1 <= port <= PORT_MAX:
            raise DestinationInvalid("ports", f"{port} is not a port (1 to {PORT_MAX})")
    return EgressDestination(host=host, ports=tuple(sorted(set(destination.ports))))


def canonical_policy(policy: EgressPolicy) -> EgressPolicy:
    """The policy with every destination in canonical form.

    Raises:
        DestinationInvalid: for the first destination that is outside the grammar.
    """
    return structs.replace(
        policy,
        destinations=tuple(canonical_destination(each) for each in policy.destinations),
    )


def policy_problems(policy: EgressPolicy) -> tuple[DestinationProblem, ...]:
    """Every destination of a policy that is outside the grammar; empty when all are fine."""
    problems = []
    for position, destination in enumerate(policy.destinations):
        try:
            canonical_destination(destination)
        except DestinationInvalid as invalid:
            problems.append(
                DestinationProblem(position=position, part=invalid.part, detail=invalid.detail)
            )
    return tuple(problems)


def host_covers(configured: str, requested: str) -> bool:
    """Whether one canonical configured host covers a canonical requested one.

    The same name or the same wildcard does; a wildcard covers a name with exactly one label more
    than what follows the wildcard, and no other.
    """
    if configured == requested:
        return True
    if not configured.startswith(_WILDCARD) or requested.startswith(_WILDCARD):
        return False
    _, separator, parent = requested.partition(".")
    return bool(separator) and parent == configured.removeprefix(_WILDCARD)


def parse_port(text: str) -> int | None:
    """A port as it is written in a request: 1 to 65535 in ASCII digits, without a leading zero.
    None for anything else."""
    return int(text) if _PORT.fullmatch(text) and int(text) <= PORT_MAX else None


def uncovered_ports(
    requested: EgressDestination, configured: Iterable[EgressDestination]
) -> tuple[int, ...]:
    """The ports of a canonical destination that no canonical configured destination covers."""
    covered = {
        port
        for destination in configured
        if host_covers(destination.host, requested.host)
        for port in destination.ports
    }
    return tuple(port for port in requested.ports if port not in covered)


def configured_destinations(policy: EgressPolicy) -> tuple[EgressDestination, ...]:
    """What the operator allows, canonical; nothing under mode `deny`.

    Raises:
        DestinationInvalid: the policy has not passed the startup checks.
    """
    match policy.mode:
        case EgressMode.DENY:
            return ()
        case EgressMode.ALLOWLIST:
            return canonical_policy(policy).destinations
