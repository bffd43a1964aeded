"""A host without AppArmor in production: refused, or accepted in writing and said every time."""

import pytest

from sbxd.config import ConfigError, decode
from sbxd.host import HostRefused, accepted_missing, layer_refusals, refuse_host
from sbxd.settings import Settings
from sbxd.wire.descriptions import PostureItem

PRODUCTION = Settings()
ACCEPTING = decode(b'accept_missing_layers = ["apparmor"]')
DEVELOPMENT = decode(b'deployment_mode = "development"\nauth_mode = "dev"\nsandbox = "namespaces"')


def apparmor(state: str) -> tuple[PostureItem, ...]:
    return (
        PostureItem(name="kernel", state="ok", detail="6.12"),
        PostureItem(
            name="apparmor", state=state, detail="AppArmor is so", fix="boot with apparmor=1"
        ),
    )


def test_production_refuses_a_host_without_it_and_says_how_to_go_on() -> None:
    (refusal,) = layer_refusals(PRODUCTION, apparmor("degraded"))
    text = str(refusal)
    assert "deployment_mode = production and apparmor of this host = degraded" in text
    assert "Boot with apparmor=1" in text
    assert 'accept_missing_layers = ["apparmor"]' in text
    with pytest.raises(HostRefused) as caught:
        refuse_host(PRODUCTION, apparmor("degraded"))
    assert caught.value.refusals == (refusal,)


def test_what_the_operator_has_accepted_is_no_refusal_and_is_recorded() -> None:
    assert layer_refusals(ACCEPTING, apparmor("degraded")) == ()
    refuse_host(ACCEPTING, apparmor("degraded"))
    (event,) = accepted_missing(ACCEPTING, apparmor("degraded"))
    assert (event.layer, event.detail) == ("apparmor", "AppArmor is so")


def test_a_profile_that_is_not_loaded_is_a_fault_that_nobody_may_accept() -> None:
    (refusal,) = layer_refusals(ACCEPTING, apparmor("missing"))
    assert "accept_missing_layers" not in str(refusal)


def test_a_posture_that_says_nothing_of_it_is_a_refusal() -> None:
    assert layer_refusals(PRODUCTION, ())
    assert layer_refusals(PRODUCTION, apparmor("not_checked"))


def test_control_a_host_that_has_it_is_served_and_nothing_is_recorded() -> None:
    for settings in (PRODUCTION, ACCEPTING):
        assert layer_refusals(settings, apparmor("ok")) == ()
        assert accepted_missing(settings, apparmor("ok")) == ()


def test_control_a_development_host_may_be_without() -> None:
    assert layer_refusals(DEVELOPMENT, apparmor("degraded")) == ()


def test_only_a_layer_that_may_be_accepted_can_be_named() -> None:
    with pytest.raises(ConfigError):
        decode(b'accept_missing_layers = ["seccomp"]')
