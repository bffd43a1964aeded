"""The host's own addresses: what is read of the kernel, that it only grows, and events."""

import socket
import struct

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from sbxd.egress.host_network import HostNetworkWatch
from sbxd.egress.netlink import addresses_of, read_prefixes
from tests.pacing import next_look

NEW_ADDRESS, NEW_ROUTE, DONE, ERROR = 20, 24, 3, 2
ADDRESS, IFA_LOCAL = 1, 2


def attribute(kind: int, raw: bytes) -> bytes:
    size = 4 + len(raw)
    return struct.pack("=HH", size, kind) + raw + bytes(-size % 4)


def message(kind: int, payload: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(payload), kind, 2, 1, 0) + payload


def address(length: int, **found: str) -> bytes:
    kinds = {"address": ADDRESS, "local": IFA_LOCAL}
    family = socket.AF_INET6 if ":" in next(iter(found.values())) else socket.AF_INET
    rest = b"".join(
        attribute(kinds[name], socket.inet_pton(family, text)) for name, text in found.items()
    )
    return message(NEW_ADDRESS, struct.pack("=BBBBi", family, length, 0, 0, 1) + rest)


def read(*messages: bytes) -> tuple[set[str], bool]:
    found: set[str] = set()
    is_last = addresses_of(b"".join(messages), found)
    return found, is_last


def test_an_address_counts_and_so_does_the_prefix_of_its_link() -> None:
    found, is_last = read(
        address(24, address="198.18.4.7", local="198.18.4.7"), address(64, address="2a00:5b::7")
    )
    assert found == {"198.18.4.7/24", "198.18.4.7", "2a00:5b::7/64", "2a00:5b::7"}
    assert not is_last


def test_of_a_point_to_point_link_both_ends_count() -> None:
    found, _ = read(address(32, address="9.9.9.1", local="9.9.9.2"))
    assert {"9.9.9.1", "9.9.9.2"} <= found


def test_another_message_is_passed_over_and_the_end_is_the_end() -> None:
    found, is_last = read(
        message(NEW_ROUTE, bytes(12)), message(DONE, bytes(4)), address(24, address="9.9.9.9")
    )
    assert (found, is_last) == (set(), True)


def test_a_cut_message_and_an_error_are_no_empty_set() -> None:
    whole = address(24, address="198.18.4.7")
    with pytest.raises(ValueError, match="cut"):
        read(whole[:-6])
    with pytest.raises(OSError, match="Operation not permitted"):
        read(message(ERROR, struct.pack("=i", -1)))


def test_the_host_that_runs_this_has_a_loopback() -> None:
    assert {"127.0.0.1/8", "127.0.0.1"} <= read_prefixes()


def test_the_set_only_grows() -> None:
    answers = [frozenset({"93.184.217.0/24"}), frozenset({"2a00:5b::/64"})]
    watch = HostNetworkWatch(lambda: answers.pop(0))
    watch.refresh()
    watch.refresh()
    shown = {str(prefix) for prefix in watch.current.prefixes}
    assert shown == {"93.184.217.0/24", "2a00:5b::/64"}


@pytest.mark.needs("root", "systemd")
async def test_an_address_that_the_host_gets_is_heard_of() -> None:
    watch = HostNetworkWatch(read_prefixes)

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
    assert "93.184.219.9" not in read_prefixes()
    assert known(), "it is not forgotten"
