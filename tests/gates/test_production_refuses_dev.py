"""gate.sandbox.production_refuses_dev: no development mechanism where strangers' code runs.

Parameterized over the complement of {microvm, gvisor}, so that a new value of the enum is
refused from its first day. Each refusal has its positive control: the same settings on a
development host start.
"""

import pytest

from sbxd.config import (
    ISOLATING_MECHANISMS,
    CredentialState,
    StartupRefusal,
    decode,
    startup_refusals,
)
from sbxd.settings import AuthMode, DeploymentMode, SandboxMechanism, Settings

pytestmark = pytest.mark.gate("gate.sandbox.production_refuses_dev")

COMPLEMENT = sorted(set(SandboxMechanism) - {SandboxMechanism.MICROVM, SandboxMechanism.GVISOR})
GUARDED_AUTH_MODES = sorted(set(AuthMode) - {AuthMode.DEV})


def refusals(
    deployment_mode: DeploymentMode, auth_mode: AuthMode, sandbox: SandboxMechanism
) -> tuple[StartupRefusal, ...]:
    settings = decode(
        f'deployment_mode = "{deployment_mode}"\n'
        f'auth_mode = "{auth_mode}"\n'
        f'sandbox = "{sandbox}"\n'.encode()
    )
    return startup_refusals(settings, credential=CredentialState.PRESENT)


def test_the_complement_is_what_this_gate_covers() -> None:
    assert frozenset({SandboxMechanism.MICROVM, SandboxMechanism.GVISOR}) == ISOLATING_MECHANISMS
    assert SandboxMechanism.NAMESPACES in COMPLEMENT
    assert SandboxMechanism.FAKE in COMPLEMENT
    assert GUARDED_AUTH_MODES


@pytest.mark.parametrize("auth_mode", AuthMode)
@pytest.mark.parametrize("sandbox", COMPLEMENT)
def test_production_refuses_every_mechanism_without_a_kernel_of_its_own(
    sandbox: SandboxMechanism, auth_mode: AuthMode
) -> None:
    named = [each.settings for each in refusals(DeploymentMode.PRODUCTION, auth_mode, sandbox)]
    assert (("deployment_mode", "production"), ("sandbox", str(sandbox))) in named


@pytest.mark.parametrize("deployment_mode", DeploymentMode)
@pytest.mark.parametrize("auth_mode", GUARDED_AUTH_MODES)
@pytest.mark.parametrize("sandbox", COMPLEMENT)
def test_real_credentials_refuse_every_mechanism_without_a_kernel_of_its_own(
    sandbox: SandboxMechanism, auth_mode: AuthMode, deployment_mode: DeploymentMode
) -> None:
    named = [each.settings for each in refusals(deployment_mode, auth_mode, sandbox)]
    assert (("auth_mode", str(auth_mode)), ("sandbox", str(sandbox))) in named


@pytest.mark.parametrize("sandbox", COMPLEMENT)
def test_the_message_names_both_settings_and_their_values(sandbox: SandboxMechanism) -> None:
    texts = [str(each) for each in refusals(DeploymentMode.PRODUCTION, AuthMode.TOKEN, sandbox)]
    assert any(f"deployment_mode = production and sandbox = {sandbox}" in text for text in texts)
    assert any(f"auth_mode = token and sandbox = {sandbox}" in text for text in texts)


@pytest.mark.parametrize("sandbox", COMPLEMENT)
def test_control_a_development_host_starts_with_it(sandbox: SandboxMechanism) -> None:
    assert refusals(DeploymentMode.DEVELOPMENT, AuthMode.DEV, sandbox) == ()


@pytest.mark.parametrize("sandbox", sorted(ISOLATING_MECHANISMS))
def test_control_production_starts_with_a_kernel_of_its_own(sandbox: SandboxMechanism) -> None:
    assert refusals(DeploymentMode.PRODUCTION, AuthMode.TOKEN, sandbox) == ()


def test_nothing_in_the_configuration_lifts_the_refusal() -> None:
    """Every switch of the settings that could look like a way around it, thrown."""
    settings = decode(
        b'sandbox = "namespaces"\nallow_software_emulation = true\n'
        b'[limits]\nallow_unenforced_limits = ["memory", "pids", "cpu", "volume"]\n'
    )
    assert settings.deployment_mode is Settings().deployment_mode
    found = startup_refusals(settings, credential=CredentialState.PRESENT)
    named = [refusal.settings for refusal in found]
    assert (("deployment_mode", "production"), ("sandbox", "namespaces")) in named
    assert (("auth_mode", "token"), ("sandbox", "namespaces")) in named
