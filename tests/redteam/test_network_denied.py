"""Without both yeses nothing is reached: the sandbox's own kernel says so, and nobody hears of it.

The destinations answer the host, in the same test: the control.
"""

import json
from collections.abc import Iterator

import pytest

from sbxd.port.egress import DENY_ALL, EgressPolicy
from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.redteam.egress import ALLOWLIST, NO_ROUTE, allowlist, configured, networked

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.network_denied"),
]
TARGETS = (
    (lab.ALLOWED, 443),
    (lab.NAME_SERVER, 53),
    (lab.METADATA, 80),
    (lab.PRIVATE, 443),
)
SOURCE = f"""
import errno, json, os, socket
def direct(address):
    try:
        socket.create_connection(address, 10).close()
    except OSError as problem:
        return errno.errorcode.get(problem.errno, type(problem).__name__)
    return "ok"
def query():
    # A question by UDP, as any resolver asks it.
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(bytes(12), ({lab.NAME_SERVER!r}, 53))
    except OSError as problem:
        return errno.errorcode[problem.errno]
    return "ok"
def lookup(name):
    try:
        socket.getaddrinfo(name, 443)
    except socket.gaierror:
        return "refused"
    return "ok"
with socket.create_server(("127.0.0.1", 0)) as own:
    control = direct(own.getsockname())
print(json.dumps({{
    "control": control,
    "direct": [direct(address) for address in {TARGETS!r}],
    "query": query(),
    "lookup": lookup("files.lab-allowed.com"),
    "proxy": direct(("127.0.0.1", 3128)),
    "variables": sorted(name for name in os.environ if "proxy" in name.lower()),
}}))
"""


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built:
        yield built


@pytest.fixture(scope="module")
def with_destinations(internet: Internet) -> Iterator[None]:
    with configured(allowlist()):
        yield


async def _nothing_is_reached(
    internet: Internet, policy: EgressPolicy, *, network_enabled: bool
) -> None:
    for address in TARGETS:
        assert internet.reaches(*address)
    connections, questions = internet.connections(), internet.questions()
    async with networked(policy) as one:
        result = await one.run("python3", "-c", SOURCE, network_enabled=network_enabled)
        assert result.exit_code == 0, result
        found = json.loads(result.stdout)
        direct = found.pop("direct")
        assert len(direct) == len(TARGETS)
        assert set(direct) <= set(NO_ROUTE)
        assert found == {
            "control": "ok",
            "query": "EPROTONOSUPPORT",
            "lookup": "refused",
            "proxy": "ECONNREFUSED",
            "variables": [],
        }
        kinds = [each["SBX_EVENT"] for each in one.recorded()]
        assert "CommandFinished" in kinds, "the control: what is recorded is found"
        assert one.egress() == []
    assert internet.connections() == connections
    assert internet.questions() == questions


@pytest.mark.case("EGR-01", "EGR-02")
@pytest.mark.parametrize("network_enabled", [False, True], ids=["not asked for", "asked for"])
async def test_without_egress_configuration_nothing_is_reached(
    internet: Internet, network_enabled: bool
) -> None:
    await _nothing_is_reached(internet, DENY_ALL, network_enabled=network_enabled)


@pytest.mark.usefixtures("with_destinations")
@pytest.mark.parametrize(
    ("policy", "network_enabled"),
    [(ALLOWLIST, False), (DENY_ALL, True)],
    ids=["without the command's yes", "without the environment's"],
)
async def test_with_one_yes_of_two_nothing_is_reached_either(
    internet: Internet, policy: EgressPolicy, network_enabled: bool
) -> None:
    await _nothing_is_reached(internet, policy, network_enabled=network_enabled)


@pytest.mark.usefixtures("with_destinations")
async def test_with_both_the_same_program_finds_the_proxy_and_nothing_more(
    internet: Internet,
) -> None:
    async with networked() as one:
        result = await one.run("python3", "-c", SOURCE, network_enabled=True)
        found = json.loads(result.stdout)
        assert found["proxy"] == "ok"
        assert found["variables"] == [
            *("HTTPS_PROXY", "HTTP_PROXY", "NODE_USE_ENV_PROXY", "NO_PROXY"),
            *("http_proxy", "https_proxy", "no_proxy"),
        ]
        assert set(found["direct"]) <= set(NO_ROUTE)
        assert found["lookup"] == "refused"
        again = json.loads((await one.run("python3", "-c", SOURCE)).stdout)
        assert (again["proxy"], again["variables"]) == ("ECONNREFUSED", [])
