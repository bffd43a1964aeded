"""A service that is told to stop, with a command running: whoever waits for it gets its result."""

import os
import re
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from sbxctl.exits import Exit
from sbxd.client.remote import connect
from sbxd.port.command import ExecutionCommand, ExecutionResult, KillReason
from sbxd.port.errors import ExecutionUnavailable, ServiceShuttingDown
from tests.pacing import next_look
from tests.redteam.faults import main_pid
from tests.redteam.inventory import wait_settled
from tests.redteam.live import (
    WORKER_SOCKET,
    Live,
    default_image,
    specification,
    wait_process_on_the_host,
)

pytestmark = [pytest.mark.needs("daemon", "root")]

_WAIT = "import time; time.sleep(600)"


def _argv(marker: str) -> tuple[str, ...]:
    """A command that shows on the host by its last argument, after its output is written."""
    return ("sh", "-c", f"echo partial; touch begun; exec python3 -c '{_WAIT}' {marker}")


async def _stop() -> None:
    """Stop the service; its sockets stay, and start it again."""
    await trio.run_process(["systemctl", "stop", "sbxd.service"])


async def test_a_worker_gets_the_partial_result_of_what_was_running() -> None:
    marker = "stopped-under-a-worker"
    image = await default_image()
    results: list[ExecutionResult] = []
    command = ExecutionCommand(
        argv=_argv(marker),
        working_directory=".",
        timeout_seconds=300,
        stdin=None,
        maximum_output_bytes=1000,
    )
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        handle = await remote.provision(specification(image))

        async def run() -> None:
            results.append(await remote.execute(handle, command))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_process_on_the_host(marker)
            await _stop()
        with suppress(ExecutionUnavailable):
            await remote.destroy(handle)
    (result,) = results
    assert (result.killed_by, result.stdout) == (KillReason.SERVICE_SHUTDOWN, b"partial\n")
    assert result.exit_code is None
    assert [each.path for each in result.files_changed] == ["begun"]


WORKERS = 4
LOADED_SECONDS = 60.0
# Ends when its shell is told to, which is after the process that shows on the host has begun.
_TOLD = "trap 'echo whole; exit 0' USR1; python3 -c 'import time; time.sleep(600)' {} & wait"


def _parent(process: Path) -> int:
    """The process that started this one, as the host numbers them."""
    found = re.search(r"^PPid:\t(\d+)$", (process / "status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


@pytest.mark.case("LIF-13")
async def test_under_load_everybody_is_told_and_the_stop_is_bounded() -> None:
    """Workers with a long command each, one whose command ends within the grace, and one that
    provisions without pause."""
    image = await default_image()
    long: list[ExecutionResult] = []
    short: list[ExecutionResult] = []
    refused: list[str] = []
    turning, stopping = trio.Event(), trio.Event()

    async def work(number: int, into: list[ExecutionResult], *argv: str) -> None:
        async with connect(WORKER_SOCKET, client_name=f"worker-{number}") as remote:
            handle = await remote.provision(specification(image))
            into.append(
                await remote.execute(
                    handle,
                    ExecutionCommand(
                        argv=argv,
                        working_directory=".",
                        timeout_seconds=300,
                        stdin=None,
                        maximum_output_bytes=1000,
                    ),
                )
            )

    async def crowd() -> None:
        async with connect(WORKER_SOCKET, client_name="crowd") as remote:
            try:
                while True:
                    handle = await remote.provision(specification(image))
                    await remote.destroy(handle)
                    turning.set()
            except ExecutionUnavailable as error:
                refused.append(type(error).__name__)
                stopping.set()

    async def end_within_the_grace(shell: int) -> None:
        await stopping.wait()
        os.kill(shell, signal.SIGUSR1)

    async with trio.open_nursery() as nursery:
        for number in range(WORKERS):
            nursery.start_soon(work, number, long, *_argv(f"loaded-{number}"))
        nursery.start_soon(work, WORKERS, short, "sh", "-c", _TOLD.format("loaded-short"))
        for number in range(WORKERS):
            await wait_process_on_the_host(f"loaded-{number}")
        shell = _parent(await wait_process_on_the_host("loaded-short"))
        nursery.start_soon(crowd)
        with trio.fail_after(LOADED_SECONDS):
            await turning.wait()
        nursery.start_soon(end_within_the_grace, shell)
        begun = trio.current_time()
        await _stop()
        took = trio.current_time() - begun
    assert [(each.killed_by, each.stdout) for each in long] == [
        (KillReason.SERVICE_SHUTDOWN, b"partial\n")
    ] * WORKERS
    assert [(each.exit_code, each.killed_by, each.stdout) for each in short] == [
        (0, None, b"whole\n")
    ], "what ends within the grace is its own end"
    assert refused == ["ServiceShuttingDown"]
    assert took < LOADED_SECONDS


async def test_who_connects_while_the_service_is_restarted_waits_and_is_served() -> None:
    """All the time, from before the stop until after the start: nobody is refused."""
    await wait_settled()
    image = await default_image()
    served: list[int | None] = []
    old = main_pid("sbxd.service")
    restarted = trio.Event()

    async def ask() -> None:
        while not restarted.is_set():
            try:
                async with connect(WORKER_SOCKET, client_name="patient") as remote:
                    handle = await remote.provision(specification(image))
                    result = await Live(remote, handle).run("true")
                    if result.killed_by is not KillReason.SERVICE_SHUTDOWN:
                        served.append(result.exit_code)
                    await remote.destroy(handle)
            except ServiceShuttingDown:
                # It had been greeted by the old one: the documented way on is a new connection.
                continue

    with trio.fail_after(180):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
            while len(served) < 4:
                await next_look()
            await trio.run_process(["systemctl", "restart", "sbxd.service"])
            before = len(served)
            while len(served) < before + 4:
                await next_look()
            restarted.set()
    assert set(served) == {0}
    assert main_pid("sbxd.service") not in (0, old)


@pytest.mark.parametrize("options", [(), ("--get", "begun:/tmp/begun")])
async def test_sbxctl_tells_what_happened_and_not_that_it_could_not_clean_up(
    options: tuple[str, ...],
) -> None:
    marker = f"stopped-under-sbxctl-{len(options)}"
    ended: list[subprocess.CompletedProcess[bytes]] = []
    start = partial(
        trio.run_process,
        ["sbxctl", "run", *options, "--", *_argv(marker)],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )

    async def run() -> None:
        ended.append(await start())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await wait_process_on_the_host(marker)
        await _stop()
    (done,) = ended
    assert (done.returncode, done.stdout) == (Exit.SERVICE_SHUTDOWN, b"partial\n"), done.stderr
    assert b"killed: SERVICE_SHUTDOWN" in done.stderr
