"""Limits where commands run on gVisor's kernel and the host's controllers are real.

Source: gate.sandbox.limits_enforced, CASES RES-01, RES-03, RES-08. What needs no controller
(output, deadlines, whole trees) is in the contract suite and in `test_gvisor_pids`, at native
speed; here it is an emulated machine, so the programs are small and have all the time there is.
"""

from collections.abc import Iterator

import msgspec
import pytest

from sbxd.port.command import ExecutionResult, KillReason
from tests.redteam.live import LIMITS, Live, live
from tests.redteam.operator import on_gvisor

pytestmark = [
    pytest.mark.needs("daemon", "limits", "gvisor"),
    pytest.mark.gate("gate.sandbox.limits_enforced"),
]
# A program that writes to all that it is given: the limit is 128 MiB, and 64 more for the kernel.
HUNGRY = "python3 -ISc 'print(len(bytearray(400 << 20)))'"
MODEST = "python3 -ISc 'print(len(bytearray(48 << 20)))'"
BOMB = """
import os, _thread, time
os.write(1, b"start")
while True:
    try:
        _thread.start_new_thread(time.sleep, (600,))
    except RuntimeError:
        pass
"""

BURNERS = "for i in 1 2 3 4; do while :; do /bin/true; done & done; wait"


@pytest.fixture(scope="module", autouse=True)
def gvisor() -> Iterator[None]:
    """The daemon runs nothing on the host's kernel while these tests run."""
    with on_gvisor():
        yield


async def sh(environment: Live, script: str) -> ExecutionResult:
    seconds = LIMITS.wall_clock_seconds
    return await environment.run("sh", "-c", script, timeout_seconds=seconds)


@pytest.mark.case("RES-03")
async def test_memory_beyond_the_limit_ends_the_command_and_the_next_has_a_fresh_kernel() -> None:
    """The whole Sentry dies with it, by the host's kernel: output up to then and the workspace
    are kept, /tmp is not, and the limit is that of before."""
    async with live() as environment:
        before = await sh(environment, f"cat /proc/version; {MODEST}; echo lost >/tmp/f; echo a >f")
        assert before.exit_code == 0, before
        assert b"Linux version 4.4.0" in before.stdout, "the control: another kernel"
        assert before.stdout.endswith(b"50331648\n"), "the control: what is below the limit runs"
        for _ in range(2):
            # In a child, behind its parent's back.
            result = await sh(environment, f"echo begin; {HUNGRY}; echo end")
            assert result.killed_by is KillReason.MEMORY, result
            assert result.exit_code is None
            assert result.stdout == b"begin\n"
            assert result.evidence.oom_kill >= 1
            assert result.evidence.oom_group_kill >= 1
        after = await sh(environment, "cat f; ls /tmp; echo b >>f")
        assert (after.exit_code, after.stdout) == (0, b"a\n"), after
        assert [change.path for change in after.files_changed] == ["f"]
        assert after.evidence.oom_kill == 0, "nothing of the earlier ends is the next one's"


@pytest.mark.case("RES-01")
async def test_a_bomb_is_ended_with_pids_within_the_hosts_own_limit_and_its_kernel_lives() -> None:
    async with live() as environment:
        await sh(environment, "echo here >/tmp/file")
        result = await environment.run(
            "python3", "-ISc", BOMB, timeout_seconds=LIMITS.wall_clock_seconds
        )
        assert result.killed_by is KillReason.PIDS, result
        assert result.evidence.pids_max_events >= 100
        assert result.stdout.startswith(b"start")
        after = await sh(environment, "cat /tmp/file")
        assert after.stdout == b"here\n", "the host's limit was not what stopped it"
        assert after.evidence.pids_max_events == 0


async def test_a_filler_of_a_volume_under_quota_is_ended_with_disk() -> None:
    async with live() as environment:
        fits = await sh(environment, "head -c 8m /dev/zero >fits && wc -c <fits")
        assert fits.stdout == b"8388608\n", fits
        result = await sh(environment, "echo begin; while :; do head -c 64m /dev/zero >full; done")
        assert result.killed_by is KillReason.DISK, result
        assert result.stdout == b"begin\n"


@pytest.mark.case("RES-08")
async def test_the_rate_of_the_processors_is_one_for_the_whole_tree() -> None:
    """Coarsely, since the machine is emulated: its clock and its accounts of time jump."""
    limits = msgspec.structs.replace(LIMITS, cpu_millicores=200)
    async with live(limits) as environment:
        result = await environment.run("sh", "-c", BURNERS, timeout_seconds=10)
    async with live() as environment:
        control = await environment.run("sh", "-c", BURNERS, timeout_seconds=10)
    for each in (result, control):
        assert each.killed_by is KillReason.TIMEOUT
        assert each.usage.cpu_ms is not None
    assert result.usage.cpu_ms is not None
    assert control.usage.cpu_ms is not None
    assert result.usage.cpu_ms < result.duration_ms * 200 // 1000 * 2
    assert control.usage.cpu_ms > result.usage.cpu_ms * 1.2, "the control: they would use more"
