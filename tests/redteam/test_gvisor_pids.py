"""A guest's refused forks are counted: a bomb ends with PIDS, whoever copes does not.

The count is the Sentry's (decision 0113), so this holds where the host has no pids controller, too.
"""

import pytest

from sbxd.port.command import KillReason
from tests.redteam import test_limits
from tests.redteam.live import LIMITS, live

pytestmark = [pytest.mark.needs("lane-gvisor", "daemon")]

BOMB = """
import os
print("start", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
THREADS = """
import threading, time
print("start", flush=True)
while True:
    try:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    except RuntimeError:
        pass
"""
# Fills its processes, is then refused so often, and sleeps at its limit.
REFUSED = """
import os, sys, time
children = refused = 0
while refused < int(sys.argv[1]):
    try:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        children += 1
    except BlockingIOError:
        refused += 1
print(children, flush=True)
time.sleep(1)
"""


@pytest.mark.case("RES-01")
@pytest.mark.parametrize("bomb", [BOMB, THREADS], ids=["forks", "threads"])
async def test_a_bomb_is_ended_with_pids_and_the_next_command_is_whole(bomb: str) -> None:
    async with live() as environment:
        await environment.run("sh", "-c", "echo here >/tmp/file")
        result = await environment.python(bomb, timeout_seconds=LIMITS.wall_clock_seconds)
        assert result.killed_by is KillReason.PIDS, result
        assert result.exit_code is None
        assert result.evidence.pids_max_events >= 1000
        assert result.stdout.startswith(b"start\n")
        after = await environment.run("cat", "/tmp/file")
        assert after.stdout == b"here\n", "the guest's kernel outlives a bomb"
        assert after.evidence.pids_max_events == 0, "the next command begins at zero"
        assert after.exit_code == 0


async def test_fewer_refusals_than_the_operators_number_are_counted_and_end_nothing() -> None:
    """The numbers say that each refusal is seen once, also at the limit's edge."""
    async with live() as environment:
        result = await environment.run("python3", "-c", REFUSED, "150")
        assert (result.killed_by, result.exit_code) == (None, 0), result
        assert int(result.stdout) == LIMITS.pids_max - 1
        assert result.evidence.pids_max_events == 150
        control = await environment.run("python3", "-c", REFUSED, "0")
        assert control.evidence.pids_max_events == 0


async def test_a_program_that_is_refused_a_few_forks_and_copes_just_works() -> None:
    await test_limits.test_a_program_that_is_refused_a_few_forks_and_copes_just_works()


async def test_forks_that_are_not_refused_are_counted_nowhere() -> None:
    async with live() as environment:
        script = "i=0; while [ $i -lt 500 ]; do (exit 0); i=$((i+1)); done; echo $i"
        result = await environment.run("sh", "-c", script)
        assert result.stdout == b"500\n"
        assert result.evidence.pids_max_events == 0


async def test_a_call_that_is_refused_for_another_reason_is_no_refusal() -> None:
    source = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for _ in range(1200):
    assert libc.syscall(56, 0x10000, 0, 0, 0, 0) == -1  # CLONE_THREAD alone
print(errno.errorcode[ctypes.get_errno()])
"""
    async with live() as environment:
        result = await environment.python(source)
        assert result.killed_by is None, result
        assert result.stdout != b"EAGAIN\n"
        assert result.evidence.pids_max_events == 0
