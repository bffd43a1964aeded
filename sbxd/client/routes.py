"""Asks the kernel for the route to one destination, with the standard library alone.

For the worker's guard. The daemon does the same with pyroute2 (`sbxd.egress.netlink`), which a
worker does not need; both read the same bytes and are held to the same answers by one test.

Invariants: one socket for one question; the kernel answers within the call that asks, so nothing
waits and any thread or event loop may ask; whatever is not a whole answer of the kernel to this
question is HostNetworkUnknown. Works without privileges in any network namespace. Deliberately
absent: a judgement (`sbxd.policy.routes`), a cache, dumps.
"""

import errno
import os
import socket
import struct
from typing import Final

from sbxd.policy.addresses import Address
from sbxd.policy.routes import Answers, Flow, HostNetworkUnknown, NoWay, Route

_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ROUTE: Final = struct.Struct("=BBBBBBBBI")  # family, to, from, tos, table, protocol, scope, type
_ATTRIBUTE: Final = struct.Struct("=HH")  # length, kind
_NEXT_HOP: Final = struct.Struct("=HBBi")  # length, flags, hops, interface
_NLMSG_ERROR, _RTM_NEWROUTE, _RTM_GETROUTE = 2, 24, 26
_NLM_F_REQUEST: Final = 1
_RTM_F_FIB_MATCH: Final = 0x2000
_KIND: Final = 0x3FFF
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_GATEWAY, _RTA_MULTIPATH, _RTA_VIA = 1, 2, 4, 5, 9, 18
_RTA_IP_PROTO, _RTA_SPORT, _RTA_DPORT = 27, 28, 29
_NO_WAY: Final = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL, errno.EAGAIN, errno.ESRCH}
)
_MATCHED, _TAKEN = 1, 2  # sequence numbers
_RECEIVE_BYTES: Final = 64 * 1024
_FAMILY: Final = {4: socket.AF_INET, 6: socket.AF_INET6}


def ask_kernel(flow: Flow) -> Answers:
    """As `sbxd.policy.routes.Ask`: two questions and their answers, some tens of microseconds."""
    try:
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0
        ) as asked:
            asked.bind((0, 0))
            answers = []
            for sequence in (_MATCHED, _TAKEN):
                asked.sendto(question(flow, sequence), (0, 0))
                data, sender = asked.recvfrom(_RECEIVE_BYTES)
                if sender[0] != 0:
                    raise HostNetworkUnknown(errno.EPROTO, "an answer is not the kernel's")
                answers.append(read_answer(data, sequence))
    except (HostNetworkUnknown, NoWay):
        raise
    except (OSError, AttributeError) as problem:  # AF_NETLINK: on Linux alone
        raise HostNetworkUnknown(errno.EPROTO, f"route netlink: {problem}") from None
    return Answers(matched=answers[0], taken=answers[1])


def question(flow: Flow, sequence: int) -> bytes:
    """RTM_GETROUTE for a flow of TCP. sequence 1 asks for the entry that matches, 2 for the route
    that is taken."""
    bits = 32 if flow.destination.version == 4 else 128
    found = [
        _attribute(_RTA_DST, _packed(flow.destination)),
        _attribute(_RTA_IP_PROTO, bytes([socket.IPPROTO_TCP])),
        _attribute(_RTA_DPORT, struct.pack("!H", flow.port)),
    ]
    if flow.source is not None:
        found.append(_attribute(_RTA_SRC, _packed(flow.source)))
        found.append(_attribute(_RTA_SPORT, struct.pack("!H", flow.source_port)))
    payload = _ROUTE.pack(
        _FAMILY[flow.destination.version], bits, bits if flow.source is not None else 0,
        0, 0, 0, 0, 0, _RTM_F_FIB_MATCH if sequence == _MATCHED else 0,
    ) + b"".join(found)  # fmt: skip
    header = _HEADER.pack(_HEADER.size + len(payload), _RTM_GETROUTE, _NLM_F_REQUEST, sequence, 0)
    return header + payload


def read_answer(data: bytes, sequence: int) -> Route:
    """The route of one answer. Raises NoWay, HostNetworkUnknown."""
    try:
        size, kind, _, answered, _ = _HEADER.unpack_from(data)
        payload = data[_HEADER.size : size]
        if not _HEADER.size <= size <= len(data) or answered != sequence:
            raise struct.error("the answer is to another question")
        if kind == _NLMSG_ERROR:
            number = -struct.unpack_from("=i", payload)[0]
            if number in _NO_WAY:
                raise NoWay(number, os.strerror(number))
            raise HostNetworkUnknown(number, os.strerror(number))
        if kind != _RTM_NEWROUTE:
            raise struct.error(f"a message of type {kind}")
        _, length, _, _, _, _, _, route_kind, _ = _ROUTE.unpack_from(payload)
        return Route(kind=route_kind, length=length, hops=_hops(payload[_ROUTE.size :]))
    except (struct.error, KeyError) as problem:
        raise HostNetworkUnknown(errno.EPROTO, f"route netlink: {problem}") from None


def _hops(raw: bytes) -> tuple[Address | None, ...]:
    found = _attributes(raw)
    if _RTA_MULTIPATH in found:
        hops, rest = [], found[_RTA_MULTIPATH]
        while rest:
            size, _, _, _ = _NEXT_HOP.unpack_from(rest)
            if not _NEXT_HOP.size <= size <= len(rest):
                raise struct.error("a next hop is cut")
            hops.append(_gateway(_attributes(rest[_NEXT_HOP.size : size])))
            rest = rest[_aligned(size) :]
        return tuple(hops)
    gateway = _gateway(found)
    return (gateway,) if gateway is not None or _RTA_OIF in found else ()


def _gateway(found: dict[int, bytes]) -> Address | None:
    raw = found.get(_RTA_GATEWAY)
    if raw is None and _RTA_VIA in found:
        raw = found[_RTA_VIA][2:]  # behind its family
    if raw is None:
        return None
    return Address({4: 4, 16: 6}[len(raw)], int.from_bytes(raw, "big"))


def _attributes(raw: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while raw:
        size, kind = _ATTRIBUTE.unpack_from(raw)
        if not _ATTRIBUTE.size <= size <= len(raw):
            raise struct.error("an attribute is cut")
        found[kind & _KIND] = raw[_ATTRIBUTE.size : size]
        raw = raw[_aligned(size) :]
    return found


def _attribute(kind: int, value: bytes) -> bytes:
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, kind) + value + bytes(_aligned(size) - size)


def _packed(address: Address) -> bytes:
    return address.value.to_bytes(4 if address.version == 4 else 16, "big")


def _aligned(size: int) -> int:
    return (size + 3) & ~3
