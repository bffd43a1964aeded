"""Probes of an environment without egress: nothing is reachable and no name is known.

That what really listens on the host is not reached is for the driver, which has the port.
"""

from sbxd.probes.probe import Layer, Probe

_V4 = (
    "1.1.1.1", "8.8.8.8", "169.254.169.254", "10.0.0.1", "172.17.0.1", "192.168.0.1",
    "192.168.122.1", "100.64.0.1", "224.0.0.1", "255.255.255.255",
)  # fmt: skip
_V6 = ("2606:4700:4700::1111", "fe80::1", "fd00::1", "ff02::1", "64:ff9b::101:101")
_TARGETS = [
    *((f"{address} {port}", 2, address, port) for address in _V4 for port in (53, 80, 443)),
    *((f"{address} {port}", 10, address, port) for address in _V6 for port in (53, 443)),
]

ADDRESSES = Probe(
    id="addresses",
    cases=(),
    layer=Layer.NETWORK_NAMESPACE,
    source=f"TARGETS = {_TARGETS!r}"
    + """
found = {name: attempt(connect, family, (address, port))
         for name, family, address, port in TARGETS}
with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    found["loopback"] = attempt(connect, socket.AF_INET, listening.getsockname())
answer(found)
""",
    inside={
        name: frozenset({"ENETUNREACH", "EHOSTUNREACH", "EACCES", "EINVAL", "EADDRNOTAVAIL"})
        for name, _, _, _ in _TARGETS
    },
    controls={"loopback": "ok"},
)

_NAMES = ("example.com", "localhost.example", "metadata.google.internal")

NAMES = Probe(
    id="names",
    cases=(),
    layer=Layer.NETWORK_NAMESPACE,
    source=f"NAMES = {_NAMES!r}"
    + """
def resolve(name):
    try:
        socket.getaddrinfo(name, 443)
    except socket.gaierror as error:
        return "refused"
    return "ok"

answer({
    **{name: resolve(name) for name in NAMES},
    "datagrams": attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM),
    "datagrams of IPv6": attempt(socket.socket, socket.AF_INET6, socket.SOCK_DGRAM),
    "ICMP": attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1),
    "127.0.0.1": resolve("127.0.0.1"),
})
""",
    inside={
        **dict.fromkeys(_NAMES, frozenset({"refused"})),
        **dict.fromkeys(("datagrams", "datagrams of IPv6", "ICMP"), frozenset({"EPROTONOSUPPORT"})),
    },
    controls={"127.0.0.1": "ok"},
)

PROBES = (ADDRESSES, NAMES)
