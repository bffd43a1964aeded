"""Which IP addresses nobody may dial: one frozen table, the unwrapping of IPv4, the host's own set.

Invariants: pure; the same answer on every Python (`ipaddress` parses text and classifies nothing,
since what it calls global has changed between releases); an address is public only when no row
refuses it; an IPv4 address inside an IPv6 address is judged as that IPv4 address, or the form that
carries it is refused whole; the host's set only adds. Deliberately absent: a way to permit an
address, and a way to shorten the table.
"""

import ipaddress
from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

ADDRESS_CHARACTERS_MAX = 45
_BITS = {4: 32, 6: 128}
_IPV4_MASK = 0xFFFFFFFF


class AddressMalformed(ValueError):
    """Text that is not one plain IPv4 or IPv6 address (or prefix). Text is bounded and ASCII."""


class AddressReason(StrEnum):
    """Why an address is refused."""

    RANGE = "range"  # a row of the table
    HOST_NETWORK = "host_network"  # the host's own address, or a prefix on its links


class RefusedAddress(Struct, frozen=True, kw_only=True):
    """An address that may not be dialled.

    address: as it was answered, in canonical text. range_name: the row, with its prefix.
    embedded: the IPv4 address that it carries, if it carries one.
    """

    address: str
    reason: AddressReason
    range_name: str
    embedded: str | None = None


class Address(Struct, frozen=True):
    """One IP address. version: 4 or 6."""

    version: int
    value: int

    def __str__(self) -> str:
        if self.version == 4:
            return str(ipaddress.IPv4Address(self.value))
        if self.value >> 32 == 0xFFFF:  # IPv4-mapped, which only newer Pythons write like this
            return f"::ffff:{ipaddress.IPv4Address(self.value & _IPV4_MASK)}"
        return str(ipaddress.IPv6Address(self.value))


class Prefix(Struct, frozen=True):
    """The addresses of `version` whose first `length` bits are those of `network`."""

    version: int
    network: int
    length: int

    def holds(self, address: Address) -> bool:
        """Whether an address is one of them."""
        if self.version != address.version:
            return False
        return (address.value ^ self.network) >> (_BITS[self.version] - self.length) == 0

    def __str__(self) -> str:
        return f"{Address(self.version, self.network)}/{self.length}"


class _Row(Struct, frozen=True):
    prefix: Prefix
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix})"


def _rows(text: str) -> tuple[_Row, ...]:
    """One row a line: prefix, name. The order is the order of judgement."""
    rows = []
    for line in text.strip().splitlines():
        prefix, name = line.split(maxsplit=1)
        rows.append(_Row(parse_prefix(prefix), name))
    return tuple(rows)


def parse_address(text: str) -> Address:
    """Read one address: dotted decimal of four plain numbers, or IPv6 text without a zone.

    Raises:
        AddressMalformed: anything else (octal, hexadecimal and short IPv4, zones, brackets,
            spaces, digits outside ASCII).
    """
    if len(text) <= ADDRESS_CHARACTERS_MAX and text.isascii() and "%" not in text:
        try:
            if ":" in text:
                return Address(6, int(ipaddress.IPv6Address(text)))
            return Address(4, int(ipaddress.IPv4Address(text)))
        except ValueError:
            pass
    raise AddressMalformed(f"{text[:ADDRESS_CHARACTERS_MAX]!a} is not an IP address")


def parse_prefix(text: str) -> Prefix:
    """Read "address/length" or an address alone; bits beyond the length are cleared, so that an
    interface's address with its length stands for the prefix on its link.

    Raises:
        AddressMalformed: not that.
    """
    written, slash, digits = text.partition("/")
    address = parse_address(written)
    bits = _BITS[address.version]
    if not slash:
        return Prefix(address.version, address.value, bits)
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 3 and int(digits) <= bits):
        raise AddressMalformed(f"{text[:64]!a} is not a prefix: 0 to {bits} bits")
    shift = bits - int(digits)
    return Prefix(address.version, address.value >> shift << shift, int(digits))


# IANA's special-purpose registries whole, also where IANA calls an entry globally reachable:
# none of them is where a service lives. Addresses of cloud providers that hand out credentials
# stand before the range that holds them, so that a refusal calls them by their name.
_IPV4 = _rows("""
169.254.169.254/32 instance metadata
169.254.170.2/32 container credentials
168.63.129.16/32 provider's host agent
100.100.100.200/32 provider's metadata
0.0.0.0/8 this network
10.0.0.0/8 private
100.64.0.0/10 carrier-grade NAT
127.0.0.0/8 loopback
169.254.0.0/16 link-local
172.16.0.0/12 private
192.0.0.0/24 protocol assignments
192.0.2.0/24 documentation
192.31.196.0/24 AS112
192.52.193.0/24 multicast tunnelling
192.88.99.0/24 6to4 relay
192.168.0.0/16 private
192.175.48.0/24 AS112
198.18.0.0/15 benchmarking
198.51.100.0/24 documentation
203.0.113.0/24 documentation
224.0.0.0/4 multicast
255.255.255.255/32 broadcast
240.0.0.0/4 reserved
""")

# Only 2000::/3 is allocated to hosts; the last rows close everything else.
_IPV6 = _rows("""
fd00:ec2::254/128 instance metadata
fd20:ce::254/128 instance metadata
::/128 unspecified
::1/128 loopback
::/96 IPv4-compatible
::ffff:0:0:0/96 IPv4-translated
64:ff9b:1::/48 NAT64 with a local prefix
100::/64 discard
100:0:0:1::/64 dummy
2001::/32 Teredo
2001::/23 protocol assignments
2001:db8::/32 documentation
2002::/16 6to4
2620:4f:8000::/48 AS112
3fff::/20 documentation
5f00::/16 segment routing
fc00::/7 unique local
fe80::/10 link-local
fec0::/10 site-local
ff00::/8 multicast
::/3 not allocated
4000::/2 not allocated
8000::/1 not allocated
""")

