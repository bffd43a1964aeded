"""The worker's guard without a network: what it refuses, tells and dials, under both loops and for
threads. What it does on a network: test_guard_dials.py."""

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute

from sbxd.client.guard import Decision, EgressDenied, Guard, PeerDiffers
from sbxd.policy.addresses import HostNetwork
from sbxd.policy.egress import Allowed, EgressRefusal
from sbxd.policy.public_https import UNSUBSCRIBE
from sbxd.port.egress import DENY_ALL, EgressDestination, EgressMode, EgressPolicy
from tests.service.guard_parts import POLICY, Names, beyond, guard_over

LOCAL = "9.9.9.2"


class Dialled:
    """Takes the place of both ways to dial. answers: addresses that accept; the peer that each
    shows instead of itself, if another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **peers: str) -> None:
        self.peers = {key.replace("_", ".").lstrip("a"): value for key, value in peers.items()}
        self.dialled: list[tuple[str, int]] = []
        self.closed = 0
        monkeypatch.setattr(anyio, "connect_tcp", self.connect_tcp)
        monkeypatch.setattr(socket, "create_connection", self.create_connection)

    def _peer(self, address: str, port: int) -> str:
        self.dialled.append((address, port))
        if address not in self.peers:
            raise ConnectionRefusedError(111, "Connection refused")
        return self.peers[address]

    def _close(self) -> None:
        self.closed += 1

    async def _aclose(self) -> None:
        self.closed += 1

    async def connect_tcp(self, address: str, port: int) -> Any:
        peer = self._peer(address, port)
        return SimpleNamespace(
            extra_attributes={
                SocketAttribute.remote_address: lambda: (peer, port),
                SocketAttribute.local_address: lambda: (LOCAL, 40_000),
            },
            aclose=self._aclose,
        )

    def create_connection(self, address: tuple[str, int], timeout: float) -> Any:
        peer = self._peer(*address)
        assert 0 < timeout <= 30
        return SimpleNamespace(
            getpeername=lambda: (peer, address[1]),
            getsockname=lambda: (LOCAL, 40_000),
            settimeout=lambda _: None,
            close=self._close,
        )


Way = Callable[[Guard, str, int], Any]


@pytest.fixture(params=["asyncio", "trio", "blocking"])
def connect(request: pytest.FixtureRequest) -> Way:
    def run(guard: Guard, host: str, port: int) -> Any:
        if request.param == "blocking":
            return guard.connect_blocking(host, port)
        return anyio.run(guard.connect, host, port, backend=request.param)

    return run


def test_the_checked_address_is_dialled_after_one_lookup(
    connect: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(a_example_com=[["8.8.8.8"], ["127.0.0.1"]])  # whoever asks again sees loopback
    network = Dialled(monkeypatch, a8_8_8_8="8.8.8.8")
    decisions: list[Decision] = []
    connect(guard_over(names, decisions=decisions), "A.Example.com", 443)
    assert network.dialled == [("8.8.8.8", 443)]
    assert names.asked == ["a.example.com"]
    assert [type(each) for each in decisions] == [Allowed]
    assert network.closed == 0


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("b.example.com", 443, EgressRefusal.HOST_NOT_LISTED),
        ("a.example.com", 22, EgressRefusal.PORT_NOT_LISTED),
        ("127.0.0.1", 443, EgressRefusal.HOST_MALFORMED),
        ("inside.example.org", 443, EgressRefusal.ADDRESS_REFUSED),
        ("mixed.example.org", 443, EgressRefusal.ADDRESS_REFUSED),
        ("unknown.example.org", 443, EgressRefusal.RESOLUTION_FAILED),
    ],
)
def test_a_refused_destination_is_told_and_not_dialled(
    connect: Way, monkeypatch: pytest.MonkeyPatch, host: str, port: int, reason: EgressRefusal
) -> None:
    names = Names(
        inside_example_org=[["169.254.169.254"]],
        mixed_example_org=[["8.8.8.8", "::ffff:10.0.0.1"]],
    )
    network = Dialled(monkeypatch, a8_8_8_8="8.8.8.8")
    decisions: list[Decision] = []
    with pytest.raises(EgressDenied) as denied:
        connect(guard_over(names, decisions=decisions), host, port)
    assert denied.value.refused.reason is reason
    assert denied.value.refused.remedy in str(denied.value)
    assert decisions == [denied.value.refused]
    assert network.dialled == []


def test_the_hosts_own_network_is_not_dialled(
    connect: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(a_example_com=[["8.8.8.8"]])
    network = Dialled(monkeypatch, a8_8_8_8="8.8.8.8")
    with pytest.raises(EgressDenied) as denied:
        connect(
            guard_over(names, host_network=HostNetwork.of(["8.8.8.1/24"])), "a.example.com", 443
        )
    assert denied.value.refused.reason is EgressRefusal.HOST_NETWORK
    assert network.dialled == []


def test_the_next_address_is_tried_and_never_a_new_lookup(
    connect: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(a_example_com=[["8.8.8.8", "8.8.4.4"], ["127.0.0.1"]])
    network = Dialled(monkeypatch, a8_8_4_4="8.8.4.4")
    connect(guard_over(names), "a.example.com", 80)
    assert network.dialled == [("8.8.8.8", 80), ("8.8.4.4", 80)]
    assert names.asked == ["a.example.com"]


def test_when_no_address_answers_it_is_an_os_error(
    connect: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(a_example_com=[["8.8.8.8"]])
    network = Dialled(monkeypatch)
    with pytest.raises(ConnectionError, match="Connection refused"):
        connect(guard_over(names), "a.example.com", 80)
    assert len(network.dialled) == 1


@pytest.mark.case("EGR-07")
def test_a_peer_that_is_another_address_is_closed(
    connect: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(a_example_com=[["8.8.8.8"]])
    network = Dialled(monkeypatch, a8_8_8_8="127.0.0.1")
    with pytest.raises(PeerDiffers):
        connect(guard_over(names), "a.example.com", 80)
    assert network.closed == 1


def test_addresses_share_one_time_limit(connect: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(a_example_com=[["8.8.8.8"]])
    network = Dialled(monkeypatch, a8_8_8_8="8.8.8.8")

    async def silent(address: str, port: int) -> Any:
        await anyio.sleep_forever()

    monkeypatch.setattr(anyio, "connect_tcp", silent)
    with pytest.raises(TimeoutError):
        connect(guard_over(names, connect_seconds=-1), "a.example.com", 80)
    assert network.dialled == []


def test_a_rule_of_code_guards_too(connect: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(anything_example_net=[["8.8.8.8"]])
    network = Dialled(monkeypatch, a8_8_8_8="8.8.8.8")
    guard = Guard(UNSUBSCRIBE, resolver=names, ask=beyond)
    connect(guard, "anything.example.net", 443)
    assert network.dialled == [("8.8.8.8", 443)]
    with pytest.raises(EgressDenied) as denied:
        connect(guard, "anything.example.net", 80)
    assert denied.value.refused.reason is EgressRefusal.UNSUBSCRIBE_NOT_PUBLIC_HTTPS


@pytest.mark.case("EGR-05")
def test_a_policy_with_an_entry_outside_the_grammar_makes_no_guard() -> None:
    bad = EgressPolicy(
        mode=EgressMode.ALLOWLIST,
        destinations=(
            *POLICY.destinations,
            EgressDestination(host="10.0.0.1", ports=(443,)),
            EgressDestination(host="*.com", ports=(443,)),
        ),
    )
    with pytest.raises(ValueError, match=r"destinations\[2\]\.host: .*destinations\[3\]\.host: "):
        Guard(bad)


def test_without_a_listed_destination_nothing_is_reached(connect: Way) -> None:
    names = Names(a_example_com=[["8.8.8.8"]])
    with pytest.raises(EgressDenied) as denied:
        connect(guard_over(names, policy=DENY_ALL), "a.example.com", 443)
    assert denied.value.refused.reason is EgressRefusal.MODE_DENY
    assert names.asked == []


def test_a_blocking_check_is_the_same_check() -> None:
    guard = guard_over(Names(a_example_com=[["8.8.8.8"]]))
    blocking = guard.check_blocking("a.example.com", 443)
    assert blocking == anyio.run(guard.check, "a.example.com", 443)
    assert blocking.addresses == ("8.8.8.8",)
