"""What the tests of the guard stand on: a resolver that counts, and a policy."""

from collections.abc import Sequence

from sbxd.client.guard import Decision, Guard
from sbxd.policy.addresses import HostNetwork, parse_address
from sbxd.policy.routes import Answers, Ask, Flow, Route
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy

NOTHING_MORE = HostNetwork()
GATEWAY = Route(kind=1, length=0, hops=(parse_address("9.9.9.1"),))


def beyond(_: Flow) -> Answers:
    """A kernel to which every destination is behind a gateway."""
    return Answers(matched=GATEWAY, taken=GATEWAY)


POLICY = EgressPolicy(
    mode=EgressMode.ALLOWLIST,
    destinations=(
        EgressDestination(host="a.example.com", ports=(80, 443)),
        EgressDestination(host="*.example.org", ports=(80, 443)),
    ),
)


class Names:
    """Answers from a table; each lookup of a name takes its next answer, the last one stays."""

    def __init__(self, **answers: list[Sequence[str]]) -> None:
        self._answers = {name.replace("_", "."): given for name, given in answers.items()}
        self.asked: list[str] = []

    def resolve_blocking(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        given = self._answers.get(name)
        if given is None:
            raise OSError(-2, "Name or service not known")
        return given.pop(0) if len(given) > 1 else given[0]

    async def resolve(self, name: str) -> Sequence[str]:
        return self.resolve_blocking(name)


def guard_over(
    names: Names,
    *,
    policy: EgressPolicy = POLICY,
    host_network: HostNetwork = NOTHING_MORE,
    ask: Ask = beyond,
    decisions: list[Decision] | None = None,
    connect_seconds: float = 30,
) -> Guard:
    return Guard(
        policy,
        host_network,
        ask=ask,
        resolver=names,
        connect_seconds=connect_seconds,
        on_decision=None if decisions is None else decisions.append,
    )
