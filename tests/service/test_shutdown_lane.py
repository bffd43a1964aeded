"""A service that is told to stop, with a command running: whoever waits for it gets its result."""

import subprocess
from contextlib import suppress
from functools import partial

import pytest
import trio

from sbxctl.exits import Exit
from sbxd.client.remote import connect
from sbxd.port.command import ExecutionCommand, ExecutionResult, KillReason
from sbxd.port.errors import ExecutionUnavailable
from tests.redteam.live import (
    WORKER_SOCKET,
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
