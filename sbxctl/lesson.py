"""From refused connections to the smallest list that would have allowed them, to be judged.

Invariants: pure; only a name that a rule did not cover is suggested, never one that was malformed,
an address, or refused for an address that it resolved to (with any port); names are exact, and a
wildcard is only ever an alternative, beside at least SIBLINGS_MIN names that it would replace;
every suggestion is inside the grammar of the configuration.

A program chose these names: a name can carry data, and asking for it is how a program would try to
get it listed.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from sbxd.policy.destinations import (
    PORT_MAX,
    DestinationInvalid,
    canonical_destination,
    uncovered_ports,
)
from sbxd.policy.egress import EgressRefusal
from sbxd.port.egress import EgressDestination

SIBLINGS_MIN = 3
PORTS_MAX = 64  # of one destination
RUNS_SHOWN_MAX = 8
# RFC 2606: names that nobody has.
_NOBODYS = (".invalid",)
_NOT_COVERED = frozenset(
    {
        EgressRefusal.MODE_DENY,
        EgressRefusal.HOST_NOT_LISTED,
        EgressRefusal.PORT_NOT_LISTED,
    }
)
_BY_ADDRESS = frozenset(
    {
        EgressRefusal.ADDRESS_MALFORMED,
        EgressRefusal.ADDRESS_REFUSED,
        EgressRefusal.HOST_NETWORK,
        EgressRefusal.HOST_NETWORK_UNKNOWN,
    }
)


class Denial(Struct, frozen=True, kw_only=True):
    """One recorded refusal. host, port: None when the request was not read that far."""

    reason: str
    host: str | None
    port: int | None
    run_id: str


class Suggestion(Struct, frozen=True, kw_only=True):
    """One destination. asked: how often. runs: which runs did, some of them."""

    host: str
    ports: tuple[int, ...]
    asked: int
    runs: tuple[str, ...]


class Wildcard(Struct, frozen=True, kw_only=True):
    """An alternative for the names, and for every other name of one more label."""

    host: str
    ports: tuple[int, ...]
    names: tuple[str, ...]


class Never(Struct, frozen=True, kw_only=True):
    """What is not suggested, and why: the reason of the refusal."""

    host: str | None
    port: int | None
    reason: str
    asked: int


class Lesson(Struct, frozen=True, kw_only=True):
    """suggestions: would have been needed besides the list. listed: the list covers them, and the
    environment's specification did not carry them. not_recorded: refusals that were only counted,
    so that what they asked for is not known."""

    suggestions: tuple[Suggestion, ...]
    wildcards: tuple[Wildcard, ...]
    listed: tuple[Suggestion, ...]
    never: tuple[Never, ...]
    not_recorded: int


def lesson(
    denials: Iterable[Denial],
    configured: Sequence[EgressDestination],
    *,
    not_recorded: int = 0,
) -> Lesson:
    """What the denials would have needed. configured: the operator's list, canonical."""
    asked: dict[tuple[str, int], list[str]] = defaultdict(list)
    never: Counter[tuple[str | None, int | None, str]] = Counter()
    by_address = set()
    for denial in denials:
        host, port = denial.host, denial.port
        if denial.reason in _BY_ADDRESS:
            by_address.add(host)
        if denial.reason in _NOT_COVERED and host is not None and _can_be_listed(host, port):
            assert port is not None
            asked[host, port].append(denial.run_id)
        else:
            never[host, port, denial.reason] += 1
    needed: dict[str, dict[int, list[str]]] = defaultdict(dict)
    covered: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for (host, port), runs in asked.items():
        if host in by_address:
            never[host, port, EgressRefusal.ADDRESS_REFUSED.value] += len(runs)
        elif uncovered_ports(EgressDestination(host=host, ports=(port,)), configured):
            needed[host][port] = runs
        else:
            covered[host][port] = runs
    return Lesson(
        suggestions=_suggestions(needed),
        wildcards=_wildcards(needed),
        listed=_suggestions(covered),
        never=tuple(
            Never(host=host, port=port, reason=reason, asked=count)
            for (host, port, reason), count in sorted(never.items(), key=_of_never)
        ),
        not_recorded=not_recorded,
    )


def _of_never(item: tuple[tuple[str | None, int | None, str], int]) -> tuple[str, str, int]:
    (host, port, reason), _ = item
    return reason, host or "", port or 0


def _can_be_listed(host: str, port: int | None) -> bool:
    """Whether an operator could write it into the list."""
    if port is None or not 1 <= port <= PORT_MAX or host.endswith(_NOBODYS) or "*" in host:
        return False
    try:
        return canonical_destination(EgressDestination(host=host, ports=(port,))).host == host
    except DestinationInvalid:
        return False


def _suggestions(found: Mapping[str, Mapping[int, Sequence[str]]]) -> tuple[Suggestion, ...]:
    made = []
    for host in sorted(found):
        ports = sorted(found[host])
        for at in range(0, len(ports), PORTS_MAX):
            some = ports[at : at + PORTS_MAX]
            runs = [run for port in some for run in found[host][port]]
            made.append(
                Suggestion(
                    host=host,
                    ports=tuple(some),
                    asked=len(runs),
                    runs=tuple(sorted(set(runs))[:RUNS_SHOWN_MAX]),
                )
            )
    return tuple(made)


def _wildcards(found: Mapping[str, Mapping[int, Sequence[str]]]) -> tuple[Wildcard, ...]:
    """For each name that enough others stand below of, with the ports that all of them share."""
    siblings: dict[tuple[str, int], set[str]] = defaultdict(set)
    for host, ports in found.items():
        parent = host.partition(".")[2]
        if "." in parent:  # never a whole top-level domain
            for port in ports:
                siblings[parent, port].add(host)
    ports_of: dict[tuple[str, tuple[str, ...]], set[int]] = defaultdict(set)
    for (parent, port), names in siblings.items():
        if len(names) >= SIBLINGS_MIN:
            ports_of[parent, tuple(sorted(names))].add(port)
    return tuple(
        Wildcard(host=f"*.{parent}", ports=tuple(sorted(ports))[:PORTS_MAX], names=names)
        for (parent, names), ports in sorted(ports_of.items())
    )


# --- as configuration -------------------------------------------------------------------------


def as_toml(learned: Lesson, configured: Sequence[EgressDestination]) -> str:
    """The two keys of [egress] with the list as it is and what is suggested, for pasting over them;
    alternatives and counts are comments. Holds nothing that is outside the grammar."""
    lines = ["[egress]", 'mode = "allowlist"', "destinations = ["]
    lines += [f"    {_entry(each.host, each.ports)}," for each in configured]
    if learned.suggestions:
        lines.append("    # Asked for and refused. Judge each: a program chose these names.")
    for each in learned.suggestions:
        asked = f"{each.asked} time{'' if each.asked == 1 else 's'}"
        lines.append(f"    {_entry(each.host, each.ports)},  # {asked}")
    for wildcard in learned.wildcards:
        lines.append(f"    # Instead of {len(wildcard.names)} names, for all like them:")
        lines.append(f"    # {_entry(wildcard.host, wildcard.ports)},")
    lines.append("]")
    return "\n".join(lines) + "\n"


def _entry(host: str, ports: tuple[int, ...]) -> str:
    # A string of JSON in ASCII is one of TOML.
    return f"{{ host = {json.dumps(host)}, ports = [{', '.join(map(str, ports))}] }}"
