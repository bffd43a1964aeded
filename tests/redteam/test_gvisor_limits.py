"""Limits where commands run on gVisor's kernel and the host's controllers are real.

Source: gate.sandbox.limits_enforced, CASES RES-01, RES-03, RES-07, RES-08, RES-15. The claims of
`test_limits` hold unchanged, but for the numbers of this mechanism (docs/gvisor.md): a kernel of
its own needs memory besides, and the most processes at a time are not told.
"""

from collections.abc import Awaitable, Callable, Iterator

import pytest

from sbxd.launcher.kernel.cgroup import SENTRY_MEMORY_BYTES
from sbxd.port.command import KillReason
from sbxd.port.limits import MIB
from tests.redteam import test_disk, test_limits
from tests.redteam.live import LIMITS, live
from tests.redteam.operator import on_gvisor
from tests.redteam.test_memory_charged import HOLDERS, PROGRAM

pytestmark = [
    pytest.mark.needs("daemon", "limits", "gvisor"),
    pytest.mark.gate("gate.sandbox.limits_enforced"),
]
LIMIT_ON_THE_HOST = LIMITS.memory_bytes + SENTRY_MEMORY_BYTES


@pytest.fixture(scope="module", autouse=True)
def gvisor() -> Iterator[None]:
    """The daemon runs nothing on the host's kernel while these tests run."""
    with on_gvisor():
        yield


@pytest.mark.case("RES-01", "RES-03", "RES-07", "RES-08")
@pytest.mark.parametrize(
    "claim",
    [
        test_limits.test_an_allocator_below_the_limit_is_left_alone,
        test_limits.test_a_child_killed_for_memory_behind_its_parents_back_is_memory,
        test_limits.test_a_program_that_is_refused_a_few_forks_and_copes_just_works,
        test_limits.test_endless_output_is_ended_with_exactly_the_cap,
        test_limits.test_many_short_burners_together_have_the_rate_of_one,
    ],
    ids=lambda claim: claim.__name__,
)
async def test_it_holds_unchanged(claim: Callable[[], Awaitable[None]]) -> None:
    await claim()


async def test_control_these_commands_run_on_another_kernel() -> None:
    async with live() as environment:
        seen = await environment.run("cat", "/proc/version")
    assert b"Linux version 4.4.0" in seen.stdout


# memory ------------------------------------------------------------------------------------------


@pytest.mark.case("RES-03")
async def test_an_allocator_is_ended_with_memory_and_the_next_command_has_a_fresh_kernel() -> None:
    """The whole Sentry dies with it: output up to then and the workspace are kept, /tmp is not."""
    async with live() as environment:
        before = await environment.run("sh", "-c", "echo kept >file; echo lost >/tmp/file")
        assert before.exit_code == 0
        for _ in range(2):  # the fresh one has the limit too
            result = await environment.python(test_limits.ALLOCATOR)
            assert result.killed_by is KillReason.MEMORY, result
            assert result.exit_code is None
            assert result.evidence.oom_kill >= 1
            assert result.evidence.oom_group_kill >= 1, "the whole leaf died, by the kernel's hand"
            reached = int(result.stdout.splitlines()[-1].split()[1])
            assert 64 * MIB <= reached * MIB < LIMIT_ON_THE_HOST
        after = await environment.run("sh", "-c", "cat file; ls /tmp; echo more >>file")
        assert (after.exit_code, after.stdout) == (0, b"kept\n"), after
        assert [change.path for change in after.files_changed] == ["file"]
        assert after.evidence.oom_kill == 0, "nothing of the earlier ends is the next one's"


@pytest.mark.case("RES-15")
@pytest.mark.parametrize("kind", ["memfd", "shm"])
async def test_whatever_a_guest_fills_is_charged_to_its_leaf(kind: str) -> None:
    program = PROGRAM.format(holder=HOLDERS[kind])
    async with live() as environment:
        little = await environment.run("python3", "-c", program, str(4 * MIB))
        assert little.stdout.endswith(b" all\n"), little
        much = await environment.run("python3", "-c", program, str(1024 * MIB))
    held = int(much.stdout.splitlines()[-1].split()[0])
    assert held < LIMIT_ON_THE_HOST
    if much.killed_by is None:
        assert much.stdout.split()[-1] in (b"ENOSPC", b"EMFILE"), much
    else:
        assert much.killed_by is KillReason.MEMORY, much


# processes ---------------------------------------------------------------------------------------


@pytest.mark.case("RES-01")
async def test_a_bomb_of_forks_is_ended_with_pids_and_the_host_stays_flat() -> None:
    await test_limits.test_a_fork_bomb_is_ended_with_pids_and_the_host_stays_flat()


@pytest.mark.case("RES-01")
async def test_a_bomb_of_threads_is_ended_with_pids_and_the_kernel_lives() -> None:
    source = """
import threading, time
print("start", flush=True)
while True:
    try:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    except RuntimeError:
        pass
"""
    async with live() as environment:
        await environment.run("sh", "-c", "echo here >/tmp/file")
        result = await environment.python(source)
        assert result.killed_by is KillReason.PIDS, result
        assert result.evidence.pids_max_events >= 1000
        assert result.stdout == b"start\n"
        after = await environment.run("cat", "/tmp/file")
    assert after.stdout == b"here\n", "it was not the host's limit that ended it"


# disk --------------------------------------------------------------------------------------------


async def test_a_filler_of_a_volume_under_quota_is_ended_with_disk() -> None:
    await test_disk.test_a_disk_filler_is_ended_with_disk_and_its_partial_output(None)
