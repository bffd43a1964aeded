"""The two yeses: what a command with both gets, when it begins and ends, and what others get."""

from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.audit.events import BudgetWasExhausted, CommandStarted
from sbxd.policy.child_environment import PROXY_VARIABLES
from sbxd.port.command import KillReason
from sbxd.port.egress import DENY_ALL, EgressDestination, EgressMode, EgressPolicy
from sbxd.port.errors import BudgetExhausted, ExecutionRejected, ExecutionUnavailable, RejectedCode
from sbxd.port.limits import EnvironmentBudgets
from sbxd.settings import EgressSettings, Settings
from tests.lifecycle.double import PROXY_LISTENER, Behaviour
from tests.lifecycle.world import DEFAULT, WITH_RESERVE, WORKER, World, command, open_world, spec

LISTED = (EgressDestination(host="pypi.example.org", ports=(443,)),)
ALLOWLIST = EgressPolicy(mode=EgressMode.ALLOWLIST, destinations=LISTED)
OPERATOR = EgressSettings(mode=EgressMode.ALLOWLIST, destinations=LISTED)
WITH_EGRESS = msgspec.structs.replace(DEFAULT, egress=OPERATOR)
ASKS = msgspec.structs.replace(command(), network_enabled=True)


def variables(world: World) -> dict[bytes, bytes]:
    """Of the last command that was started."""
    return dict(world.mechanism.sandboxes[-1].commands[-1].spec.environment)