# Judged as the IPv4 address in their last 32 bits: the first is IPv4 itself to the kernel, the
# second is how a host without IPv4 reaches it (DNS64). Every other form that carries an IPv4
# address is refused whole: nothing public is reached by it alone, and whom its relay or router
# would hand the packet to is somebody else's choice.
_MAPPED = parse_prefix("::ffff:0:0/96")
_NAT64 = parse_prefix("64:ff9b::/96")
_COMPATIBLE = parse_prefix("::/96")
_TRANSLATED = parse_prefix("::ffff:0:0:0/96")
_NAT64_LOCAL = parse_prefix("64:ff9b:1::/48")
_TEREDO = parse_prefix("2001::/32")
_SIX_TO_FOUR = parse_prefix("2002::/16")
# An interface identifier, below whatever prefix: 0000:5efe or, for a public address, 0200:5efe.
_ISATAP_IDENTIFIERS = (0x00005EFE, 0x02005EFE)


def embedded_ipv4(address: Address) -> Address | None:
    """The IPv4 address that an IPv6 address carries, or None.

    Of a NAT64 local prefix, the form with a 96-bit prefix; of Teredo, the client's address, whose
    bits are inverted there.
    """
    if address.version == 4:
        return None
    low = address.value & _IPV4_MASK
    if any(prefix.holds(address) for prefix in (_MAPPED, _NAT64, _TRANSLATED, _NAT64_LOCAL)):
        return Address(4, low)
    if _COMPATIBLE.holds(address):
        return Address(4, low) if low > 1 else None
    if _TEREDO.holds(address):
        return Address(4, low ^ _IPV4_MASK)
    if _SIX_TO_FOUR.holds(address):
        return Address(4, address.value >> 80 & _IPV4_MASK)
    if _is_isatap(address):
        return Address(4, low)
    return None


def _is_isatap(address: Address) -> bool:
    return address.version == 6 and address.value >> 32 & _IPV4_MASK in _ISATAP_IDENTIFIERS


class HostNetwork(Struct, frozen=True):
    """The host's own addresses and the prefixes on its links, which nobody may dial either.

    The set only adds to the table. A NAT64 prefix of the operator's own network, which no table
    can know, belongs here too. Without prefixes: nothing is added.
    """

    prefixes: tuple[Prefix, ...] = ()

    @classmethod
    def of(cls, prefixes: Iterable[str]) -> "HostNetwork":
        """The set of these, each "address" or "address/length" (an interface's own address with
        its length stands for the whole prefix).

        Raises:
            AddressMalformed: one of them is not that (a zone as in `fe80::1%eth0`, for one).
        """
        return cls(tuple(dict.fromkeys(parse_prefix(prefix) for prefix in prefixes)))

    def including(self, prefixes: Iterable[str]) -> "HostNetwork":
        """This set and more. Raises: as `of`."""
        return HostNetwork(tuple(dict.fromkeys((*self.prefixes, *self.of(prefixes).prefixes))))

    def prefix_of(self, address: Address) -> Prefix | None:
        """The prefix that holds an address, or None."""
        return next((prefix for prefix in self.prefixes if prefix.holds(address)), None)

    def range_of(self, address: Address, port: int) -> str | None:
        """The prefix that holds an address, as text, or None; whatever the port."""
        prefix = self.prefix_of(address)
        return None if prefix is None else str(prefix)


class OwnNetwork(Protocol):
    """What is the host's own: `HostNetwork`, or `sbxd.policy.routes.LiveHostNetwork`, which asks
    the kernel."""

    def range_of(self, address: Address, port: int) -> str | None:
        """The prefix or route that makes an address the host's own; None: it is beyond.

        Raises OSError (`sbxd.policy.routes.HostNetworkUnknown`): the kernel did not say.
        """
        ...


def judge_address(
    address: Address, host_network: OwnNetwork, port: int = 0
) -> Address | RefusedAddress:
    """The address to dial, or why none.

    An IPv4-mapped address is answered with its IPv4 address: the kernel dials the same.

    Raises: what `host_network` raises.
    """

    def on_host(asked: Address) -> tuple[AddressReason, str] | None:
        found = host_network.range_of(asked, port)
        return None if found is None else (AddressReason.HOST_NETWORK, found)

    inner = embedded_ipv4(address)
    as_ipv4 = inner if _MAPPED.holds(address) or _NAT64.holds(address) else None
    refusal: tuple[AddressReason, str] | None = None
    if as_ipv4 is not None:
        refusal = _in_table(as_ipv4, _IPV4) or on_host(as_ipv4) or on_host(address)
    elif _is_isatap(address) and not any(row.prefix.holds(address) for row in _IPV6):
        refusal = AddressReason.RANGE, "ISATAP (interface identifier 0:5efe)"
    else:
        table = _IPV4 if address.version == 4 else _IPV6
        refusal = _in_table(address, table) or on_host(address)
    if refusal is not None:
        reason, name = refusal
        return RefusedAddress(
            address=str(address),
            reason=reason,
            range_name=name,
            embedded=None if inner is None else str(inner),
        )
    if as_ipv4 is not None and _MAPPED.holds(address):
        return as_ipv4
    return address


def _in_table(address: Address, table: tuple[_Row, ...]) -> tuple[AddressReason, str] | None:
    row = next((row for row in table if row.prefix.holds(address)), None)
    return None if row is None else (AddressReason.RANGE, str(row))
