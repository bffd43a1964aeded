"""A second judge of destinations, written from the requirements and sharing no code or method with
the product: characters instead of patterns, label lists from the right, bytes of inet_pton and
ranges of first and last address instead of prefixes and shifts.

Also the generator of the tuples on which both are compared.
"""

import random
import socket
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbxd.policy.addresses import HostNetwork
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy

LETTERS = set(string.ascii_lowercase)
DIGITS = set(string.digits)

# First and last address of every range that is never dialled.
V4_RANGES = [
    ("0.0.0.0", "0.255.255.255"), ("10.0.0.0", "10.255.255.255"),
    ("100.64.0.0", "100.127.255.255"), ("127.0.0.0", "127.255.255.255"),
    ("168.63.129.16", "168.63.129.16"), ("169.254.0.0", "169.254.255.255"),
    ("172.16.0.0", "172.31.255.255"), ("192.0.0.0", "192.0.0.255"),
    ("192.0.2.0", "192.0.2.255"), ("192.31.196.0", "192.31.196.255"),
    ("192.52.193.0", "192.52.193.255"), ("192.88.99.0", "192.88.99.255"),
    ("192.168.0.0", "192.168.255.255"), ("192.175.48.0", "192.175.48.255"),
    ("198.18.0.0", "198.19.255.255"), ("198.51.100.0", "198.51.100.255"),
    ("203.0.113.0", "203.0.113.255"), ("224.0.0.0", "255.255.255.255"),
]  # fmt: skip
# Within the only part that is handed out, 2000:: to 3fff:…; everything outside is never dialled.
V6_RANGES = [
    ("2001::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("2620:4f:8000::", "2620:4f:8000:ffff:ffff:ffff:ffff:ffff"),
    ("3fff::", "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff"),
]
_V4 = [
    (socket.inet_pton(socket.AF_INET, first), socket.inet_pton(socket.AF_INET, last))
    for first, last in V4_RANGES
]
_V6 = [
    (socket.inet_pton(socket.AF_INET6, first), socket.inet_pton(socket.AF_INET6, last))
    for first, last in V6_RANGES
]


@dataclass(frozen=True)
class Tuple:
    """One question: may `host:port` be dialled, when the resolver answers so?"""

    policy: EgressPolicy
    host: str
    port: int
    answers: Sequence[str]
    host_prefixes: tuple[str, ...]

    @property
    def host_network(self) -> HostNetwork:
        return HostNetwork.of(self.host_prefixes)


@dataclass(frozen=True)
class Verdict:
    """outcome: "allowed" or the value of the refusal. dialled: packed addresses."""

    outcome: str
    dialled: tuple[bytes, ...] = ()


def is_name(text: str, *, labels_min: int) -> bool:
    """Whether text is one plain host name, judged character by character."""
    if not 0 < len(text) <= 253:
        return False
    labels = text.split(".")
    for label in labels:
        if not 0 < len(label) < 64 or label[0] == "-" or label[-1] == "-":
            return False
        for character in label:
            folded = chr(ord(character) + 32) if "A" <= character <= "Z" else character
            if folded not in LETTERS and folded not in DIGITS and folded != "-":
                return False
    last = labels[-1].lower()
    if all(character in DIGITS for character in last):
        return False
    if last[:2] == "0x" and all(character in string.hexdigits for character in last[2:]):
        return False
    return len(labels) >= labels_min


def covers(entry: str, host: str) -> bool:
    """Whether a listed host covers a requested one, from the right, label by label."""
    wildcard = entry[:2] == "*."
    if not is_name(entry[2:] if wildcard else entry, labels_min=1) or len(entry) > 253:
        return False
    listed = [label.lower() for label in reversed(entry.split("."))]
    wanted = [label.lower() for label in reversed(host.split("."))]
    if len(listed) != len(wanted):
        return False
    if wildcard:
        listed, wanted = listed[:-1], wanted[:-1]
    return all(a == b for a, b in zip(listed, wanted, strict=True))


def judged(question: Tuple) -> Verdict:
    """The whole judgement."""
    host = question.host
    if not is_name(host, labels_min=1):
        return Verdict("host_malformed")
    if question.port < 1 or question.port > 65535:
        return Verdict("port_malformed")
    if question.policy.mode != "deny":
        fitting = [d for d in question.policy.destinations if covers(d.host, host)]
        if not fitting:
            return Verdict("host_not_listed")
        if not any(question.port in d.ports for d in fitting):
            return Verdict("port_not_listed")
    else:
        return Verdict("mode_deny")
    if host.count(".") == 0:
        return Verdict("host_not_qualified")
    if len(question.answers) == 0:
        return Verdict("no_address")
    dialled = []
    for answer in question.answers:
        packed = pack(answer)
        if packed is None:
            return Verdict("address_malformed")
        refused, packed = weigh(packed, question.host_prefixes)
        if refused:
            return Verdict(refused)
        if packed not in dialled:
            dialled.append(packed)
    return Verdict("allowed", tuple(dialled))


def pack(text: str) -> bytes | None:
    """The bytes of an address, or None."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    try:
        return socket.inet_pton(family, text)
    except (OSError, ValueError):
        return None


def weigh(packed: bytes, host_prefixes: Sequence[str]) -> tuple[str, bytes]:
    """("" or the refusal, the bytes to dial)."""
    if len(packed) == 4:
        if any(first <= packed <= last for first, last in _V4):
            return "address_refused", packed
        return ("host_network" if on_host(packed, host_prefixes) else ""), packed
    if packed.startswith((b"\0" * 10 + b"\xff\xff", b"\0\x64\xff\x9b" + b"\0" * 8)):
        refused, _ = weigh(packed[-4:], host_prefixes)
        if not refused and on_host(packed, host_prefixes):
            refused = "host_network"
        return refused, (packed[-4:] if packed[0:2] == b"\0\0" else packed)
    if packed[0] & 0xE0 != 0x20 or any(first <= packed <= last for first, last in _V6):
        return "address_refused", packed
    if packed[8:12] in (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe"):
        return "address_refused", packed
    return ("host_network" if on_host(packed, host_prefixes) else ""), packed


def on_host(packed: bytes, prefixes: Sequence[str]) -> bool:
    """Whether an address is within one of the prefixes, compared as text of bits."""
    bits = "".join(f"{byte:08b}" for byte in packed)
    for prefix in prefixes:
        address, _, length = prefix.partition("/")
        other = pack(address)
        assert other is not None
        text = "".join(f"{byte:08b}" for byte in other)
        count = int(length) if length else len(text)
        if len(text) == len(bits) and text[:count] == bits[:count]:
            return True
    return False


# --- the generator ------------------------------------------------------------------------------

NAMES = (
    "example.com", "a.example.com", "a.b.example.com", "evilexample.com", "example.com.evil.net",
    "com", "localhost", "printer.local", "metadata.google.internal", "xn--bcher-kva.example",
    "EXAMPLE.com", "A.Example.COM", "example.co", "xexample.com", "b.example.com", "k.example.com",
)  # fmt: skip
ODD_NAMES = (
    "", ".", "..", "example.com.", ".example.com", "a..example.com", "*.example.com", "*", "-a.com",
    "a-.com", "a_b.com", "127.0.0.1", "0x7f.1", "0177.0.0.1", "2130706433", "[::1]", "::1",
    "1.2.3.0x", "a.0xffg", "a.0xff", "example.com:443", "user@example.com", "\u212a.example.com",
    "bücher.example", "\uff45xample.com", "example\u3002com", "a\u00adb.com", "example.com\n",
    "a b.com", "a\0.com", "x" * 63 + ".com", "x" * 64 + ".com", ".".join(["x" * 49] * 5) + ".abc",
    ".".join(["x" * 49] * 5) + ".abcd",
)  # fmt: skip
ENTRIES = (
    *NAMES, "*.example.com", "*.EXAMPLE.com", "*.com", "*.b.example.com", "*", "*.", "a.*.com",
    "*a.example.com", "**.example.com", "example.com.", "10.0.0.1", "", "\u212a.example.com",
)  # fmt: skip
PORTS = (80, 8443, 0, -1, 65535, 65536, 1)
COUNTS = (0, 1, 1, 1, 1, 2, 2, 2, 3, 4, 8)
PUBLIC = ("8.8.8.8", "93.184.216.34", "1.1.1.1", "2606:4700::1111", "2a00:1450:4001::200e")
HOST_PREFIXES = ("8.8.8.1/24", "1.1.1.1", "2606:4700::1/64", "64:ff9b::101:101", "93.0.0.0/8")
ODD_ANSWERS = (
    "", "1.2.3", "010.1.1.1", "1.2.3.4.5", "fe80::1%eth0", "::1::", "[::1]", " 8.8.8.8",
    "8.8.8.8\n", "localhost", "0x8.8.8.8", "134744072", "1.2.3.256", "g::1", "::ffff:1.2.3",
)  # fmt: skip


def questions(rng: random.Random) -> Iterator[Tuple]:
    """Tuples without end; most get as far as their answers."""
    while True:
        host = _host(rng)
        port = 443 if rng.random() < 0.8 else rng.choice(PORTS)
        likely = 0.9 if rng.random() < 0.5 else 0.3
        yield Tuple(
            policy=_policy(rng, host),
            host=host,
            port=port,
            answers=tuple(_answer(rng, likely) for _ in range(rng.choice(COUNTS))),
            host_prefixes=tuple(rng.sample(HOST_PREFIXES, rng.choice((0, 0, 1, 2)))),
        )


def _policy(rng: random.Random, host: str) -> EgressPolicy:
    if rng.random() < 0.02:
        return EgressPolicy()
    listed = [
        EgressDestination(
            host=rng.choice(ENTRIES) if rng.random() < 0.9 else _host(rng),
            ports=tuple(rng.sample((443, 80, 8443, 65535, 1), rng.choice((1, 1, 2, 4)))),
        )
        for _ in range(rng.choice((0, 1, 2, 4)))
    ]
    if rng.random() < 0.7:
        entry = rng.choice((host, host.swapcase(), "*." + host.partition(".")[2]))
        listed.insert(0, EgressDestination(host=entry, ports=(443,)))
    return EgressPolicy(mode=EgressMode.ALLOWLIST, destinations=tuple(listed))


def _host(rng: random.Random) -> str:
    drawn = rng.random()
    if drawn < 0.75:
        return rng.choice(NAMES)
    if drawn < 0.85:
        return rng.choice(ODD_NAMES)
    name = list(rng.choice(NAMES))
    place = rng.randrange(len(name))
    name[place] = rng.choice(string.printable + "\u0130\u212a\uff0e\u00e9*.-")
    return "".join(name)


def _answer(rng: random.Random, likely: float) -> str:
    """likely: how probable a plain public address is."""
    if rng.random() < likely:
        return rng.choice(PUBLIC)
    drawn = rng.random()
    if drawn < 0.04:
        return rng.choice(ODD_ANSWERS)
    if drawn < 0.3:
        return socket.inet_ntop(socket.AF_INET, _v4(rng))
    return socket.inet_ntop(socket.AF_INET6, _v6(rng))


def _v4(rng: random.Random) -> bytes:
    drawn = rng.random()
    if drawn < 0.4:
        return rng.randbytes(4)
    if drawn < 0.5:
        return socket.inet_aton(rng.choice(("169.254.169.254", "8.8.8.8", "8.8.8.200", "1.1.1.1")))
    return _near(rng, rng.choice(_V4))


def _v6(rng: random.Random) -> bytes:
    """An embedding of an IPv4 address, an edge of a range, or anything."""
    inner = _v4(rng)
    inverted = bytes(byte ^ 0xFF for byte in inner)
    forms = (
        b"\0" * 12 + inner,
        b"\0" * 10 + b"\xff\xff" + inner,
        b"\0" * 8 + b"\xff\xff\0\0" + inner,
        b"\0\x64\xff\x9b" + b"\0" * 8 + inner,
        b"\0\x64\xff\x9b\0\1" + rng.randbytes(6) + inner,
        b"\x20\x02" + inner + rng.randbytes(10),
        b"\x20\x01\0\0" + rng.randbytes(8) + inverted,
        b"\x26\x06\x47\0" + rng.randbytes(4) + b"\0\0\x5e\xfe" + inner,
        b"\x26\x06\x47\0" + rng.randbytes(4) + b"\2\0\x5e\xfe" + inner,
        b"\x26\x06\x47\0" + b"\0" * 4 + rng.randbytes(8),
        _near(rng, rng.choice(_V6)),
        rng.choice((b"\x20", b"\x2a", b"\x3f", b"\x1f", b"\x40")) + rng.randbytes(15),
        rng.randbytes(16),
    )
    return rng.choice(forms)


def _near(rng: random.Random, edges: tuple[bytes, bytes]) -> bytes:
    size = len(edges[0])
    value = int.from_bytes(rng.choice(edges), "big") + rng.choice((-1, 0, 1))
    return (value % (1 << 8 * size)).to_bytes(size, "big")
