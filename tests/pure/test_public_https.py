"""The two rules of code: what they cover, that each refuses in its own name, and that nothing that
is read from outside can choose them."""

from collections.abc import Sequence

import msgspec
import pytest

from sbxd.policy.addresses import HostNetwork
from sbxd.policy.egress import Allowed, EgressRefusal, Refused, evaluate
from sbxd.policy.public_https import BROWSER_PAGE, UNSUBSCRIBE, PublicHttps
from sbxd.port.egress import EgressMode, EgressPolicy
from sbxd.port.environment import EnvironmentSpec
from sbxd.settings import Settings
from sbxd.wire import messages

OWN_REFUSAL = {
    BROWSER_PAGE: EgressRefusal.PAGE_NOT_PUBLIC_HTTPS,
    UNSUBSCRIBE: EgressRefusal.UNSUBSCRIBE_NOT_PUBLIC_HTTPS,
}
NOTHING_MORE = HostNetwork()


async def judge(
    transport: PublicHttps, host: str, port: int = 443, answers: Sequence[str] = ("8.8.8.8",)
) -> tuple[Allowed | Refused, int]:
    """The decision, and how many lookups it took."""
    asked = []

    async def resolve(name: str) -> Sequence[str]:
        asked.append(name)
        return answers

    return await evaluate(transport, host, port, resolve, NOTHING_MORE), len(asked)


@pytest.fixture(params=[BROWSER_PAGE, UNSUBSCRIBE], ids=repr)
def transport(request: pytest.FixtureRequest) -> PublicHttps:
    assert isinstance(request.param, PublicHttps)
    return request.param


@pytest.mark.parametrize(
    "host", ["example.com", "A.B.c.Example.COM", "xn--bcher-kva.example.net", "a.xn--p1ai"]
)
async def test_any_public_name_is_reached_on_443_after_one_lookup(
    transport: PublicHttps, host: str
) -> None:
    found = await judge(transport, host)
    assert found == (
        Allowed(host=host.lower(), port=443, addresses=("8.8.8.8",), rule=transport.name),
        1,
    )


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("example.com", 80),
        ("example.com", 8443),
        ("localhost", 443),
        ("com", 443),
        ("printer.local", 443),
        ("metadata.google.internal", 443),
        ("router.home.arpa", 443),
        ("x.onion", 443),
        ("x.localhost", 443),
        ("db.corp", 443),
        ("a.3com", 443),
        ("a.x", 443),
    ],
)
async def test_anything_else_is_refused_in_the_transports_own_name_without_a_lookup(
    transport: PublicHttps, host: str, port: int
) -> None:
    found, lookups = await judge(transport, host, port)
    assert isinstance(found, Refused)
    assert found.reason is OWN_REFUSAL[transport]
    assert found.rule == transport.name
    assert lookups == 0


async def test_the_addresses_are_judged_as_for_a_listed_host(transport: PublicHttps) -> None:
    for answers in (("169.254.169.254",), ("8.8.8.8", "::ffff:10.0.0.1"), ("2002:808:808::1",)):
        found, lookups = await judge(transport, "example.com", answers=answers)
        assert isinstance(found, Refused)
        assert found.reason is EgressRefusal.ADDRESS_REFUSED
        assert found.rule == transport.name
        assert lookups == 1


async def test_an_address_is_malformed_here_too(transport: PublicHttps) -> None:
    for host in ("8.8.8.8", "[2606:4700::1]", "example.com."):
        found, lookups = await judge(transport, host)
        assert isinstance(found, Refused)
        assert found.reason is EgressRefusal.HOST_MALFORMED
        assert lookups == 0


def test_the_two_are_told_apart_in_every_record() -> None:
    assert BROWSER_PAGE.name != UNSUBSCRIBE.name
    assert len(set(OWN_REFUSAL.values())) == 2


# --- no serialised policy selects one ------------------------------------------------------------


def types_within(*kinds: type) -> list[msgspec.inspect.Type]:
    """Every type that decoding one of `kinds` can make."""
    pending = list(msgspec.inspect.multi_type_info(kinds))
    seen: dict[int, msgspec.inspect.Type] = {}
    while pending:
        info = pending.pop()
        if id(info) in seen:
            continue
        seen[id(info)] = info
        for name in info.__struct_fields__:
            value = getattr(info, name)
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, msgspec.inspect.Type):
                    pending.append(each)
                elif isinstance(each, msgspec.inspect.Field):
                    pending.append(each.type)
    return list(seen.values())


def structs_of(found: list[msgspec.inspect.Type]) -> set[type]:
    return {info.cls for info in found if isinstance(info, msgspec.inspect.StructType)}


def messages_below(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return [kind, *(each for sub in below for each in messages_below(sub))]


def test_no_message_specification_or_configuration_contains_one() -> None:
    found = types_within(Settings, EnvironmentSpec, *messages_below(messages.Message))
    loose = (msgspec.inspect.CustomType, msgspec.inspect.AnyType, msgspec.inspect.ExtType)
    assert [info for info in found if isinstance(info, loose)] == []
    # Control: the walk descends to the policy from both sides, and sees a type that is loose.
    for root in (Settings, EnvironmentSpec):
        assert any(issubclass(each, EgressPolicy) for each in structs_of(types_within(root)))
    selectable = msgspec.defstruct("Selectable", [("rules", tuple[PublicHttps, ...])])
    assert any(isinstance(info, loose) for info in types_within(selectable))


def test_the_type_is_none_that_a_decoder_can_make() -> None:
    for data in (b'"public-https:browser-page"', b"{}", b'{"name": "x", "refusal": "y"}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(data, type=PublicHttps)


def test_the_policy_has_exactly_the_modes_and_fields_of_the_grammar() -> None:
    assert {str(mode) for mode in EgressMode} == {"deny", "allowlist"}
    assert EgressPolicy.__struct_fields__ == ("mode", "destinations")
    for transport in OWN_REFUSAL:
        with pytest.raises(TypeError):
            msgspec.json.encode(transport)


async def test_listing_the_transports_name_as_a_destination_selects_nothing() -> None:
    policy = msgspec.json.decode(
        '{"mode": "allowlist",'
        ' "destinations": [{"host": "public-https:browser-page", "ports": [443]}]}',
        type=EgressPolicy,
    )

    async def resolve(name: str) -> Sequence[str]:
        raise AssertionError(name)

    found = await evaluate(policy, "example.com", 443, resolve, NOTHING_MORE)
    assert isinstance(found, Refused)
    assert found.reason is EgressRefusal.HOST_NOT_LISTED
