"""The host's network at the dial: what the kernel says then counts, for the proxy and the guard.

With real routes in a network namespace (route_scenes.py), and with a kernel that the test writes.
"""

import errno
import json
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sbxd.client import routes as stdlib
from sbxd.egress import netlink
from sbxd.egress.decisions import Outcome
from sbxd.egress.dialling import Dialler
from sbxd.policy.addresses import parse_address
from sbxd.policy.egress import EgressRefusal
from sbxd.policy.routes import (
    Answers,
    Flow,
    HostNetworkUnknown,
    LiveHostNetwork,
    NoWay,
    OnHostNetwork,
    Route,
)
from tests.egress.route_scenes import SCENES
from tests.egress.world import PUBLIC, Server, open_world
from tests.service.guard_parts import GATEWAY, beyond

LINK = Route(kind=1, length=24, hops=(None,))
REFUSED = "denied: host_network"
LATE = [name for name, (_, change) in SCENES.items() if change]
REACHED = ["behind the gateway", "behind the gateway 6"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "tests.egress.route_scenes"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.needs("root")
@pytest.mark.case("EGR-23")
@pytest.mark.parametrize("way", ["proxy", "asyncio", "trio", "blocking"])
def test_only_what_is_behind_a_gateway_at_the_dial_is_reached(
    found: dict[str, Any], way: str
) -> None:
    wanted = dict.fromkeys(SCENES, REFUSED)
    wanted |= dict.fromkeys(REACHED, "reached")
    wanted |= dict.fromkeys(LATE, f"{REFUSED} at the dial")
    assert found[way] == wanted
    assert found["unguarded"] == dict.fromkeys(SCENES, "reached"), "the control"


async def dialled_over(*answers: Route) -> tuple[str, list[Flow]]:
    """What dialling a loopback server comes to, with these answers in turn."""
    left, asked = list(answers), list[Flow]()

    def ask(flow: Flow) -> Answers:
        asked.append(flow)
        route = left.pop(0)
        return Answers(matched=route, taken=route)

    server = Server()
    try:
        (await Dialler(LiveHostNetwork(ask)).dial("127.0.0.1", server.port)).close()
    except OnHostNetwork:
        return "refused", asked
    finally:
        server.sock.close()
    return "connected", asked


async def test_the_kernel_is_asked_before_the_dial_and_for_the_connection_after_it() -> None:
    outcome, (before, after) = await dialled_over(GATEWAY, GATEWAY)
    assert outcome == "connected"
    assert (before.source, before.source_port) == (None, 0)
    assert str(after.source) == "127.0.0.1"
    assert after.source_port > 0
    assert before.destination == after.destination
    assert before.port == after.port


async def test_a_neighbour_before_or_after_the_dial_is_refused() -> None:
    assert (await dialled_over(LINK))[0] == "refused"
    assert (await dialled_over(GATEWAY, LINK))[0] == "refused"


@pytest.mark.case("EGR-23")
@pytest.mark.parametrize(
    ("error", "reason", "status", "outcome"),
    [
        (OnHostNetwork(0, "a link"), EgressRefusal.HOST_NETWORK, 403, Outcome.REFUSED),
        (HostNetworkUnknown(71, "x"), EgressRefusal.HOST_NETWORK_UNKNOWN, 502, Outcome.FAILED),
    ],
)
async def test_what_is_refused_at_the_dial_refuses_all_and_is_recorded(
    error: OSError, reason: EgressRefusal, status: int, outcome: Outcome
) -> None:
    async with open_world() as here:

        async def refuse(address: str, port: int) -> socket.socket:
            raise error

        here.answers = lambda _: (PUBLIC, "8.8.4.4")
        here.reach = refuse
        got, answer = await here.ask()
        assert got == status
        assert PUBLIC.encode() not in answer, "the sandbox does not learn addresses"
        assert here.dials == [(PUBLIC, 443)]
        (decision,) = here.decisions
        assert (decision.reason, decision.outcome) == (reason, outcome)
        assert decision.address == PUBLIC
        here.reach = here.to_server
        async with here.tunnel():
            pass  # the control


@pytest.mark.parametrize("error", [HostNetworkUnknown(71, "netlink is silent"), None])
async def test_a_judgement_without_the_kernels_word_dials_nothing(error: OSError | None) -> None:
    def ask(flow: Flow) -> Answers:
        if error is not None:
            raise error
        return beyond(flow)

    async with open_world() as here:
        object.__setattr__(here.proxy._terms, "host_network", LiveHostNetwork(ask))
        if error is None:
            async with here.tunnel():
                return  # the control
        assert (await here.ask())[0] == 502
        assert here.dials == []
        assert here.reasons == [EgressRefusal.HOST_NETWORK_UNKNOWN]


@pytest.mark.parametrize("module", [stdlib, netlink], ids=["stdlib", "pyroute2"])
def test_no_question_grows_with_the_number_of_routes(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dial asks for one destination, twice; only addresses are ever read as a whole."""
    sent: list[bytes] = []

    class Silent(socket.socket):
        def sendto(self, data: Any, *_: Any) -> int:
            sent.append(bytes(data))
            raise OSError(errno.ENOBUFS, "told to")

    monkeypatch.setattr(module.socket, "socket", Silent)
    with pytest.raises(HostNetworkUnknown):
        module.ask_kernel(Flow(destination=parse_address(PUBLIC), port=443))
    if module is netlink:
        with pytest.raises(netlink.HostNetworkUnreadable):
            netlink.read_prefixes()
    kinds = [struct.unpack_from("=IHH", data)[1:] for data in sent]
    assert kinds == ([(26, 1), (22, 0x301)] if module is netlink else [(26, 1)])


async def test_a_destination_without_a_route_is_not_reached() -> None:
    def ask(_: Flow) -> Answers:
        raise NoWay(errno.ENETUNREACH, "Network is unreachable")

    with pytest.raises(NoWay):
        await Dialler(LiveHostNetwork(ask)).dial("127.0.0.1", 1)
