"""The proxies as the lifecycle's network: records become events of their command, ends hold."""

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trio

from sbxd.audit.egress_events import EgressRefused
from sbxd.audit.sink import MemorySink
from sbxd.egress.host_network import HostNetworkUnreadable
from sbxd.lifecycle.network import NetworkUse
from sbxd.mechanism.protocol import MechanismError
from sbxd.policy.budgets import Budget, overrun
from sbxd.port.egress import EgressDestination, EgressMode
from sbxd.port.errors import BudgetExhausted
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.proxies import EnvironmentProxy, Proxies, open_proxies
from sbxd.settings import EgressSettings
from tests.egress.world import bound as a_bound_socket

SETTINGS = EgressSettings(
    mode=EgressMode.ALLOWLIST,
    destinations=(EgressDestination(host="listed.example", ports=(443,)),),
)
REQUEST = b"CONNECT not-listed.example:443 HTTP/1.1\r\nHost: x\r\n\r\n"


def free() -> None:
    """A charge that costs nothing."""


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with a_bound_socket() as end:
        yield end


def use(bound: socket.socket, **changes: object) -> NetworkUse:
    given: dict[str, object] = {
        "environment_id": EnvironmentId("e" * 32),
        "owner_uid": 1000,
        "tenant_id": TenantId("tenant"),
        "run_id": RunId("run"),
        "lease_epoch": 3,
        "policy": SETTINGS,
        "listener": bound.fileno(),
        "charge": free,
    }
    return NetworkUse(**{**given, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def proxies() -> AsyncIterator[tuple[Proxies, MemorySink]]:
    sink = MemorySink()
    with trio.fail_after(60):
        async with open_proxies(SETTINGS, sink) as opened:
            yield opened, sink


async def ask(bound: socket.socket) -> bytes:
    """The answer to one request; raises OSError when nothing listens."""
    async with await trio.open_tcp_stream(*bound.getsockname()) as stream:
        await stream.send_all(REQUEST)
        return b"".join([piece async for piece in stream])


async def test_a_refusal_is_an_event_of_the_command_that_it_is_of(bound: socket.socket) -> None:
    async with proxies() as (opened, sink):
        network = opened.of_environment(use(bound))
        for number in (2, 5):
            await network.begin(number)
            assert b" 403 " in await ask(bound)
            await network.end()
        first, second = sink.of(EgressRefused)
        assert (first.command_number, second.command_number) == (2, 5)
        assert (first.tenant_id, first.run_id, first.lease_epoch) == ("tenant", "run", 3)
        assert (first.host, first.port, first.reason) == (
            "not-listed.example", 443, "host_not_listed",
        )  # fmt: skip
        assert (first.connection, second.connection) == (1, 2)
        assert opened.counts.refusals.total() == 2
        await network.close()


async def test_nothing_listens_before_it_begins_and_after_it_has_ended(
    bound: socket.socket,
) -> None:
    async with proxies() as (opened, _):
        network = opened.of_environment(use(bound))
        for _ in range(2):
            with pytest.raises(OSError, match="connect"):
                await ask(bound)
            await network.begin(1)
            assert await ask(bound)
            await network.end()
            await network.end()
        with pytest.raises(OSError, match="connect"):
            await ask(bound)
        await network.close()
        await network.close()


async def test_an_end_without_a_beginning_and_a_close_are_nothing(bound: socket.socket) -> None:
    async with proxies() as (opened, _):
        network = opened.of_environment(use(bound))
        await network.end()
        await network.close()
        await network.settle()
        assert os.fstat(bound.fileno()), "the caller's descriptor is the caller's"


async def test_an_end_that_is_cancelled_goes_on(bound: socket.socket) -> None:
    async with proxies() as (opened, _):
        network = opened.of_environment(use(bound))
        await network.begin(1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await network.end()
        assert scope.cancelled_caught
        await network.end()
        with pytest.raises(OSError, match="connect"):
            await ask(bound)
        await network.close()


async def test_what_the_audit_does_not_take_is_refused_and_the_count_is_kept(
    bound: socket.socket,
) -> None:
    async with proxies() as (opened, sink):
        network = opened.of_environment(use(bound))
        await network.begin(1)
        sink.fail()
        assert b" 403 " in await ask(bound)
        await network.end()
        with pytest.raises(MechanismError):
            await network.begin(2)
        sink.recover()
        await network.begin(2)
        await network.end()
        (counted,) = [each for each in sink.events if type(each).__name__.endswith("Counted")]
        assert "host_not_listed=1" in str(counted)
        assert "command_number=1" in str(counted), "it is the first command's"
        await network.close()


async def test_a_charge_that_is_refused_is_answered_as_such(bound: socket.socket) -> None:
    def spent() -> None:
        raise overrun(Budget.OPERATIONS)

    with pytest.raises(BudgetExhausted):
        spent()
    async with proxies() as (opened, sink):
        network = opened.of_environment(use(bound, charge=spent))
        await network.begin(1)
        assert b"budget_exhausted" in await ask(bound)
        await network.close()
        assert [each.reason for each in sink.of(EgressRefused)] == ["budget_exhausted"]


async def test_a_socket_that_is_not_to_be_used_is_a_failure_of_the_mechanism() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        async with proxies() as (opened, _):
            with pytest.raises(MechanismError):
                opened.of_environment(use(listening))
            with pytest.raises(MechanismError):
                opened.of_environment(use(listening, listener=10_000))


async def test_the_posture_says_what_the_operator_allows_and_what_the_host_is() -> None:
    async with proxies() as (opened, _):
        egress, host_network = opened.posture()
        assert egress.detail == "mode allowlist, destinations listed: 1"
        assert "127.0.0.0/8" in host_network.detail
    async with open_proxies(EgressSettings(), MemorySink()) as opened:
        (egress,) = opened.posture()
        assert egress.detail == "mode deny: no sandbox has a proxy"


async def test_a_host_network_that_cannot_be_read_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable() -> frozenset[str]:
        raise HostNetworkUnreadable("told to")

    monkeypatch.setattr("sbxd.egress.netlink.read_prefixes", unreadable)
    with pytest.raises(HostNetworkUnreadable):
        async with open_proxies(SETTINGS, MemorySink()):
            pass
    async with open_proxies(EgressSettings(), MemorySink()):
        pass  # nothing is listed, so nothing can lead there


def test_a_proxy_is_what_the_lifecycle_asks_for() -> None:
    assert {"begin", "end", "close", "settle"} <= set(dir(EnvironmentProxy))
