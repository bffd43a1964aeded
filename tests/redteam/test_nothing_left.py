"""Nothing of an environment outlives it: not after many cycles, a dead client, daemon or launcher.

Source: gate.sandbox.no_orphans (the parts without the lease authority), CASES LIF-02, PEERS 17. The
inventory is taken from the kernel and from systemd.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
import trio

from sbxd.client.remote import connect
from sbxd.port.errors import ExecutionUnavailable
from sbxd.port.limits import MIB, ResourceLimits
from tests.redteam.inventory import take, wait_settled
from tests.redteam.live import WORKER_SOCKET, Live, admin, default_image, live, specification

pytestmark = [pytest.mark.needs("daemon"), pytest.mark.also("uml")]

CYCLES = 200 if os.environ.get("SBXD_LANE") != "uml" else 40  # six times as long there
AT_ONCE = 8

SMALL = ResourceLimits(
    cpu_millicores=2000,
    memory_bytes=64 * MIB,
    pids_max=32,
    workspace_bytes=16 * MIB,
    inodes_max=500,
    wall_clock_seconds=60,
)


async def test_many_cycles_leave_nothing() -> None:
    before = await wait_settled()
    image = await default_image()
    codes: list[int | None] = []

    async with connect(WORKER_SOCKET, client_name="cycles") as remote:
        limiter = trio.CapacityLimiter(AT_ONCE)

        async def cycle(number: int) -> None:
            async with limiter:
                handle = await remote.provision(specification(image, SMALL))
                try:
                    one = Live(remote, handle)
                    result = await one.run("sh", "-c", f"echo {number} > f; exit {number % 7}")
                    codes.append(result.exit_code)
                    assert [c.path for c in result.files_changed] == ["f"]
                finally:
                    await remote.destroy(handle)

        async with trio.open_nursery() as nursery:
            for number in range(CYCLES):
                nursery.start_soon(cycle, number)

    assert sorted(codes, key=lambda c: c or 0) == sorted(n % 7 for n in range(CYCLES))
    after = await wait_settled()
    assert after.report() == before.report()
    assert after.leftovers == ()


async def test_the_inventory_sees_a_live_environment() -> None:
    """The control of every test here: what is live is counted."""
    before = await wait_settled()
    async with live(SMALL):
        during = take()
        assert during.scopes >= before.scopes
        async with admin() as client:
            assert (await client.describe()).environments == 1
    after = await wait_settled()
    assert after.report() == before.report()


CLIENT = """
import sys
import trio
from tests.redteam.live import live

async def main():
    async with live() as environment:
        print(environment.handle.environment_id, flush=True)
        await environment.python("import time; print('up', flush=True); time.sleep(600)")

trio.run(main)
"""


@pytest.mark.case("API-15", "LIF-02")
async def test_a_killed_client_takes_its_command_and_environment_with_it() -> None:
    before = await wait_settled()
    client = await trio.lowlevel.open_process(
        [sys.executable, "-c", CLIENT], stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    environment_id = (await client.stdout.receive_some(64)).decode()
    await _wait_running(environment_id.strip())
    client.kill()
    await client.wait()
    after = await wait_settled(within_seconds=180)
    assert after.report() == before.report()
    events = _journal(f"SBX_ENVIRONMENT_ID={environment_id.strip()}", "SBX_EVENT=CommandFinished")
    assert [event["SBX_KILLED_BY"] for event in events] == ["CANCELLED"]


@pytest.mark.parametrize("unit", ["sbxd.service", "sbxd-launcher.service"])
@pytest.mark.case("LIF-02")
async def test_nothing_old_survives_the_death_of(unit: str) -> None:
    before = await wait_settled()
    image = await default_image()
    old = set()
    failures: list[ExecutionUnavailable] = []
    async with connect(WORKER_SOCKET, client_name="victim") as remote:
        for _ in range(3):
            handle = await remote.provision(specification(image, SMALL))
            old.add(handle.environment_id)

        async def sleeper() -> None:
            try:
                await Live(remote, handle).run("sleep", "600")
            except ExecutionUnavailable as error:
                failures.append(error)

        with trio.fail_after(90):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sleeper)
                await _wait_running(handle.environment_id)
                os.kill(_main_pid(unit), signal.SIGKILL)
    assert len(failures) == 1, "the client was not told"
    after = await wait_settled(within_seconds=180)
    assert after.report() == before.report()
    assert after.leftovers == ()
    assert not old & _live_scopes()


def _live_scopes() -> set[str]:
    listed = subprocess.run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "sbx-*.scope"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {line.split()[0][4:-6] for line in listed.splitlines() if line.strip()}


def _main_pid(unit: str) -> int:
    shown = subprocess.run(
        ["systemctl", "show", "-p", "MainPID", "--value", unit],
        capture_output=True,
        text=True,
        check=True,
    )
    pid = int(shown.stdout)
    assert pid > 1, f"{unit} is not running"
    return pid


async def _wait_running(environment_id: str) -> None:
    with trio.fail_after(60):
        while True:
            async with admin() as client:
                for info in await client.list():
                    if info.handle.environment_id == environment_id and info.running_argv:
                        return


def _journal(*matches: str) -> list[dict[str, str]]:
    subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
    shown = subprocess.run(
        ["journalctl", "-o", "json", "--no-pager", *matches],
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in shown.stdout.splitlines() if line]
