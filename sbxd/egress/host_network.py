"""The host's own addresses and the prefixes on its links, as the kernel tells them.

Theory: route netlink (rtnetlink(7)) answers anyone. Two dumps say everything: the addresses with
the prefixes of their links, and the routes without a gateway, those of the table `local` included.
A third socket hears of changes and only means "ask again", so a lost or unknown message is no loss.

Invariants: the set only grows while the daemon runs; what cannot be read is an error and never an
empty set. A route without a gateway to more than a hundred-odd networks (a tunnel that takes all
traffic) is a way out and not a link: prefixes shorter than `LENGTH_MIN` are left out.

Deliberately absent: a judgement (`sbxd.policy.addresses`), and the networks behind the host's
routers, which no host knows.
"""

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import trio

from sbxd.policy.addresses import HostNetwork

LENGTH_MIN: Final = {socket.AF_INET: 8, socket.AF_INET6: 16}
PACE_SECONDS: Final = 0.1
PACE_FACTOR: Final = 10
ANSWER_SECONDS: Final = 1.0
PACKETS_MAX: Final = 10_000

_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS: Final = struct.Struct("=BBBBi")  # family, prefix length, flags, scope, index
_ROUTE: Final = struct.Struct("=BBBBBBBBI")  # family, to, from, tos, table, protocol, scope, type
_ATTRIBUTE: Final = struct.Struct("=HH")
_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_RTM_NEWROUTE, _RTM_GETROUTE = 24, 26
_REQUEST_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_KIND: Final = 0x3FFF
_RTA_DST, _RTA_GATEWAY, _RTA_MULTIPATH, _RTA_VIA = 1, 5, 9, 18
_RTN_UNICAST, _RTN_LOCAL, _RTN_BROADCAST, _RTN_ANYCAST = 1, 2, 3, 4
_OWN: Final = frozenset({_RTN_UNICAST, _RTN_LOCAL, _RTN_BROADCAST, _RTN_ANYCAST})
# RTMGRP_IPV4_IFADDR, IPV4_ROUTE, IPV6_IFADDR, IPV6_ROUTE
_GROUPS: Final = 0x10 | 0x40 | 0x100 | 0x400
_RECEIVE_BYTES: Final = 256 * 1024


class HostNetworkUnreadable(Exception):
    """The kernel did not say which addresses the host has."""


Message = tuple[int, bytes]  # type and payload
Read = Callable[[], frozenset[str]]


class HostNetworkWatch:
    """The growing set. `watch` is its task. read: what there is now, as "address/length"."""

    def __init__(self, read: Read | None = None) -> None:
        self._read = read_prefixes if read is None else read
        self.current = HostNetwork()

    def refresh(self) -> None:
        """Add what there is now. Takes as long as a dump of the host's routes: on most hosts about
        a millisecond. Raises HostNetworkUnreadable."""
        self._add(self._read())

    def _add(self, prefixes: frozenset[str]) -> None:
        self.current = self.current.including(sorted(prefixes))

    async def watch(self) -> None:
        """Refresh at every change, until cancelled; on a host with very many routes that change
        all the time, as often as leaves most of the time for other work.

        Raises HostNetworkUnreadable.
        """
        try:
            with trio.socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as heard:
                await heard.bind((0, _GROUPS))
                while True:
                    began = trio.current_time()
                    self._add(await trio.to_thread.run_sync(self._read))
                    took = trio.current_time() - began
                    await trio.lowlevel.wait_readable(heard.fileno())
                    await trio.sleep(max(PACE_SECONDS, PACE_FACTOR * took))
                    _drain(heard)
        except OSError as problem:
            raise HostNetworkUnreadable(f"route netlink: {problem.strerror}") from None


