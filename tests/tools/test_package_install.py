"""PACKAGE_INSTALL: denied by default, and consulted where the network would reach a registry."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from agents.sandbox import ExecTransportError

from sbxd.client.blocking import blocking_scope
from sbxd.client.run_scope import RunScope
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.fake.environment import ExecuteCall, FakeExecutionEnvironment
from sbxd.fake.script import Script
from sbxd.policy.registries import REGISTRIES, registries_of
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy
from sbxd.settings import EgressSettings
from sbxd.tools.deepagents_backend import RunBackend
from sbxd.tools.network_use import PackageInstallDenied, network_enabled
from sbxd.tools.openai_sandbox import RunSession
from sbxd.tools.tool import DEFAULT_ALLOWED, Profile, SideEffect, ToolName
from sbxd.tools.toolbox import Toolbox
from tests.tools.test_openai_sandbox import SCRIPT as SHELL
from tests.tools.world import SCRIPT, SPECIFICATION

NETWORK = DEFAULT_ALLOWED | {SideEffect.SANDBOX_NETWORK}
BOTH = NETWORK | {SideEffect.PACKAGE_INSTALL}


def policy(*hosts: str) -> EgressPolicy:
    listed = tuple(EgressDestination(host=host, ports=(443,)) for host in hosts)
    return EgressPolicy(mode=EgressMode.ALLOWLIST, destinations=listed)


PLAIN, WITH_REGISTRY = policy("api.example.org"), policy("api.example.org", "pypi.org")


@pytest.mark.parametrize("registry", sorted(REGISTRIES))
def test_a_registry_is_one_by_its_name_below_it_and_by_a_wildcard(registry: str) -> None:
    parent = registry.partition(".")[2]
    covering = [registry, registry.upper(), f"files.{registry}", f"*.{registry}"]
    covering += [f"*.{parent}"] if "." in parent else []
    for host in covering:
        assert registries_of(policy(host)) == (host,), host
    for host in (f"not{registry}", f"{registry}.example.org"):
        assert registries_of(policy(host)) == (), host


def test_a_mirror_is_one_when_the_deployment_says_so() -> None:
    mirrored = policy("mirror.example.org", "api.example.org")
    assert registries_of(mirrored) == ()
    assert registries_of(mirrored, ["Mirror.example.org"]) == ("mirror.example.org",)


def test_the_network_reaches_a_registry_only_with_both() -> None:
    assert Profile().registries == ()
    assert SideEffect.PACKAGE_INSTALL not in DEFAULT_ALLOWED
    assert not network_enabled(Profile(), WITH_REGISTRY)
    assert not network_enabled(Profile(BOTH - {SideEffect.SANDBOX_NETWORK}), WITH_REGISTRY)
    assert network_enabled(Profile(NETWORK), PLAIN)
    assert network_enabled(Profile(BOTH), WITH_REGISTRY)
    with pytest.raises(PackageInstallDenied, match=r"pypi\.org") as denied:
        network_enabled(Profile(NETWORK), WITH_REGISTRY)
    assert denied.value.registries == ("pypi.org",)
    with pytest.raises(PackageInstallDenied):
        network_enabled(Profile(NETWORK, ("api.example.org",)), PLAIN)


@asynccontextmanager
async def scope_over(
    environment: FakeExecutionEnvironment, egress: EgressPolicy
) -> AsyncIterator[RunScope]:
    wanted = msgspec.structs.replace(SPECIFICATION, egress=egress)
    async with RunScope(environment, wanted, environment.workspace) as scope:
        yield scope


def fake(script: Script = SHELL) -> FakeExecutionEnvironment:
    settings = msgspec.structs.replace(
        FAKE_SETTINGS,
        egress=EgressSettings(mode=EgressMode.ALLOWLIST, destinations=WITH_REGISTRY.destinations),
    )
    return FakeExecutionEnvironment(script, settings=settings)


def networks(environment: FakeExecutionEnvironment) -> list[bool]:
    return [
        each.command.network_enabled for each in environment.calls if isinstance(each, ExecuteCall)
    ]


async def test_the_toolbox_refuses_the_call_and_takes_an_approval_for_both() -> None:
    environment = fake(SCRIPT)
    async with scope_over(environment, WITH_REGISTRY) as scope:
        tools = Toolbox(scope, None)
        call = {"command": ["true"]}
        with pytest.raises(PackageInstallDenied):
            await tools.call(
                ToolName.RUN_COMMAND, call, approved=frozenset({SideEffect.SANDBOX_NETWORK})
            )
        assert environment.calls == [], "nothing was provisioned for it"
        await tools.call(ToolName.RUN_COMMAND, call)
        await tools.call(
            ToolName.RUN_COMMAND,
            call,
            approved=frozenset({SideEffect.SANDBOX_NETWORK, SideEffect.PACKAGE_INSTALL}),
        )
        mirrored = Toolbox(scope, None, profile=Profile(NETWORK, ("api.example.org",)))
        with pytest.raises(PackageInstallDenied):
            await mirrored.call(ToolName.RUN_COMMAND, call)
    assert networks(environment) == [False, True]


def test_a_sandbox_session_refuses_it_too() -> None:
    environment = fake()

    async def main() -> None:
        async with scope_over(environment, WITH_REGISTRY) as scope:
            with pytest.raises(ExecTransportError, match="PACKAGE_INSTALL"):
                await RunSession(scope, profile=Profile(NETWORK)).exec("fails")
            await RunSession(scope, profile=Profile(BOTH)).exec("fails")

    asyncio.run(main())
    assert networks(environment) == [True]


def test_a_backend_refuses_it_too() -> None:
    environment = fake()
    with blocking_scope(lambda: scope_over(environment, WITH_REGISTRY)) as sandbox:
        denied = RunBackend(sandbox, profile=Profile(NETWORK))
        for response in (denied.execute("fails"), asyncio.run(denied.aexecute("fails"))):
            assert response.exit_code == 126
            assert "PACKAGE_INSTALL" in response.output
        RunBackend(sandbox, profile=Profile(BOTH)).execute("fails")
    assert networks(environment) == [True]