async def test_with_both_yeses_the_proxy_serves_exactly_while_the_command_runs(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_EGRESS) as world:
        handle = await world.environments.provision(WORKER, spec(egress=ALLOWLIST))
        world.mechanism.calls.clear()
        await world.run(handle, Behaviour(seconds=5), ask=ASKS)
        calls = [each for each in world.mechanism.calls if each != "aclose"]
        assert calls == ["network begin", "start", "network end", "changes"]
        (network,) = world.egress.networks
        assert network.use.listener == PROXY_LISTENER
        assert network.use.policy == ALLOWLIST
        assert network.use.run_id == "run"
        assert PROXY_VARIABLES.keys() == {
            *("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "NO_PROXY", "no_proxy"),
            "NODE_USE_ENV_PROXY",
        }
        for name, value in PROXY_VARIABLES.items():
            assert variables(world)[name.encode()] == value.encode()
        assert world.sink.of(CommandStarted)[0].network_enabled


@pytest.mark.parametrize("missing", ["the command's", "the operator's", "both"])
async def test_without_either_yes_there_is_no_network_and_no_variable(
    missing: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    policy = ALLOWLIST if missing == "the command's" else DENY_ALL
    ask = ASKS if missing == "the operator's" else command()
    async with open_world(tmp_path, settings=WITH_EGRESS) as world:
        handle = await world.environments.provision(WORKER, spec(egress=policy))
        await world.run(handle, Behaviour(seconds=5), ask=ask)
        assert world.egress.networks == []
        assert not {name.upper() for name in variables(world)} & {b"HTTP_PROXY", b"NO_PROXY"}


@pytest.mark.parametrize("name", ["HTTP_PROXY", "https_proxy", "No_Proxy", "ALL_PROXY"])
async def test_a_tenant_cannot_set_a_proxy_variable_whatever_the_operator_lists(
    name: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_EGRESS) as world:
        wanted = msgspec.structs.replace(spec(egress=ALLOWLIST), environment={name: "x"})
        with pytest.raises(ExecutionRejected) as caught:
            await world.environments.provision(WORKER, wanted)
        assert caught.value.code is RejectedCode.ENVIRONMENT_NAME_REFUSED


async def test_a_slot_with_the_port_serves_an_environment_without_and_gives_it_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    settings = msgspec.structs.replace(WITH_RESERVE, egress=OPERATOR)
    async with open_world(tmp_path, settings=settings) as world:
        await trio.sleep(5)
        first, second = world.mechanism.sandboxes
        assert {first.proxy_listener, second.proxy_listener} == {PROXY_LISTENER}
        await world.environments.provision(WORKER, spec(run="denied"))
        assert first.proxy_listener is None
        await world.environments.provision(WORKER, spec(run="allowed", egress=ALLOWLIST))
        assert second.assigned
        assert second.proxy_listener == PROXY_LISTENER


@pytest.mark.parametrize("settings", [DEFAULT, WITH_EGRESS], ids=["deny", "allowlist"])
async def test_a_destination_of_nobodys_list_is_refused_at_admission(
    settings: Settings, tmp_path: Path, autojump_clock: MockClock
) -> None:
    other = EgressDestination(host="evil.example.net", ports=(443,))
    async with open_world(tmp_path, settings=settings) as world:
        policy = EgressPolicy(mode=EgressMode.ALLOWLIST, destinations=(other,))
        with pytest.raises(ExecutionRejected) as caught:
            await world.environments.provision(WORKER, spec(egress=policy))
        assert caught.value.code is RejectedCode.DESTINATION_NOT_CONFIGURED
        assert world.mechanism.sandboxes == []


async def test_every_command_of_an_environment_has_the_one_proxy_by_its_number(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_EGRESS) as world:
        handle = await world.environments.provision(WORKER, spec(egress=ALLOWLIST))
        for ask in (ASKS, command(), ASKS):
            await world.run(handle, Behaviour(seconds=1), ask=ask)
        (network,) = world.egress.networks
        assert network.begun == [1, 3]


@pytest.mark.parametrize("way", ["destroy", "cancel", "timeout", "caller"])
async def test_the_network_ends_with_the_command_whatever_ends_that(
    way: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_EGRESS) as world:
        handle = await world.environments.provision(WORKER, spec(egress=ALLOWLIST))
        cancelled = trio.Event()

        async def run() -> None:
            await world.run(handle, Behaviour(seconds=None), ask=ASKS, cancelled=cancelled)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            (network,) = world.egress.networks
            assert network.begun == [1]
            assert network.open_for is not None
            match way:
                case "destroy":
                    await world.environments.destroy(WORKER, handle)
                case "cancel":
                    cancelled.set()
                case "caller":
                    nursery.cancel_scope.cancel()
                case "timeout":
                    await trio.sleep(60)
        assert world.egress.networks[0].open_for is None
        await world.environments.destroy(WORKER, handle)
        await wait_all_tasks_blocked()
        calls = world.mechanism.calls
        assert calls.index("network end") < calls.index("network close") < calls.index("destroy")
        assert calls[-1] == "network settle"


async def test_a_network_that_does_not_end_in_time_costs_the_environment(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_EGRESS) as world:
        handle = await world.environments.provision(WORKER, spec(egress=ALLOWLIST))
        world.egress.end_seconds = 1000.0
        result = await world.run(handle, Behaviour(seconds=1), ask=ASKS)
        assert result.exit_code == 0
        with pytest.raises(ExecutionRejected) as caught:
            world.environments.attempt(WORKER, handle)
        assert caught.value.code is RejectedCode.ENVIRONMENT_GONE
        await trio.sleep(100)
        assert world.consistent_and_empty()


async def test_a_proxy_that_cannot_listen_stops_the_command_before_it_starts(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_EGRESS) as world:
        handle = await world.environments.provision(WORKER, spec(egress=ALLOWLIST))
        world.egress.fails = True
        with pytest.raises(ExecutionUnavailable):
            await world.run(handle, Behaviour(seconds=1), ask=ASKS)
        assert "start" not in world.mechanism.calls
        await trio.sleep(1)
        assert world.consistent_and_empty()


async def test_each_connection_is_an_operation_and_the_last_ends_the_environment(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, settings=WITH_EGRESS) as world:
        budgets = EnvironmentBudgets(
            operations_max=2, returned_bytes_max=1000, wall_seconds_max=1000
        )
        wanted = msgspec.structs.replace(spec(egress=ALLOWLIST), budgets=budgets)
        handle = await world.environments.provision(WORKER, wanted)
        results = []

        async def run() -> None:
            results.append(await world.run(handle, Behaviour(seconds=None), ask=ASKS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            (network,) = world.egress.networks
            network.use.charge()
            network.use.charge()
            with pytest.raises(BudgetExhausted):
                network.use.charge()
        assert results[0].killed_by is KillReason.CANCELLED
        with pytest.raises(BudgetExhausted):
            world.environments.attempt(WORKER, handle)
        await wait_all_tasks_blocked()
        assert len(world.sink.of(BudgetWasExhausted)) == 1
        assert world.consistent_and_empty()
