"""The frozen table of addresses, the unwrapping of IPv4, and the host's own set."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.policy.addresses import (
    Address,
    AddressMalformed,
    AddressReason,
    HostNetwork,
    RefusedAddress,
    embedded_ipv4,
    judge_address,
    parse_address,
    parse_prefix,
)

NOTHING_MORE = HostNetwork()


def judged(text: str, host_network: HostNetwork = NOTHING_MORE) -> Address | RefusedAddress:
    return judge_address(parse_address(text), host_network)


def range_of(text: str) -> str:
    refused = judged(text)
    assert isinstance(refused, RefusedAddress), text
    assert refused.reason is AddressReason.RANGE
    return refused.range_name


# First and last address of each range, and what stands before and after it where that is public.
EDGES = [
    ("this network", "0.0.0.0", "0.255.255.255", None, "1.0.0.0"),
    ("private", "10.0.0.0", "10.255.255.255", "9.255.255.255", "11.0.0.0"),
    ("carrier-grade NAT", "100.64.0.0", "100.127.255.255", "100.63.255.255", "100.128.0.0"),
    ("loopback", "127.0.0.0", "127.255.255.255", "126.255.255.255", "128.0.0.0"),
    ("link-local", "169.254.0.0", "169.254.255.255", "169.253.255.255", "169.255.0.0"),
    ("private", "172.16.0.0", "172.31.255.255", "172.15.255.255", "172.32.0.0"),
    ("protocol assignments", "192.0.0.0", "192.0.0.255", "191.255.255.255", "192.0.1.0"),
    ("documentation", "192.0.2.0", "192.0.2.255", "192.0.1.255", "192.0.3.0"),
    ("AS112", "192.31.196.0", "192.31.196.255", "192.31.195.255", "192.31.197.0"),
    ("multicast tunnelling", "192.52.193.0", "192.52.193.255", "192.52.192.255", "192.52.194.0"),
    ("6to4 relay", "192.88.99.0", "192.88.99.255", "192.88.98.255", "192.88.100.0"),
    ("private", "192.168.0.0", "192.168.255.255", "192.167.255.255", "192.169.0.0"),
    ("AS112", "192.175.48.0", "192.175.48.255", "192.175.47.255", "192.175.49.0"),
    ("benchmarking", "198.18.0.0", "198.19.255.255", "198.17.255.255", "198.20.0.0"),
    ("documentation", "198.51.100.0", "198.51.100.255", "198.51.99.255", "198.51.101.0"),
    ("documentation", "203.0.113.0", "203.0.113.255", "203.0.112.255", "203.0.114.0"),
    ("multicast", "224.0.0.0", "239.255.255.255", "223.255.255.255", None),
    ("reserved", "240.0.0.0", "255.255.255.254", None, None),
    ("broadcast", "255.255.255.255", "255.255.255.255", None, None),
    ("instance metadata", "169.254.169.254", "169.254.169.254", None, None),
    ("provider's host agent", "168.63.129.16", "168.63.129.16", "168.63.129.15", "168.63.129.17"),
    ("provider's metadata", "100.100.100.200", "100.100.100.200", None, None),
    ("unspecified", "::", "::", None, None),
    ("loopback", "::1", "::1", None, None),
    ("IPv4-compatible", "::2", "::ffff:ffff", None, None),
    ("NAT64 with a local prefix", "64:ff9b:1::", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff", None, None),
    ("discard", "100::", "100::ffff:ffff:ffff:ffff", None, None),
    ("dummy", "100:0:0:1::", "100:0:0:1:ffff:ffff:ffff:ffff", None, None),
    ("Teredo", "2001::", "2001:0:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
    ("protocol assignments", "2001:1::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff", None,
     "2001:200::"),
    ("documentation", "2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff",
     "2001:db7:ffff:ffff:ffff:ffff:ffff:ffff", "2001:db9::"),
    ("6to4", "2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
     "2001:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2003::"),
    ("AS112", "2620:4f:8000::", "2620:4f:8000:ffff:ffff:ffff:ffff:ffff",
     "2620:4f:7fff:ffff:ffff:ffff:ffff:ffff", "2620:4f:8001::"),
    ("documentation", "3fff::", "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff",
     "3ffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "3fff:1000::"),
    ("segment routing", "5f00::", "5f00:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
    ("unique local", "fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
    ("instance metadata", "fd00:ec2::254", "fd00:ec2::254", None, None),
    ("link-local", "fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
    ("site-local", "fec0::", "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
    ("multicast", "ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
    ("not allocated", "200::", "1fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, "2000::"),
    ("not allocated", "4000::", "5eff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
     "3fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
    ("not allocated", "8000::", "fbff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None, None),
]  # fmt: skip


@pytest.mark.case("EGR-10")
@pytest.mark.parametrize(("name", "first", "last", "before", "after"), EDGES)
def test_a_range_is_refused_by_its_name_from_its_first_address_to_its_last(
    name: str, first: str, last: str, before: str | None, after: str | None
) -> None:
    assert range_of(first).startswith(name + " (")
    assert range_of(last).startswith(name + " (")
    for public in filter(None, (before, after)):
        assert judged(public) == parse_address(public)


@given(st.integers(0, 2**32 - 1))
def test_what_the_library_calls_not_global_is_refused(value: int) -> None:
    """A floor, in one direction: the table is wider."""
    if not ipaddress.IPv4Address(value).is_global:
        assert isinstance(judge_address(Address(4, value), NOTHING_MORE), RefusedAddress)


@given(st.integers(0, 2**128 - 1))
def test_only_what_is_allocated_is_public_in_ipv6(value: int) -> None:
    if isinstance(judge_address(Address(6, value), NOTHING_MORE), Address):
        assert value >> 125 == 1 or value >> 32 == 0xFFFF or value >> 32 == 0x64FF9B << 64


EMBEDDINGS = {
    "IPv4-mapped": "::ffff:{0}",
    "IPv4-compatible": "::{0}",
    "IPv4-translated": "::ffff:0:{0}",
    "NAT64": "64:ff9b::{0}",
    "NAT64 with a local prefix": "64:ff9b:1::{0}",
    "6to4": "2002:{1}::1",
    "Teredo": "2001:0:4136:e378:8000:63bf:{2}",
    "ISATAP": "2606:4700::5efe:{0}",
    "ISATAP of a public address": "2606:4700::200:5efe:{0}",
}


def embedding(form: str, ipv4: str) -> str:
    packed = ipaddress.IPv4Address(ipv4).packed
    words = [packed[:2].hex(), packed[2:].hex()]
    inverted = bytes(byte ^ 0xFF for byte in packed)
    return EMBEDDINGS[form].format(
        ipv4, ":".join(words), f"{inverted[:2].hex()}:{inverted[2:].hex()}"
    )


@pytest.mark.case("EGR-09")
@pytest.mark.parametrize("form", EMBEDDINGS)
@pytest.mark.parametrize(
    "ipv4", ["169.254.169.254", "127.0.0.1", "10.1.2.3", "100.100.100.200", "224.0.0.1"]
)
def test_a_refused_address_is_refused_in_every_embedding_and_is_seen(form: str, ipv4: str) -> None:
    refused = judged(embedding(form, ipv4))
    assert isinstance(refused, RefusedAddress)
    assert refused.embedded == ipv4


def test_teredo_is_unwrapped_by_inverting_the_clients_bits() -> None:
    # The example of RFC 4380: client 192.0.2.45.
    inner = embedded_ipv4(parse_address("2001:0000:4136:e378:8000:63bf:3fff:fdd2"))
    assert inner == parse_address("192.0.2.45")


@pytest.mark.parametrize("form", EMBEDDINGS)
def test_two_forms_of_a_public_address_are_dialled_and_the_tunnelling_ones_never(
    form: str,
) -> None:
    text = embedding(form, "8.8.8.8")
    found = judged(text)
    if form == "IPv4-mapped":
        assert found == parse_address("8.8.8.8")
    elif form == "NAT64":
        assert found == parse_address(text)
    else:
        assert isinstance(found, RefusedAddress)
        assert found.embedded == "8.8.8.8"


def test_metadata_is_called_by_its_name_in_whatever_form() -> None:
    for form in ("IPv4-mapped", "NAT64"):
        assert range_of(embedding(form, "169.254.169.254")).startswith("instance metadata")
    assert range_of("169.254.169.253") == "link-local (169.254.0.0/16)"


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "1.2.3", "1.2.3.4.5", "01.2.3.4", "0x1.2.3.4", "1.2.3.256", "16909060", "1.2.3.4 ",
        "1.2.3.4\n", "[::1]", "::1%lo", "fe80::1%1", "::1::", "g::", "1:2:3:4:5:6:7:8:9",
        "\u0661.2.3.4", "\uff11.2.3.4", "::ffff:1.2.3", "1" * 46, "localhost", "1.2.3.4/32",
    ],
)  # fmt: skip
def test_what_is_no_plain_address_is_malformed(text: str) -> None:
    with pytest.raises(AddressMalformed) as malformed:
        parse_address(text)
    message = str(malformed.value)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 300


@given(st.integers(0, 2**32 - 1) | st.integers(0, 2**128 - 1))
def test_an_address_is_read_back_from_its_text(value: int) -> None:
    for address in [Address(6, value)] + ([Address(4, value)] if value < 2**32 else []):
        assert parse_address(str(address)) == address


def test_the_text_of_a_mapped_address_does_not_depend_on_the_python() -> None:
    assert str(parse_address("::ffff:102:304")) == "::ffff:1.2.3.4"


def test_the_hosts_own_network_is_refused_under_its_own_reason() -> None:
    host = HostNetwork.of(["93.184.216.34/24", "2606:4700::7/64", "8.8.4.4", "64:ff9b::505:505"])
    for text, prefix in [
        ("93.184.216.1", "93.184.216.0/24"),
        ("::ffff:93.184.216.1", "93.184.216.0/24"),
        ("64:ff9b::93.184.216.1", "93.184.216.0/24"),
        ("2606:4700::ffff", "2606:4700::/64"),
        ("8.8.4.4", "8.8.4.4/32"),
        ("64:ff9b::505:505", "64:ff9b::505:505/128"),
    ]:
        refused = judged(text, host)
        assert isinstance(refused, RefusedAddress)
        assert (refused.reason, refused.range_name) == (AddressReason.HOST_NETWORK, prefix)
        assert isinstance(judged(text), Address)  # control: public without it
    assert judged("93.184.217.1", host) == parse_address("93.184.217.1")


def test_the_table_speaks_before_the_hosts_own_network() -> None:
    refused = judged("10.0.0.1", HostNetwork.of(["10.0.0.1/8"]))
    assert isinstance(refused, RefusedAddress)
    assert refused.reason is AddressReason.RANGE


@given(
    st.lists(
        st.sampled_from(["0.0.0.0/0", "::/0", "8.0.0.0/8", "1.1.1.1", "2000::/3"]), max_size=4
    ),
    st.sampled_from(
        ["8.8.8.8", "1.1.1.1", "10.0.0.1", "2606:4700::1", "::ffff:8.8.8.8", "fe80::1"]
    ),
)
def test_the_hosts_own_set_only_adds(prefixes: list[str], text: str) -> None:
    if isinstance(judged(text), RefusedAddress):
        assert isinstance(judged(text, HostNetwork.of(prefixes)), RefusedAddress)
    before = HostNetwork.of(["9.9.9.9"])
    after = before.including(prefixes)
    assert set(before.prefixes) <= set(after.prefixes)
    assert after.including(prefixes) == after


@pytest.mark.parametrize(
    "text", ["", "/", "1.2.3.4/", "1.2.3.4/33", "::/129", "1.2.3.4/-1", "1.2.3.4/ 8", "1.2.3.4/٨",
             "1.2.3.4/255.0.0.0", "fe80::1%eth0/64", "x/8", "1.2.3.4/8/8"],
)  # fmt: skip
def test_what_is_no_prefix_is_refused_and_none_is_left_out(text: str) -> None:
    with pytest.raises(AddressMalformed):
        parse_prefix(text)
    with pytest.raises(AddressMalformed):
        HostNetwork.of(["8.8.8.8", text])
