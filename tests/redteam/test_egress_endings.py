"""A tunnel that is open when its environment expires, or when the daemon is told to stop: it is
closed and recorded before anybody is told that the command is over.

The other ends of a command are in `test_egress_abuse`.
"""

from collections.abc import Iterator

import pytest
import trio

from sbxd.port.command import ExecutionResult, KillReason
from sbxd.port.errors import ServiceShuttingDown
from sbxd.port.limits import EnvironmentBudgets
from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.redteam.egress import allowlist, configured, networked
from tests.redteam.test_egress_abuse import HOLD, tunnels, until_ready

pytestmark = pytest.mark.needs("daemon")

# Time enough to open a tunnel, also on a machine that is busy.
LIFE_SECONDS = 25
# The tunnel is used all the while: it is no idle one that ends.
TALK = HOLD + "while s.send(b'x'):\n    s.recv(1)\n    import time; time.sleep(0.05)\n"


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built, configured(allowlist()):
        yield built


def ends(kinds: list[str]) -> bool:
    return kinds == ["EgressAllowed", "EgressTunnelClosed"]


async def test_a_tunnel_ends_with_an_environment_that_expires(internet: Internet) -> None:
    budgets = EnvironmentBudgets(
        operations_max=100_000, returned_bytes_max=50_000_000, wall_seconds_max=LIFE_SECONDS
    )
    async with networked(budgets=budgets) as one:
        results: list[ExecutionResult] = []

        async def run() -> None:
            results.append(await one.ask(TALK, timeout_seconds=3 * LIFE_SECONDS))
            # Told, and there is nothing left of it.
            assert tunnels() == 0

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await until_ready(one)
            assert tunnels() == 1, "the control: it is seen"
        assert [each.killed_by for each in results] == [KillReason.EXPIRED]
        assert ends([each["SBX_EVENT"] for each in one.egress()])
        assert [each["SBX_KILLED_BY"] for each in one.recorded("CommandFinished")] == ["EXPIRED"]


async def test_a_tunnel_ends_with_a_daemon_that_is_told_to_stop(internet: Internet) -> None:
    async with networked() as one:
        results: list[ExecutionResult] = []

        async def run() -> None:
            results.append(await one.ask(TALK, timeout_seconds=120))
            assert tunnels() == 0

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await until_ready(one)
            assert tunnels() == 1, "the control: it is seen"
            await trio.run_process(["systemctl", "stop", "sbxd.service"])
            assert tunnels() == 0
        assert [each.killed_by for each in results] == [KillReason.SERVICE_SHUTDOWN]
        assert ends([each["SBX_EVENT"] for each in one.egress()])
        with pytest.raises(ServiceShuttingDown):
            await one.run("true")
    await trio.run_process(["systemctl", "start", "sbxd.service"])
