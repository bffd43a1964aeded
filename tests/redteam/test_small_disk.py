"""A host whose disk has room for one prepared workspace and little more: the pool that cannot be
filled stands in nobody's way, and gives its room to a request that has none beside it.

The volumes get a small file system of their own. The rules over a double:
`tests/lifecycle/test_reserve.py`; what the launcher leaves free: `tests/kernel/test_volume.py`.
"""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from sbxd.audit.events import SlotOrigin
from sbxd.launcher.kernel.free_space import MARGIN_BYTES
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.port.limits import MIB
from tests.pacing import next_look
from tests.redteam import operator
from tests.redteam.configuration import current, with_tables
from tests.redteam.inventory import STATE
from tests.redteam.live import LIMITS, Live, admin, live, until

pytestmark = pytest.mark.needs("daemon", "root", "loop-volumes")

LAUNCHER = "sbxd-launcher.service"
SLOT = msgspec.structs.replace(LIMITS, workspace_bytes=128 * MIB)
DEFAULTS = f"""[limits.defaults]
memory_bytes = {SLOT.memory_bytes}
pids_max = {SLOT.pids_max}
workspace_bytes = {SLOT.workspace_bytes}
inodes_max = {SLOT.inodes_max}
wall_clock_seconds = {SLOT.wall_clock_seconds}
"""


def is_unmounted(place: Path) -> bool:
    return subprocess.run(["umount", place], check=False, timeout=60).returncode == 0


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Room for a slot and a half, a pool that wants two, and nothing prepared yet."""
    volumes = STATE / "volumes"
    size = MARGIN_BYTES + SLOT.workspace_bytes * 3 // 2
    with operator.configured(with_tables(current(), DEFAULTS)):
        subprocess.run(["systemctl", "stop", LAUNCHER], check=True, timeout=60)
        options = f"size={size},mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", volumes], check=True)
        try:
            assert operator.start() == 0, operator.said()
            yield
        finally:
            operator.stop()
            subprocess.run(["systemctl", "stop", LAUNCHER], check=True, timeout=60)
            # The kernel gives a volume's image back a moment after its last mount is gone.
            trio.run(until, partial(is_unmounted, volumes))


async def pool_is_as_full_as_it_can_be() -> None:
    with trio.fail_after(60):
        async with admin() as client:
            while (await client.describe()).reserve_ready != 1:
                await next_look()


async def works(sandbox: Live) -> None:
    written = await sandbox.run("sh", "-c", "head -c 1000000 /dev/zero >a && wc -c <a")
    assert (written.exit_code, written.stdout) == (0, b"1000000\n")


def origins(since: str) -> list[str]:
    return [each["SBX_ORIGIN"] for each in operator.events(since, "EnvironmentProvisioned")]


async def test_a_request_gets_the_room_that_a_slot_holds(small_disk: None) -> None:
    await pool_is_as_full_as_it_can_be()
    since = operator.now()
    async with live(msgspec.structs.replace(SLOT, workspace_bytes=100 * MIB)) as sandbox:
        await works(sandbox)
        # The control: what a sandbox holds is given to nobody else, and the refusal is of the disk.
        with pytest.raises(ExecutionUnavailable) as refused:
            async with live(SLOT):
                raise AssertionError("there was room for two")
        assert refused.value.code is UnavailableCode.SETUP_FAILED
        assert "no room for a workspace" in refused.value.detail
        await works(sandbox)
    assert origins(since) == [SlotOrigin.COLD]
    await pool_is_as_full_as_it_can_be()


async def test_a_request_that_comes_while_the_only_slot_is_built_is_served(
    small_disk: None,
) -> None:
    for _ in range(3):
        await trio.to_thread.run_sync(operator.stop)
        assert await trio.to_thread.run_sync(operator.start) == 0  # and the pool begins to build
        async with live(SLOT) as sandbox:
            await works(sandbox)
