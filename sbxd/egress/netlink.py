"""Route netlink for the daemon, by pyroute2: one destination's route, and the host's addresses.

The only module of the daemon that imports pyroute2, of which it uses the messages alone: the
sockets here never wait for longer than a bound, and pyroute2's own would bring an event loop.
Importing it takes about 20 MiB and most of a second, so it is imported only where destinations are
configured (`sbxd.proxies`).

Invariants: the kernel answers a question for a route within the call that asks, without its
routing lock, so the event loop may ask (about a millisecond, which is spent on the
message); whatever is not a whole answer of the kernel is an error and never "beyond". Deliberately
absent: a judgement (`sbxd.policy.routes`), a dump of routes: their number does not matter.
"""

import errno
import os
import socket
import struct
from typing import Any, Final

from pyroute2.netlink import nlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg_base

from sbxd.egress.host_network import HostNetworkUnreadable
from sbxd.policy.addresses import Address, parse_address
from sbxd.policy.routes import Answers, Flow, HostNetworkUnknown, NoWay, Route

ANSWER_SECONDS: Final = 1.0
PACKETS_MAX: Final = 10_000

_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_RTM_NEWADDR, _RTM_GETADDR, _RTM_NEWROUTE, _RTM_GETROUTE = 20, 22, 24, 26
_REQUEST, _REQUEST_DUMP = 1, 0x301
_RTM_F_FIB_MATCH: Final = 0x2000
_NO_WAY: Final = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL, errno.EAGAIN, errno.ESRCH}
)
_MATCHED, _TAKEN = 1, 2  # sequence numbers
_RECEIVE_BYTES: Final = 256 * 1024
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_FAMILY: Final = {4: socket.AF_INET, 6: socket.AF_INET6}
_UNREADABLE = (NetlinkError, struct.error, ValueError, TypeError, LookupError)


# A route message with the attributes that are asked for or read here: pyroute2's own does not know
# those of a flow.
_Route: Any = type(
    "_Route",
    (rtmsg_base, nlmsg),
    {
        "__slots__": (),
        "nla_map": (
            (1, "RTA_DST", "target"),
            (2, "RTA_SRC", "target"),
            (4, "RTA_OIF", "uint32"),
            (5, "RTA_GATEWAY", "target"),
            (9, "RTA_MULTIPATH", "*get_nh"),
            (18, "RTA_VIA", "rtvia"),
            (27, "RTA_IP_PROTO", "uint8"),
            (28, "RTA_SPORT", "be16"),
            (29, "RTA_DPORT", "be16"),
        ),
    },
)


def ask_kernel(flow: Flow) -> Answers:
    """As `sbxd.policy.routes.Ask`."""
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
    except OSError as problem:
        raise HostNetworkUnknown(errno.EPROTO, f"route netlink: {problem.strerror}") from None
    return Answers(matched=answers[0], taken=answers[1])


def question(flow: Flow, sequence: int) -> bytes:
    """As `sbxd.client.routes.question`."""
    bits = 32 if flow.destination.version == 4 else 128
    message = _Route()
    message["family"] = _FAMILY[flow.destination.version]
    message["dst_len"] = bits
    message["src_len"] = bits if flow.source is not None else 0
    message["flags"] = _RTM_F_FIB_MATCH if sequence == _MATCHED else 0
    message["attrs"] = [
        ("RTA_DST", _text(flow.destination)),
        ("RTA_IP_PROTO", socket.IPPROTO_TCP),
        ("RTA_DPORT", flow.port),
    ]
    if flow.source is not None:
        message["attrs"].append(("RTA_SRC", _text(flow.source)))
        message["attrs"].append(("RTA_SPORT", flow.source_port))
    return _request(message, _RTM_GETROUTE, _REQUEST, sequence)


def read_answer(data: bytes, sequence: int) -> Route:
    """As `sbxd.client.routes.read_answer`."""
    try:
        size, kind, _, answered, _ = _HEADER.unpack_from(data)
        if not _HEADER.size <= size <= len(data) or answered != sequence:
            raise ValueError("the answer is to another question")
        if kind == _NLMSG_ERROR:
            number = -struct.unpack_from("=i", data, _HEADER.size)[0]
            raise (NoWay if number in _NO_WAY else HostNetworkUnknown)(number, os.strerror(number))
        if kind != _RTM_NEWROUTE:
            raise ValueError(f"a message of type {kind}")
        message = _Route(data[:size])
        message.decode()
        return Route(kind=message["type"], length=message["dst_len"], hops=_hops(message))
    except _UNREADABLE as problem:
        raise HostNetworkUnknown(errno.EPROTO, f"route netlink: {problem}") from None


def read_prefixes() -> frozenset[str]:
    """Every address of the host, and with its length the prefix on its link, as "address/length".
    Blocks for the length of a dump. Raises HostNetworkUnreadable."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as asked:
            asked.settimeout(ANSWER_SECONDS)
            asked.bind((0, 0))
            asked.sendto(_request(ifaddrmsg(), _RTM_GETADDR, _REQUEST_DUMP, 1), (0, 0))
            found: set[str] = set()
            for _ in range(PACKETS_MAX):
                data, sender = asked.recvfrom(_RECEIVE_BYTES)
                if sender[0] == 0 and addresses_of(data, found):
                    return frozenset(found)
    except (OSError, *_UNREADABLE) as problem:
        raise HostNetworkUnreadable(f"route netlink: {problem}") from None
    raise HostNetworkUnreadable("route netlink: the host has too many addresses")


def addresses_of(packet: bytes, found: set[str]) -> bool:
    """Add the addresses of one packet of a dump. Returns whether it is the last one.

    Raises: OSError; ValueError and what pyroute2 raises for a message that is cut.
    """
    while packet:
        size, kind, *_ = _HEADER.unpack_from(packet)
        if not _HEADER.size <= size <= len(packet):
            raise ValueError("a message is cut")
        if kind == _NLMSG_DONE:
            return True
        if kind == _NLMSG_ERROR:
            number = -struct.unpack_from("=i", packet, _HEADER.size)[0]
            raise OSError(number, os.strerror(number))
        if kind == _RTM_NEWADDR:
            message = ifaddrmsg(packet[:size])
            message.decode()
            for name in ("IFA_LOCAL", "IFA_ADDRESS"):  # they differ on a point-to-point link
                address = message.get_attr(name)
                if address is not None:
                    found |= {f"{address}/{message['prefixlen']}", str(address)}
        packet = packet[(size + 3) & ~3 :]
    return False


def _request(message: Any, kind: int, flags: int, sequence: int) -> bytes:
    message["header"]["type"] = kind
    message["header"]["flags"] = flags
    message["header"]["sequence_number"] = sequence
    message.encode()
    return bytes(message.data)


def _hops(message: Any) -> tuple[Address | None, ...]:
    several = message.get_attr("RTA_MULTIPATH")
    if several is not None:
        return tuple(_gateway(each) for each in several)
    gateway = _gateway(message)
    return (gateway,) if gateway is not None or message.get_attr("RTA_OIF") is not None else ()


def _gateway(message: Any) -> Address | None:
    gateway = message.get_attr("RTA_GATEWAY")
    via = message.get_attr("RTA_VIA")
    if gateway is None and via is not None:
        gateway = via["addr"]
    return None if gateway is None else parse_address(gateway)


def _text(address: Address) -> str:
    raw = address.value.to_bytes(4 if address.version == 4 else 16, "big")
    return socket.inet_ntop(_FAMILY[address.version], raw)
