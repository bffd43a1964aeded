"""`sbxd-worker` as a program: the authority serves, a supervisor fences, the daemon is answered."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from sbxd.client.leases import LeaseRegistrar
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.leases import LeaseStanding
from sbxd.service.lease_query import RemoteLeaseAuthority

PROGRAM = (sys.executable, "-m", "sbxd.worker_cli")
A = EnvironmentId("a" * 32)


@asynccontextmanager
async def authority(path: Path) -> AsyncIterator[trio.Process]:
    own = str(os.getuid())
    process = await trio.lowlevel.open_process(
        [*PROGRAM, "leases", "--socket", str(path), "--worker-uid", own, "--daemon-uid", own]
    )
    try:
        yield process  # who connects tries until it listens
    finally:
        process.kill()
        await process.wait()


async def test_the_authority_serves_fences_and_stops_when_told(tmp_path: Path) -> None:
    path = tmp_path / "leases.sock"
    remote = RemoteLeaseAuthority("tier", frozenset({os.getuid()}), str(path), 60.0)
    async with authority(path) as process, trio.open_nursery() as nursery:
        registrar = LeaseRegistrar(str(path), answer_seconds=60)
        await nursery.start(registrar.run)
        lease = await registrar.register(TenantId("tenant"), RunId("run"), 1)
        await registrar.bind(lease, A)
        assert await remote.ask([A]) == [LeaseStanding.CURRENT]
        fence = [*PROGRAM, "fence", "--socket", str(path), "tenant", "run"]
        done = await trio.run_process([*fence, "2"], check=False, capture_stderr=True)
        assert (done.returncode, done.stderr) == (0, b"")
        assert await remote.ask([A]) == [LeaseStanding.STALE]
        outdated = await trio.run_process([*fence, "1"], check=False, capture_stderr=True)
        assert outdated.returncode != 0
        assert b"STALE_EPOCH" in outdated.stderr
        process.send_signal(signal.SIGTERM)
        with trio.fail_after(30):
            assert await process.wait() == 0
        assert os.listdir(tmp_path) == []
        nursery.cancel_scope.cancel()


async def test_a_place_that_is_taken_is_said_and_left(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("mine")
    done = await trio.run_process(
        [*PROGRAM, "leases", "--socket", str(place)], check=False, capture_stderr=True
    )
    assert done.returncode != 0
    assert b"taken" in done.stderr
    assert place.read_text() == "mine"
