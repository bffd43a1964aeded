"""What an operator, or systemd on their behalf, does to a daemon at work: detected, and no hang.

Scopes are stopped under a command, the manager is executed anew, the daemon is restarted while
clients connect, and everybody asks for everything while the operator wants an answer.
"""

import signal
import subprocess

import pytest
import trio

from sbxd.audit.events import DestroyReason
from sbxd.client.remote import RemoteExecutionEnvironment, connect
from sbxd.port.command import ExecutionResult
from sbxd.port.errors import ExecutionUnavailable, PortError, RejectedCode, UnavailableCode
from tests.redteam.faults import SMALL, main_pid
from tests.redteam.inventory import wait_settled
from tests.redteam.live import (
    WORKER_SOCKET,
    Live,
    admin,
    default_image,
    live,
    specification,
    until,
    wait_process_on_the_host,
)
from tests.redteam.operator import events, now

pytestmark = pytest.mark.needs("daemon")

REQUESTS = 48
CLIENTS = 6


async def systemctl(*words: str) -> None:
    done = await trio.run_process(
        ["systemctl", *words], check=False, capture_stdout=True, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.case("LIF-07")
async def test_a_scope_that_is_stopped_under_a_command_is_told_as_lost() -> None:
    before = await wait_settled()
    since = now()
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        handle = await remote.provision(specification(await default_image(), SMALL))
        async with admin() as client:
            scope = (await client.inspect(handle.environment_id)).scope
        told: list[PortError] = []
        results: list[ExecutionResult] = []

        async def work() -> None:
            try:
                results.append(await Live(remote, handle).run("sleep", "4001"))
            except PortError as error:
                told.append(error)

        with trio.fail_after(90):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
                await wait_process_on_the_host("4001")
                await systemctl("stop", scope)
        if results:
            # The manager's signal had ended the command, and it was told, before the rest.
            assert results[0].signal in (signal.SIGTERM, signal.SIGKILL), results
            with trio.fail_after(60):
                while not told:
                    await work()
        # Who asks next may come once it has been ended for that, and is told that it is gone.
        codes: set[str] = {UnavailableCode.ENVIRONMENT_LOST}
        if results:
            codes.add(RejectedCode.ENVIRONMENT_GONE)
        assert [error.code in codes for error in told] == [True], told
    await until(lambda: ends(since, handle.environment_id))
    assert ends(since, handle.environment_id) == [DestroyReason.ENVIRONMENT_LOST]
    after = await wait_settled(within_seconds=120)
    assert after.report() == before.report()


def ends(since: str, environment_id: str) -> list[str]:
    """Why it was destroyed, as recorded."""
    return [
        each["SBX_REASON"]
        for each in events(since, "EnvironmentDestroyed")
        if each["SBX_ENVIRONMENT_ID"] == environment_id
    ]


@pytest.mark.case("LIF-07")
async def test_a_manager_that_is_executed_anew_disturbs_no_command() -> None:
    async with live(SMALL) as one:
        results: list[ExecutionResult] = []

        async def work() -> None:
            results.append(await one.run("sh", "-c", "sleep 4002 & wait $!; exit 5"))

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
                process = await wait_process_on_the_host("4002")
                await systemctl("daemon-reexec")
                assert process.exists()
                await trio.run_process(["kill", process.name])
        # Its shell saw the sleeper die, and went on.
        assert [(each.exit_code, each.killed_by) for each in results] == [(5, None)]
        assert (await one.run("true")).exit_code == 0


async def test_a_client_that_comes_while_the_daemon_restarts_is_served_and_not_refused() -> None:
    await wait_settled()
    image = await default_image()
    old = main_pid("sbxd.service")
    served: list[int | None] = []

    async def ask() -> None:
        # The sockets stay: who connects waits in their queue.
        async with connect(WORKER_SOCKET, client_name="patient") as remote:
            handle = await remote.provision(specification(image, SMALL))
            served.append((await Live(remote, handle).run("true")).exit_code)
            await remote.destroy(handle)

    with trio.fail_after(120):
        await systemctl("stop", "sbxd.service")
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
    assert served == [0] * 4
    assert main_pid("sbxd.service") not in (0, old)


async def test_an_operator_is_answered_while_everybody_asks_for_everything() -> None:
    await wait_settled()
    image = await default_image()
    outcomes: list[str] = []
    done, to_come = trio.open_memory_channel[str](CLIENTS * REQUESTS)

    async def ask(remote: RemoteExecutionEnvironment) -> None:
        try:
            handle = await remote.provision(specification(image, SMALL))
            await remote.destroy(handle)
        except ExecutionUnavailable as error:
            done.send_nowait(error.code)
        else:
            done.send_nowait("ok")

    async def crowd() -> None:
        async with (
            connect(WORKER_SOCKET, client_name="crowd") as remote,
            trio.open_nursery() as requests,
        ):
            for _ in range(REQUESTS):
                requests.start_soon(ask, remote)

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(crowd)
            while len(outcomes) < CLIENTS * REQUESTS:
                # One look for each request that ends: a connection each time, within a uid's rate.
                outcomes.append(await to_come.receive())
                with trio.fail_after(20):
                    async with admin() as client:
                        await client.list()
    assert "ok" in outcomes
    # What there was no time for was refused by name, and nothing else happened.
    assert set(outcomes) <= {"ok", "CAPACITY", "START_BUDGET_EXCEEDED"}
    await wait_settled(within_seconds=120)
