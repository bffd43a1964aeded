"""The host's own network: what is read of the kernel, what is left out, that it only grows."""

import socket
import struct

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from sbxd.egress.host_network import (
    HostNetworkWatch,
    addresses_of,
    read_prefixes,
    routes_of,
)
from tests.pacing import next_look

NEW_ADDRESS, NEW_ROUTE = 20, 24
UNICAST, LOCAL, BLACKHOLE = 1, 2, 6
DST, GATEWAY, TABLE = 1, 5, 15
ADDRESS, IFA_LOCAL = 1, 2


def attribute(kind: int, raw: bytes) -> bytes:
    size = 4 + len(raw)
    return struct.pack("=HH", size, kind) + raw + bytes(-size % 4)


def packed(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)


def address(family: int, length: int, **found: str) -> tuple[int, bytes]:
    kinds = {"address": ADDRESS, "local": IFA_LOCAL}
    rest = b"".join(attribute(kinds[name], packed(text)) for name, text in found.items())
    return NEW_ADDRESS, struct.pack("=BBBBi", family, length, 0, 0, 1) + rest


def route(
    to: str, length: int, kind: int = UNICAST, *, gateway: str | None = None
) -> tuple[int, bytes]:
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    rest = attribute(TABLE, struct.pack("=I", 254)) + attribute(DST, packed(to))
    if gateway is not None:
        rest += attribute(GATEWAY, packed(gateway))
    return NEW_ROUTE, struct.pack("=BBBBBBBBI", family, length, 0, 0, 254, 0, 0, kind, 0) + rest


def test_an_address_counts_and_so_does_the_prefix_of_its_link() -> None:
    messages = [
        address(socket.AF_INET, 24, address="198.18.4.7", local="198.18.4.7"),
        address(socket.AF_INET6, 64, address="2a00:5b::7"),
    ]
    assert set(addresses_of(messages)) == {
        "198.18.4.0/24", "198.18.4.7/32", "2a00:5b::/64", "2a00:5b::7/128",
    }  # fmt: skip


def test_of_a_point_to_point_link_both_ends_count() -> None:
    found = set(addresses_of([address(socket.AF_INET, 32, address="9.9.9.1", local="9.9.9.2")]))
    assert found == {"9.9.9.1/32", "9.9.9.2/32"}


def test_a_route_without_a_gateway_is_on_the_link_and_one_with_is_not() -> None:
    messages = [
        route("93.184.217.0", 24),
        route("93.184.216.0", 24, gateway="93.184.217.1"),
        route("7.7.0.0", 16, LOCAL),
        route("6.6.0.0", 16, BLACKHOLE),
    ]
    assert set(routes_of(messages)) == {"93.184.217.0/24", "7.7.0.0/16"}


def test_a_tunnel_that_takes_everything_is_a_way_out_and_no_link() -> None:
    wide = [route("0.0.0.0", 1), route("128.0.0.0", 1), route("2000::", 3)]
    assert set(routes_of(wide)) == set()
    assert set(routes_of([route("10.0.0.0", 8), route("2001:db8::", 32)])) == {
        "10.0.0.0/8", "2001:db8::/32",
    }  # fmt: skip


def test_another_message_is_passed_over_and_a_cut_one_is_an_error() -> None:
    kind, payload = route("93.184.217.0", 24)
    assert list(routes_of([(kind + 1, payload)])) == []
    with pytest.raises(struct.error):
        list(routes_of([(kind, payload[:-6])]))


def test_the_host_that_runs_this_has_a_loopback() -> None:
    assert {"127.0.0.0/8", "127.0.0.1/32"} <= read_prefixes()


def test_the_set_only_grows() -> None:
    answers = [frozenset({"93.184.217.0/24"}), frozenset({"2a00:5b::/64"})]
    watch = HostNetworkWatch(lambda: answers.pop(0))
    watch.refresh()
    watch.refresh()
    shown = {str(prefix) for prefix in watch.current.prefixes}
    assert shown == {"93.184.217.0/24", "2a00:5b::/64"}


@pytest.mark.needs("root", "systemd")
async def test_an_address_that_the_host_gets_is_known_at_once() -> None:
    watch = HostNetworkWatch()

    async def change(verb: str) -> None:
        await trio.run_process(["ip", "addr", verb, "93.184.219.9/32", "dev", "lo"])

    def known() -> bool:
        return "93.184.219.9/32" in {str(prefix) for prefix in watch.current.prefixes}

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.watch)
        await wait_all_tasks_blocked()
        assert not known()
        await change("add")
        try:
            with trio.fail_after(30):
                while not known():
                    await next_look()
        finally:
            await change("del")
        nursery.cancel_scope.cancel()
    assert "93.184.219.9/32" not in read_prefixes()
    assert known(), "it is not forgotten"
