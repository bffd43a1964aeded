"""One judgement of a destination: its order, its lookups, its refusals, and what they say."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbxd.policy.addresses import HostNetwork
from sbxd.policy.egress import (
    ADDRESSES_MAX,
    MALFORMED,
    Allowed,
    EgressRefusal,
    Refused,
    evaluate,
)
from sbxd.port.egress import DENY_ALL, EgressDestination, EgressMode, EgressPolicy

NOTHING_MORE = HostNetwork()
PUBLIC = "93.184.216.34"


def allowlist(*destinations: tuple[str, tuple[int, ...]]) -> EgressPolicy:
    return EgressPolicy(
        mode=EgressMode.ALLOWLIST,
        destinations=tuple(EgressDestination(host=h, ports=p) for h, p in destinations),
    )


POLICY = allowlist(("example.com", (443,)), ("*.Files.example.com", (443, 8443)))


class Resolver:
    """Counts, and answers each lookup with the next of its answers."""

    def __init__(self, *answers: Sequence[str] | Exception) -> None:
        self.answers = answers or ([PUBLIC],)
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def judge(
    host: str,
    port: int = 443,
    *,
    policy: EgressPolicy = POLICY,
    resolver: Resolver | None = None,
    host_network: HostNetwork = NOTHING_MORE,
) -> Allowed | Refused:
    return await evaluate(policy, host, port, resolver or Resolver(), host_network)


async def refused(
    host: str,
    port: int = 443,
    *,
    policy: EgressPolicy = POLICY,
    resolver: Resolver | None = None,
    host_network: HostNetwork = NOTHING_MORE,
) -> Refused:
    found = await judge(host, port, policy=policy, resolver=resolver, host_network=host_network)
    assert isinstance(found, Refused), found
    assert found.detail
    assert found.remedy
    for text in (found.host, found.detail, found.remedy):
        assert text.isascii()
        assert text.isprintable()
        assert len(text) < 1000
    return found


async def test_a_listed_destination_is_allowed_with_its_addresses_and_its_rule() -> None:
    found = await judge(
        "A.files.EXAMPLE.com",
        8443,
        resolver=Resolver([PUBLIC, "2606:4700::1", PUBLIC, "::ffff:8.8.8.8", "64:ff9b::808:808"]),
    )
    assert found == Allowed(
        host="a.files.example.com",
        port=8443,
        addresses=(PUBLIC, "2606:4700::1", "8.8.8.8", "64:ff9b::808:808"),
        rule="*.files.example.com:443,8443",
    )


@pytest.mark.case("EGR-03")
@pytest.mark.parametrize(
    "host",
    [
        "evilexample.com",
        "example.com.evil.net",
        "www.example.com",
        "files.example.com",
        "a.b.files.example.com",
        "afiles.example.com",
        "example.co",
        "com",
        "localhost",
        "metadata.google.internal",
    ],
)
async def test_what_no_entry_covers_is_refused_and_never_looked_up(host: str) -> None:
    resolver = Resolver()
    found = await refused(host, resolver=resolver)
    assert found.reason is EgressRefusal.HOST_NOT_LISTED
    assert found.rule is None
    assert host in found.remedy
    assert resolver.asked == []


async def test_another_port_of_a_listed_host_is_refused_and_never_looked_up() -> None:
    resolver = Resolver()
    found = await refused("example.com", 80, resolver=resolver)
    assert found.reason is EgressRefusal.PORT_NOT_LISTED
    assert found.rule == "example.com:443"
    assert resolver.asked == []


async def test_a_host_under_two_entries_has_the_ports_of_both() -> None:
    policy = allowlist(("*.example.com", (443,)), ("a.example.com", (8080,)))
    for port, rule in ((443, "*.example.com:443"), (8080, "a.example.com:8080")):
        found = await judge("a.example.com", port, policy=policy)
        assert isinstance(found, Allowed)
        assert found.rule == rule
    found = await refused("a.example.com", 80, policy=policy)
    assert "443" in found.detail
    assert "8080" in found.detail


@pytest.mark.case("EGR-05")
async def test_nothing_is_allowed_by_a_policy_that_is_missing_empty_or_broken() -> None:
    resolver = Resolver()
    found = await refused("example.com", policy=DENY_ALL, resolver=resolver)
    assert found.reason is EgressRefusal.MODE_DENY
    broken = allowlist(
        ("*", (443,)),
        ("*.", (443,)),
        ("", (443,)),
        ("**.com", (443,)),
        ("*example.com", (443,)),
        ("example.com.", (443,)),
        ("https://example.com", (443,)),
        ("ex\u0430mple.com", (443,)),
        ("\u212a.com", (443,)),  # lower() makes an ASCII k of it
        (" example.com", (443,)),
        ("93.184.216.34", (443,)),
        ("example.com", ()),
    )
    for policy in (EgressPolicy(mode=EgressMode.ALLOWLIST), broken):
        for host in ("example.com", "a.example.com", "k.com"):
            found = await refused(host, policy=policy, resolver=resolver)
            assert found.reason in (EgressRefusal.HOST_NOT_LISTED, EgressRefusal.PORT_NOT_LISTED)
    assert resolver.asked == []


@pytest.mark.case("EGR-05")
@pytest.mark.parametrize(
    "text",
    [
        '{"mode": "allow"}',
        '{"mode": "ALLOWLIST"}',
        '{"mode": "public-https:browser-page"}',
        '{"mode": true}',
        '{"mod": "allowlist"}',
        '{"destinations": [{"host": "a.example", "ports": [443]}]}',
        '{"mode": "allowlist", "destinations": "a.example"}',
        '{"mode": "allowlist", "destinations": [{"host": "a.example"}]}',
        '{"mode": "allowlist", "destinations": [{"host": "a.example", "port": 443}]}',
        '{"mode": "allowlist", "destinations": [{"host": "a.example", "ports": ["443"]}]}',
        '{"mode": "allowlist", "destinations": [{"host": "a.example", "ports": []}]}',
        '{"mode": "allowlist", "destinations": [{"host": "a.example", "ports": [0]}]}',
        '{"mode": "allowlist", "destinations": null}',
        "null",
        '"allowlist"',
    ],
)
def test_a_policy_that_is_misspelt_is_no_policy(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=EgressPolicy)


def test_control_a_policy_that_is_spelt_well_is_one() -> None:
    text = '{"mode": "allowlist", "destinations": [{"host": "a.example", "ports": [443]}]}'
    assert msgspec.json.decode(text, type=EgressPolicy) == allowlist(("a.example", (443,)))
    assert msgspec.json.decode("{}", type=EgressPolicy) == DENY_ALL


@pytest.mark.case("EGR-06")
@pytest.mark.parametrize(
    "host",
    [
        "93.184.216.34", "1572395042", "0x5db8d822", "0135.0270.0330.042", "93.184.55330", "93.1",
        "[2606:4700::1]", "2606:4700::1", "[::1]", "fe80::1%eth0", "[fe80::1%25eth0]",
        "\uff11\uff12\uff17.\uff10.\uff10.\uff11", "127\u30020\u30020\u30021", "127.0.0.1.",
        "[example.com]", "example.com:443", "example.0x1", "example.1",
    ],
)  # fmt: skip
async def test_an_address_in_whatever_form_is_malformed_and_never_looked_up(host: str) -> None:
    resolver = Resolver()
    policy = allowlist((host, (443,)))  # even if it were listed
    found = await refused(host, policy=policy, resolver=resolver)
    assert found.reason is EgressRefusal.HOST_MALFORMED
    assert found.reason in MALFORMED
    assert resolver.asked == []


@pytest.mark.case("EGR-19")
@pytest.mark.parametrize(
    "host",
    [
        "", ".", "example.com.", "example.com..", ".example.com", "a..example.com", "*.example.com",
        "ex\u0430mple.com", "exa\u00admple.com", "b\u00fccher.example", "a_b.example.com",
        "-a.example.com", "a-.example.com", "x" * 64 + ".com", ".".join(["x" * 49] * 5) + ".abcd",
        "user@example.com", "example.com/", "http://example.com", "example.com\r\n",
        "exa\0mple.com", "example .com", "\texample.com", "example.com#", "\udcff.com",
        "x" * 100_000, "\u212a.example.com",
    ],
)  # fmt: skip
async def test_what_is_no_plain_name_is_malformed_bounded_and_escaped(host: str) -> None:
    resolver = Resolver()
    found = await refused(host, policy=allowlist((host, (443,))), resolver=resolver)
    assert found.reason is EgressRefusal.HOST_MALFORMED
    assert len(found.host) <= 255
    assert resolver.asked == []


@pytest.mark.case("EGR-19")
@pytest.mark.parametrize(
    "host",
    ["xn--bcher-kva.example", "XN--BCHER-KVA.EXAMPLE", "xn--zzzzzzzzzz.example"],
)
async def test_a_label_in_ascii_form_is_matched_literally(host: str) -> None:
    resolver = Resolver()
    found = await judge(host, policy=allowlist((host.lower(), (443,))), resolver=resolver)
    assert isinstance(found, Allowed)
    assert resolver.asked == [host.lower()]


@pytest.mark.case("EGR-12")
async def test_a_single_label_is_not_looked_up_even_if_a_policy_lists_it() -> None:
    resolver = Resolver()
    found = await refused("intranet", policy=allowlist(("intranet", (443,))), resolver=resolver)
    assert found.reason is EgressRefusal.HOST_NOT_QUALIFIED
    assert resolver.asked == []


@pytest.mark.case("EGR-12")
@pytest.mark.parametrize("host", ["printer.local", "db.internal", "app.localhost", "a.example"])
@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.5", "192.168.1.9", "fe80::9", "::1"])
async def test_a_name_is_judged_by_its_final_addresses_whatever_it_is(
    host: str, address: str
) -> None:
    policy = allowlist((host, (443,)))
    found = await refused(host, policy=policy, resolver=Resolver([address]))
    assert found.reason is EgressRefusal.ADDRESS_REFUSED
    assert found.address == address
    assert isinstance(await judge(host, policy=policy), Allowed)  # control


@pytest.mark.parametrize("port", [0, -1, 65536, 10**12])
async def test_a_number_that_is_no_port_is_malformed(port: int) -> None:
    found = await refused("example.com", port)
    assert found.reason is EgressRefusal.PORT_MALFORMED
    assert found.reason in MALFORMED


@pytest.mark.case("EGR-07")
async def test_there_is_one_lookup_though_the_second_would_answer_otherwise() -> None:
    for answers in ([PUBLIC], ["169.254.169.254"]), (["169.254.169.254"], [PUBLIC]):
        resolver = Resolver(*answers)
        found = await judge("example.com", resolver=resolver)
        assert resolver.asked == ["example.com"]
        assert isinstance(found, Allowed) == (answers[0] == [PUBLIC])
        if isinstance(found, Allowed):
            assert found.addresses == (PUBLIC,)


@pytest.mark.case("EGR-08")
@pytest.mark.parametrize("position", [0, 31, 63])
@pytest.mark.parametrize("bad", ["10.0.0.1", "fd00::1", "::ffff:127.0.0.1", "nonsense"])
async def test_one_bad_address_among_64_refuses_all(position: int, bad: str) -> None:
    answers = [f"93.184.216.{each}" for each in range(64)]
    assert isinstance(await judge("example.com", resolver=Resolver(answers)), Allowed)  # control
    answers[position] = bad
    found = await refused("example.com", resolver=Resolver(answers))
    assert found.address == bad
    assert found.reason in (EgressRefusal.ADDRESS_REFUSED, EgressRefusal.ADDRESS_MALFORMED)


async def test_a_refusal_by_address_names_the_rule_the_address_and_the_range() -> None:
    found = await refused("example.com", resolver=Resolver([PUBLIC, "::ffff:169.254.169.254"]))
    assert found.rule == "example.com:443"
    assert found.address == "::ffff:169.254.169.254"
    assert found.address_range == "instance metadata (169.254.169.254/32)"
    assert "169.254.169.254" in found.detail
    assert "No configuration" in found.remedy


async def test_the_hosts_own_network_has_a_reason_of_its_own() -> None:
    found = await refused("example.com", host_network=HostNetwork.of([f"{PUBLIC}/24"]))
    assert found.reason is EgressRefusal.HOST_NETWORK
    assert found.address_range == "93.184.216.0/24"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (OSError(-2, "Name or service not known"), EgressRefusal.RESOLUTION_FAILED),
        (OSError(), EgressRefusal.RESOLUTION_FAILED),
        (OSError(1, "\r\nX: y" + "z" * 999), EgressRefusal.RESOLUTION_FAILED),
        (TimeoutError(), EgressRefusal.RESOLUTION_TIMED_OUT),
        ([], EgressRefusal.NO_ADDRESS),
        (["8.8.8.8"] * (ADDRESSES_MAX + 1), EgressRefusal.TOO_MANY_ADDRESSES),
        (["fe80::1%eth0"], EgressRefusal.ADDRESS_MALFORMED),
        (["\u0661.2.3.4\n"], EgressRefusal.ADDRESS_MALFORMED),
    ],
)
async def test_a_lookup_that_brings_nothing_is_a_refusal_after_one_lookup(
    answer: list[str] | OSError, reason: EgressRefusal
) -> None:
    resolver = Resolver(answer)
    found = await refused("example.com", resolver=resolver)
    assert found.reason is reason
    assert found.rule == "example.com:443"
    assert resolver.asked == ["example.com"]


async def test_what_a_resolver_gets_wrong_is_not_swallowed() -> None:
    with pytest.raises(KeyError):
        await judge("example.com", resolver=Resolver(KeyError("bug")))


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(st.text(max_size=80), st.integers(-5, 70000), st.lists(st.text(max_size=20), max_size=3))
def test_whatever_is_asked_and_answered_is_judged_and_the_text_is_one_bounded_line(
    host: str, port: int, answers: list[str]
) -> None:
    for policy, asked in ((POLICY, host), (POLICY, "example.com")):
        coroutine = judge(asked, port, policy=policy, resolver=Resolver(answers))
        with pytest.raises(StopIteration) as ended:
            coroutine.send(None)
        found = ended.value.value
        if isinstance(found, Refused):
            for text in (found.host, found.detail, found.remedy, found.address or "x"):
                assert text.isascii()
                assert text.isprintable()
                assert len(text) < 1000
