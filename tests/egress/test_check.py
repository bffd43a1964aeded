"""An operator's check is a connection's judgement, without the connection."""

from typing import Any

import pytest

from sbxd.egress.check import check
from sbxd.policy.addresses import HostNetwork
from sbxd.policy.egress import Allowed, EgressRefusal, Refused
from sbxd.port.egress import EgressMode
from tests.egress.world import HOST, POLICY, PUBLIC, World, open_world

SETTINGS: dict[str, Any] = {"mode": EgressMode.ALLOWLIST, "destinations": POLICY.destinations}


async def judged(here: World, host: str, port: int = 443) -> Allowed | Refused:
    return await check(here.parts, here.resolver.share().resolve, host, port)


async def test_a_check_looks_up_once_and_neither_dials_charges_nor_records() -> None:
    async with open_world(**SETTINGS) as here:
        found = await judged(here, HOST.upper())
        assert isinstance(found, Allowed)
        assert (found.host, found.addresses) == (HOST, (PUBLIC,))
        assert (here.lookups, here.dials, here.charges, here.records) == ([f"{HOST}."], [], 0, [])
        async with here.tunnel():  # the control: a connection does all of it
            assert (len(here.lookups), len(here.dials), here.charges) == (2, 1, 1)


@pytest.mark.parametrize(
    ("host", "port", "answers", "reason", "lookups"),
    [
        ("10.0.0.1", 443, (), EgressRefusal.HOST_MALFORMED, 0),
        (HOST, 0, (), EgressRefusal.PORT_MALFORMED, 0),
        ("other.example.org", 443, (), EgressRefusal.HOST_NOT_LISTED, 0),
        (HOST, 444, (), EgressRefusal.PORT_NOT_LISTED, 0),
        (HOST, 443, (PUBLIC, "10.0.0.1"), EgressRefusal.ADDRESS_REFUSED, 1),
        (HOST, 443, (), EgressRefusal.NO_ADDRESS, 1),
    ],
)
async def test_a_refusal_has_the_reason_of_a_connection(
    host: str, port: int, answers: tuple[str, ...], reason: EgressRefusal, lookups: int
) -> None:
    async with open_world(**SETTINGS) as here:
        here.answers = lambda _: answers
        found = await judged(here, host, port)
        assert isinstance(found, Refused)
        assert (found.reason, len(here.lookups)) == (reason, lookups)


async def test_the_hosts_network_is_asked_at_each_check() -> None:
    async with open_world(**SETTINGS) as here:
        assert isinstance(await judged(here, HOST), Allowed)
        grown = HostNetwork().including([f"{PUBLIC}/32"])
        object.__setattr__(here.parts, "host_network", grown)
        found = await judged(here, HOST)
        assert isinstance(found, Refused)
        assert (found.reason, found.address) == (EgressRefusal.HOST_NETWORK, PUBLIC)


async def test_under_mode_deny_everything_is_refused_and_nothing_is_looked_up() -> None:
    async with open_world() as here:
        found = await judged(here, HOST)
        assert isinstance(found, Refused)
        assert (found.reason, here.lookups) == (EgressRefusal.MODE_DENY, [])
