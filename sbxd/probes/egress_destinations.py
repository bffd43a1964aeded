"""What is reached with the operator's destinations, what is not, and how a tunnel carries bytes."""

from sbxd.probes.egress_probe import REFUSED_AS_UNLISTED, UNLISTED, EgressProbe, Need, Yes
from sbxd.probes.probe import Layer, Probe

AROUND = EgressProbe(
    Probe(
        id="around",
        cases=("EGR-01", "EGR-02"),
        layer=Layer.NETWORK_NAMESPACE,
        source=f"NAME = {UNLISTED!r}"
        + """
def resolve(name):
    try:
        socket.getaddrinfo(name, 443)
    except socket.gaierror:
        return "refused"
    return "ok"

answer({
    "a public address": attempt(connect, socket.AF_INET, ("1.1.1.1", 443)),
    "a name server": attempt(connect, socket.AF_INET, ("8.8.8.8", 53)),
    "the metadata address": attempt(connect, socket.AF_INET, ("169.254.169.254", 80)),
    "a public address of IPv6": attempt(connect, socket.AF_INET6, ("2606:4700:4700::1111", 443)),
    "datagrams": attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM),
    "a lookup": resolve(HOST or NAME),
    "the proxy": attempt(connect, socket.AF_INET, PROXY),
})
""",
        inside={
            **dict.fromkeys(
                ("a public address", "a name server", "the metadata address",
                 "a public address of IPv6"),
                frozenset({"ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL", "EAFNOSUPPORT"}),
            ),
            "datagrams": frozenset({"EPROTONOSUPPORT", "EACCES", "EPERM", "EAFNOSUPPORT"}),
            "a lookup": frozenset({"refused"}),
        },
        controls={"the proxy": "ok"},
    ),
    Need.PROXY,
)  # fmt: skip

WITHOUT_YES = EgressProbe(
    Probe(
        id="without-yes",
        cases=(),
        layer=Layer.PROXY,
        source="""
with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    loopback = attempt(connect, socket.AF_INET, listening.getsockname())
answer({
    "the proxy": attempt(connect, socket.AF_INET, PROXY),
    "variables": listed(name for name in os.environ if "proxy" in name.lower()),
    "loopback": loopback,
})
""",
        inside={
            "the proxy": frozenset({"ECONNREFUSED", "ENETUNREACH"}),
            "variables": frozenset({"none"}),
        },
        controls={"loopback": "ok"},
    ),
    Need.PROXY,
    Yes.ONE,
)

_NAMES = (UNLISTED, "localhost", "metadata.sbxd.invalid", "xn--bcher-kva.sbxd.invalid")
UNLISTED_HOST = EgressProbe(
    Probe(
        id="unlisted-host",
        cases=("EGR-03",),
        layer=Layer.PROXY,
        source=f"NAMES = {_NAMES!r}"
        + """
found = {name: ask(request(name, 443)) for name in NAMES}
answer({
    **found,
    "more behind the listed name": ask(request(f"{HOST}.invalid", PORT)),
    "the listed name": ask(request(HOST, PORT)),
})
""",
        inside={
            **dict.fromkeys(_NAMES, frozenset({REFUSED_AS_UNLISTED})),
            "more behind the listed name": frozenset({REFUSED_AS_UNLISTED}),
        },
        controls={"the listed name": "200"},
    ),
    Need.LISTED,
)

UNLISTED_PORT = EgressProbe(
    Probe(
        id="unlisted-port",
        cases=(),
        layer=Layer.PROXY,
        source="""
answer({
    "another port of the listed name": ask(request(HOST, UNLISTED_PORT)),
    "the listed port": ask(request(HOST, PORT)),
})
""",
        inside={"another port of the listed name": frozenset({"403 port_not_listed"})},
        controls={"the listed port": "200"},
    ),
    Need.UNLISTED_PORT,
)

EARLY_BYTES = EgressProbe(
    Probe(
        id="early-bytes",
        cases=(),
        layer=Layer.PROXY,
        source="""
def early():
    with start(request(HOST, PORT) + hello()) as s:
        status = outcome(head(s))
        return status if status != "200" else answered(s)

def late():
    with start(request(HOST, PORT)) as s:
        status = outcome(head(s))
        s.sendall(hello())
        return status if status != "200" else answered(s)

answer({"sent with the request": early(), "sent after the answer": late()})
""",
        inside={"sent with the request": frozenset({"answered"})},
        controls={"sent after the answer": "answered"},
    ),
    Need.LISTED_TLS,
)

HALF_CLOSE = EgressProbe(
    Probe(
        id="half-close",
        cases=(),
        layer=Layer.PROXY,
        source="""
def greet(shut):
    with start(request(HOST, PORT)) as s:
        status = outcome(head(s))
        s.sendall(hello())
        if shut:
            s.shutdown(socket.SHUT_WR)
        return status if status != "200" else answered(s)

answer({"after the end of what is sent": greet(True), "without it": greet(False)})
""",
        inside={"after the end of what is sent": frozenset({"answered"})},
        controls={"without it": "answered"},
    ),
    Need.LISTED_TLS,
)

TUNNELS = EgressProbe(
    Probe(
        id="tunnels-cap",
        cases=("EGR-16",),
        layer=Layer.PROXY,
        source="""
import time
asked = [start(request(HOST, PORT)) for _ in range(TUNNELS_MAX)]
opened = [outcome(head(s)) for s in asked]
found = {
    "one more than the most": ask(request(HOST, PORT)),
    "the most": "ok" if set(opened) == {"200"} else listed(set(opened)),
}
for s in asked:
    s.close()
for _ in range(50):  # a place is free once its tunnel has ended on both sides
    after = ask(request(HOST, PORT))
    if not after.startswith("503"):
        break
    time.sleep(0.2)
answer({**found, "after their end": after})
""",
        inside={"one more than the most": frozenset({"503 too_many_tunnels"})},
        controls={"the most": "ok", "after their end": "200"},
    ),
    Need.TUNNELS,
)
