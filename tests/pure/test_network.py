"""The two yeses as a rule, what they grant, and the variables that they bring."""

import msgspec
import pytest

from sbxd.policy.child_environment import (
    PROXY_NAMES,
    PROXY_VARIABLES,
    Network,
    Tier,
    build,
    operator_name_problems,
    tier_of,
)
from sbxd.policy.network import has_both_yeses, network_grant, network_shape
from sbxd.port.command import ExecutionCommand
from sbxd.port.egress import DENY_ALL, EgressDestination, EgressMode, EgressPolicy
from sbxd.port.network import NetworkShape
from sbxd.settings import EgressSettings

LISTED = EgressPolicy(
    mode=EgressMode.ALLOWLIST,
    destinations=(EgressDestination(host="A.example.org", ports=(8443, 443)),),
)
EMPTY = EgressPolicy(mode=EgressMode.ALLOWLIST)


def command(*, network_enabled: bool) -> ExecutionCommand:
    return ExecutionCommand(
        argv=("true",),
        working_directory=".",
        timeout_seconds=5,
        stdin=None,
        maximum_output_bytes=1,
        network_enabled=network_enabled,
    )


@pytest.mark.parametrize("policy", [DENY_ALL, EMPTY, LISTED], ids=["deny", "empty", "listed"])
@pytest.mark.parametrize("asks", [False, True])
def test_it_takes_both_yeses_and_a_destination(policy: EgressPolicy, asks: bool) -> None:
    wanted = policy is LISTED and asks
    assert has_both_yeses(policy, command(network_enabled=asks)) is wanted


def test_only_what_lists_a_destination_is_built_with_a_port() -> None:
    shapes = [network_shape(policy) for policy in (DENY_ALL, EMPTY, LISTED)]
    assert shapes == [NetworkShape.NONE, NetworkShape.NONE, NetworkShape.PROXY_PORT]


def test_a_grant_is_the_operators_list_in_canonical_form_and_fits_a_specification() -> None:
    operator = EgressSettings(
        mode=LISTED.mode, destinations=LISTED.destinations, require_matching_sni=True
    )
    grant = network_grant(operator)
    assert type(grant) is EgressPolicy
    assert grant.destinations == (EgressDestination(host="a.example.org", ports=(443, 8443)),)
    assert msgspec.convert(msgspec.to_builtins(grant), EgressPolicy) == grant
    assert network_grant(EgressSettings()) == DENY_ALL


def test_the_variables_come_with_the_network_and_never_without() -> None:
    without = build({}, ())
    assert not {name.upper() for name in without} & PROXY_NAMES
    assert build({}, (), network=Network.PROXY) == {**without, **PROXY_VARIABLES}


def test_the_proxys_variables_are_reserved_in_every_case() -> None:
    assert {name.upper() for name in PROXY_VARIABLES} <= PROXY_NAMES | {"NODE_USE_ENV_PROXY"}
    assert all(tier_of(name) is Tier.SYNTHESISED for name in PROXY_VARIABLES)
    for name in PROXY_NAMES:
        for spelled in (name, name.lower(), name.title()):
            assert tier_of(spelled) is Tier.SYNTHESISED
            assert operator_name_problems((spelled,))
