"""gate.sandbox.no_orphans: nothing outlives its lease, whatever becomes of its worker.

A worker is killed in the middle of a command, without a word; another is alive and well and is
fenced by a supervisor; a third dies between provisioning and telling its authority. Each time every
environment of it is gone within two intervals of the reaper, and no environment is live whose epoch
is older than its run's. The control: a worker that holds its lease keeps its environment, and its
command, through the same passes.
"""

import json
import pwd
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
import trio

from sbxd.client.authority import Admitted, LeaseAuthority
from sbxd.policy.leases import run_key
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.leases import LeaseStanding
from tests.pacing import next_look
from tests.redteam.inventory import Kernel, take, wait_settled
from tests.redteam.live import admin

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.no_orphans"),
]

SOCKET = "/run/sbxd-lab-leases.sock"  # as the lane's configuration says
INTERVAL_SECONDS = 1
PASSES = 2
TENANT = TenantId("tenant-1")

# argv: run, whether it names its environment to the authority. Then it says its id and executes.
WORKER = """
import json
import sys

import trio

from sbxd.client.leases import LeasedEnvironments, LeaseRegistrar
from sbxd.client.remote import connect
from sbxd.port.errors import PortError
from tests.redteam.live import WORKER_SOCKET, Live, default_image, specification

RUN, BINDS, MARKER = sys.argv[1], sys.argv[2] == "binds", sys.argv[3]

async def main():
    image = await default_image()
    registrar = LeaseRegistrar("SOCKET", answer_seconds=60)
    async with trio.open_nursery() as nursery, connect(WORKER_SOCKET) as remote:
        await nursery.start(lambda task_status: registrar.run(task_status=task_status))
        environments = LeasedEnvironments(remote, registrar) if BINDS else remote
        handle = await environments.provision(specification(image, run=RUN))
        print(handle.environment_id, flush=True)
        try:
            result = await Live(remote, handle).run("sleep", MARKER, timeout_seconds=120)
            outcome = result.killed_by
        except PortError as error:
            outcome = error.code
        try:
            await Live(remote, handle).run("true")
            later = "served"
        except PortError as error:
            later = error.code
        print(json.dumps([outcome, later]), flush=True)
        nursery.cancel_scope.cancel()

trio.run(main)
""".replace('SOCKET"', f'{SOCKET}"')


@dataclass(frozen=True)
class Worker:
    """A worker process in the middle of a command."""

    process: trio.Process
    environment_id: EnvironmentId

    async def says(self) -> list[str]:
        """What it made of the end of its command."""
        outcome: list[str] = json.loads(await line_of(self.process))
        return outcome


async def line_of(process: trio.Process) -> str:
    """The next line that a worker writes; it writes none while nobody waits for one."""
    assert process.stdout is not None
    text = b""
    with trio.fail_after(60):
        while not text.endswith(b"\n"):
            piece = await process.stdout.receive_some(4096)
            assert piece, "the worker is gone"
            text += piece
    return text.decode().strip()