def read_prefixes() -> frozenset[str]:
    """All of them now. Raises HostNetworkUnreadable."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as asked:
            asked.settimeout(ANSWER_SECONDS)
            asked.bind((0, 0))
            addresses = list(_dump(asked, _RTM_GETADDR, bytes(_ADDRESS.size)))
            routes = list(_dump(asked, _RTM_GETROUTE, bytes(_ROUTE.size)))
    except (OSError, struct.error) as problem:
        raise HostNetworkUnreadable(f"route netlink: {problem}") from None
    return frozenset((*addresses_of(addresses), *routes_of(routes)))


def addresses_of(messages: Iterable[Message]) -> Iterator[str]:
    """Of RTM_NEWADDR messages: each address, and with its length the prefix of its link."""
    for kind, payload in messages:
        if kind == _RTM_NEWADDR and len(payload) >= _ADDRESS.size:
            family, length, *_ = _ADDRESS.unpack_from(payload)
            if family in LENGTH_MIN:
                found = _attributes(payload[_ADDRESS.size :])
                for which in (_IFA_LOCAL, _IFA_ADDRESS):  # they differ on a point-to-point link
                    if which in found:
                        yield from _prefix(family, found[which], length)
                        yield from _prefix(family, found[which], 8 * len(found[which]))


def routes_of(messages: Iterable[Message]) -> Iterator[str]:
    """Of RTM_NEWROUTE messages: the destinations that are reached without a gateway."""
    for kind, payload in messages:
        if kind == _RTM_NEWROUTE and len(payload) >= _ROUTE.size:
            family, length, _, _, _, _, _, route_type, _ = _ROUTE.unpack_from(payload)
            found = _attributes(payload[_ROUTE.size :])
            if (
                family in LENGTH_MIN
                and route_type in _OWN
                and _RTA_DST in found
                and not found.keys() & {_RTA_GATEWAY, _RTA_VIA, _RTA_MULTIPATH}
            ):
                yield from _prefix(family, found[_RTA_DST], length)


def _prefix(family: int, raw: bytes, length: int) -> Iterator[str]:
    if length >= LENGTH_MIN[socket.AddressFamily(family)]:
        text = socket.inet_ntop(family, raw)
        yield str(ipaddress.ip_network(f"{text}/{length}", strict=False))


def _attributes(raw: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while raw:
        size, kind = _ATTRIBUTE.unpack_from(raw)
        if not _ATTRIBUTE.size <= size <= len(raw):
            raise struct.error("an attribute is cut")
        found[kind & _KIND] = raw[_ATTRIBUTE.size : size]
        raw = raw[_aligned(size) :]
    return found


def _dump(asked: socket.socket, kind: int, payload: bytes) -> Iterator[Message]:
    """Every message of one dump. Raises OSError, struct.error."""
    header = _HEADER.pack(_HEADER.size + len(payload), kind, _REQUEST_DUMP, kind, 0)
    asked.send(header + payload)
    for _ in range(PACKETS_MAX):
        for answer, sequence, data in _split(asked.recv(_RECEIVE_BYTES)):
            if sequence != kind:
                continue
            if answer == _NLMSG_DONE:
                return
            if answer == _NLMSG_ERROR:
                number = -struct.unpack_from("=i", data)[0]
                raise OSError(number, os.strerror(number))
            yield answer, data
    raise OSError(errno.EMSGSIZE, "the host has too many routes")


def _split(packet: bytes) -> Iterator[tuple[int, int, bytes]]:
    while len(packet) >= _HEADER.size:
        size, kind, _, sequence, _ = _HEADER.unpack_from(packet)
        if not _HEADER.size <= size <= len(packet):
            raise struct.error("a message is cut")
        yield kind, sequence, packet[_HEADER.size : size]
        packet = packet[_aligned(size) :]


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def _drain(heard: trio.socket.SocketType) -> None:
    """Take what was said of changes; that some was lost (ENOBUFS) means no more than that."""
    with socket.socket(fileno=os.dup(heard.fileno())) as end:
        for _ in range(PACKETS_MAX):
            try:
                end.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as problem:
                if problem.errno != errno.ENOBUFS:
                    raise
