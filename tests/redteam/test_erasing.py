"""What an environment leaves on a quota is erased after its end, and delays nobody's.

A file that not even root may remove holds the erasing up for as long as a test looks.
"""

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from sbxd.client.remote import RemoteExecutionEnvironment, connect
from tests.pacing import next_look
from tests.redteam.inventory import STATE, wait_settled
from tests.redteam.live import LIMITS, WORKER_SOCKET, Live, admin, default_image, specification
from tests.redteam.operator import events, now

pytestmark = pytest.mark.needs("daemon", "root", "quota")

ERASING = STATE / "volumes" / "erasing"
FILES = 150
WITHIN_SECONDS = 120
MANY_FILES = f"""
for number in range({FILES}):
    with open(f"f{{number}}", "w") as file:
        file.write("x" * 8192)
"""


@asynccontextmanager
async def held_up(remote: RemoteExecutionEnvironment) -> AsyncIterator[str]:
    """Destroy an environment with many files of which one cannot be erased within the block."""
    handle = await remote.provision(specification(await default_image(), LIMITS, tenant="hostile"))
    assert (await Live(remote, handle).python(MANY_FILES)).exit_code == 0
    chattr("+i", STATE / "volumes" / handle.environment_id / "workspace" / "f0")
    try:
        await remote.destroy(handle)
        yield handle.environment_id
    finally:
        for place in STATE.glob("volumes/**/workspace/f0"):
            chattr("-i", place)


def chattr(how: str, file: Path) -> None:
    subprocess.run(["chattr", how, str(file)], check=True, timeout=60)


async def erased() -> None:
    with trio.fail_after(WITHIN_SECONDS):
        async with admin() as client:
            while (await client.status()).erasing_volumes:
                await client.reap()
                await next_look()


@pytest.mark.case("PEER-30")
async def test_another_tenants_end_does_not_wait_for_what_is_erased() -> None:
    await wait_settled()
    await erased()  # what earlier environments have left
    since = now()
    async with connect(WORKER_SOCKET, client_name="tests") as remote, admin() as client:
        async with held_up(remote) as name:
            (dead,) = ERASING.iterdir()
            assert name in dead.name
            before = await client.status()
            assert (before.erasing_volumes, before.quarantined) == (1, ())
            assert before.erasing_bytes >= FILES * 8192 // 2
            image = await default_image()
            victim = await remote.provision(specification(image, LIMITS, tenant="victim"))
            assert (await Live(remote, victim).python(MANY_FILES)).exit_code == 0
            await remote.destroy(victim)
            after = await client.status()
            assert any(name in each.name for each in ERASING.iterdir()), "the control"
            assert after.quarantined == ()
            assert {each.name for each in after.alerts} <= {each.name for each in before.alerts}
            assert events(since, "EnvironmentDestroyFailed") == []
        await erased()
    assert list(ERASING.iterdir()) == []
    await wait_settled()