@asynccontextmanager
async def authority() -> AsyncIterator[LeaseAuthority]:
    """The tier's, which gives no grace."""
    admitted = Admitted(
        holder_uids=frozenset({0}), asker_uids=frozenset({pwd.getpwnam("sbxd").pw_uid})
    )
    served = LeaseAuthority(admitted, grace_seconds=0)
    async with anyio.create_task_group() as tasks:
        await tasks.start(served.serve, SOCKET)
        yield served
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def working(run: str, marker: str, binds: str = "binds") -> AsyncIterator[Worker]:
    """A worker whose command runs."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", WORKER, run, binds, marker],
        stdout=subprocess.PIPE,
    )
    try:
        environment_id = await line_of(process)
        await _wait_running(environment_id)
        yield Worker(process, EnvironmentId(environment_id))
    finally:
        process.kill()
        await process.wait()


async def _wait_running(environment_id: str) -> None:
    """Until it has a command. (A guest's kernel shows the host none of its processes.)"""
    with trio.fail_after(30):
        async with admin() as client:
            while (environment_id, "RUNNING") not in {
                (each.handle.environment_id, each.state) for each in await client.list()
            }:
                await next_look()


async def passes() -> tuple[set[str], int]:
    """Two passes of the reaper, an interval apart: what they ended, and how many it was asked
    about in the last one."""
    ended: set[str] = set()
    asked = 0
    for number in range(PASSES):
        if number:
            with trio.move_on_after(INTERVAL_SECONDS):
                await trio.Event().wait()
        async with admin() as client:
            reaped = await client.reap()
        assert reaped.unanswered == (), "the daemon cannot ask its authority"
        ended |= set(reaped.stale)
        asked = reaped.asked
    return ended, asked


async def gone(before: Kernel, environment_id: EnvironmentId) -> None:
    """Nothing of it is left, and the inventory is as before it."""
    after = await wait_settled(within_seconds=120)
    assert after.report() == before.report()
    assert after.leftovers == ()
    async with admin() as client:
        assert environment_id not in {each.handle.environment_id for each in await client.list()}


async def test_a_worker_that_holds_its_lease_keeps_its_environment_and_its_command() -> None:
    """The control."""
    async with authority() as tier, working("run-held", "3001") as worker:
        ended, asked = await passes()
        assert (ended, asked) == (set(), 1)
        assert tier.book.standing(worker.environment_id, 0) is LeaseStanding.CURRENT
        assert take().processes > 0
        async with admin() as client:
            (info,) = await client.list()
        assert (info.handle.environment_id, info.state) == (worker.environment_id, "RUNNING")
    await wait_settled(within_seconds=120)


@pytest.mark.case("LIF-02")
async def test_a_worker_that_is_killed_in_a_command_leaves_nothing() -> None:
    before = await wait_settled()
    async with authority(), working("run-killed", "3002") as worker:
        worker.process.kill()
        await worker.process.wait()
        await passes()
        await gone(before, worker.environment_id)


async def test_a_worker_that_is_fenced_loses_its_environment_and_is_told() -> None:
    before = await wait_settled()
    async with authority() as tier, working("run-fenced", "3003") as worker:
        tier.book.fence(run_key(TENANT, RunId("run-fenced")), 2)
        ended, _ = await passes()
        assert ended == {worker.environment_id}
        assert await worker.says() == ["CANCELLED", "STALE_LEASE"]
        await gone(before, worker.environment_id)


async def test_a_worker_that_never_named_its_environment_loses_it_at_the_second_pass() -> None:
    before = await wait_settled()
    async with authority(), working("run-silent", "3004", "silent") as worker:
        ended, _ = await passes()
        assert ended == {worker.environment_id}
        assert await worker.says() == ["CANCELLED", "STALE_LEASE"]
        await gone(before, worker.environment_id)


async def test_no_environment_is_live_under_an_epoch_older_than_its_runs() -> None:
    before = await wait_settled()
    async with authority() as tier, working("run-a", "3005") as one, working("run-b", "3006"):
        tier.book.fence(run_key(TENANT, RunId("run-a")), 2)
        await passes()
        async with admin() as client:
            live = await client.list()
        standings = {
            each.handle.run_id: tier.book.standing(each.handle.environment_id, 0)
            for each in live
            if each.state != "DESTROYING"
        }
        assert standings == {RunId("run-b"): LeaseStanding.CURRENT}
    await gone(before, one.environment_id)


async def test_without_an_authority_nobody_is_taken_for_stale() -> None:
    async with working("run-alone", "3007", "silent") as worker:
        for _ in range(3):
            async with admin() as client:
                reaped = await client.reap()
            assert (reaped.stale, reaped.unanswered) == ((), ("lab",))
        async with admin() as client:
            (info,) = await client.list()
        assert (info.handle.environment_id, info.state) == (worker.environment_id, "RUNNING")
    await wait_settled(within_seconds=120)
