"""Every limit is enforced by the kernel and reported with its reason, in a live environment.

Source: gate.sandbox.limits_enforced (DISK is `test_disk.py`), DESIGN section 3, CASES RES-01,
RES-03, RES-05, RES-06, RES-07.
"""

import os
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import trio

from sbxd.port.command import KillReason
from sbxd.port.limits import MIB
from tests.pacing import next_look
from tests.redteam.inventory import Resident, residents
from tests.redteam.live import LIMITS, Live, live

pytestmark = [
    pytest.mark.needs("daemon", "limits"),
    pytest.mark.gate("gate.sandbox.limits_enforced"),
]

ALLOCATOR = """
import sys
blocks = []
for megabytes in range(8, 4096, 8):
    blocks.append(bytearray(8 * 2**20))
    print("have", megabytes, flush=True)
"""


def _host_processes() -> int:
    return sum(1 for entry in os.listdir("/proc") if entry.isdigit())


def _living(environment: Live) -> list[Resident]:
    """Its processes but for those that are dead and not yet reaped by their init."""
    return [
        each
        for each in residents()
        if each.environment_id == environment.handle.environment_id and each.state[0] not in "ZX"
    ]


@pytest.mark.case("RES-03")
async def test_an_allocator_is_ended_with_memory_and_its_last_line_arrives() -> None:
    async with live() as environment:
        result = await environment.python(ALLOCATOR)
    assert result.killed_by is KillReason.MEMORY
    assert result.exit_code is None
    assert result.evidence.oom_kill >= 1
    lines = result.stdout.decode().splitlines()
    assert lines, "the partial output is lost"
    reached = int(lines[-1].split()[1])
    assert 64 <= reached < 128, "killed far from the limit of 128 MiB"


async def test_an_allocator_below_the_limit_is_left_alone() -> None:
    async with live() as environment:
        result = await environment.python("x = bytearray(48 * 2**20); print(len(x))")
    assert result.killed_by is None
    assert result.exit_code == 0
    assert result.stdout == b"50331648\n"


@pytest.mark.case("RES-03")
async def test_a_child_killed_for_memory_behind_its_parents_back_is_memory() -> None:
    source = f"""
import subprocess, sys
child = subprocess.run([sys.executable, "-c", {ALLOCATOR!r}], stdout=subprocess.DEVNULL)
print("parent saw", child.returncode, flush=True)
sys.exit(0)
"""
    async with live() as environment:
        result = await environment.python(source)
    assert result.killed_by is KillReason.MEMORY
    assert result.evidence.oom_kill >= 1


async def test_a_refused_allocation_that_the_program_handles_is_its_own_exit() -> None:
    source = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (64 * 2**20, 64 * 2**20))
try:
    bytearray(512 * 2**20)
except MemoryError:
    sys.exit(7)
"""
    async with live() as environment:
        result = await environment.python(source)
    assert result.killed_by is None
    assert result.exit_code == 7


@pytest.mark.case("RES-01")
async def test_a_fork_bomb_is_ended_with_pids_and_the_host_stays_flat() -> None:
    source = """
import os, time
print("start", flush=True)
while True:
    try:
        if os.fork() == 0:
            pass
    except OSError:
        pass
"""
    async with live() as environment:
        before, idle = _host_processes(), len(_living(environment))
        assert idle > 0
        result = await environment.python(source)
        # Init, the steward and the parked process of the next command, or two.
        assert len(_living(environment)) <= idle + 1, "processes survived the kill"
        with trio.fail_after(60):
            while _host_processes() > before + 8:
                await next_look()
    assert result.killed_by is KillReason.PIDS
    assert result.evidence.pids_max_events > 0
    assert result.stdout.startswith(b"start")


@pytest.mark.case("RES-01")
async def test_a_bomb_of_threads_is_ended_with_pids() -> None:
    source = """
import threading, time
print("start", flush=True)
made = 0
while True:
    try:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        made += 1
    except RuntimeError:
        pass
"""
    async with live() as environment:
        result = await environment.python(source)
    assert result.killed_by is KillReason.PIDS, result
    assert result.usage.pids_peak == LIMITS.pids_max
    assert result.stdout == b"start\n"


async def test_a_program_that_is_refused_a_few_forks_and_copes_just_works() -> None:
    """What `make -j` does: EAGAIN is answered by waiting for a child."""
    source = """
import os
running = done = refused = 0
while done < 150:
    if running < 100 and done + running < 150:
        try:
            pid = os.fork()
        except BlockingIOError:
            refused += 1
        else:
            if pid == 0:
                os._exit(0)
            running += 1
            continue
    if running:
        os.wait()
        running -= 1
        done += 1
print("done", done, flush=True)
"""
    async with live() as environment:
        result = await environment.python(source)
    assert result.killed_by is None, result
    assert result.stdout == b"done 150\n"


@pytest.mark.case("RES-06")
async def test_a_sleeper_and_its_daemons_are_ended_with_timeout_and_none_survives() -> None:
    source = """
import os, signal, sys, time
for n in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)
        while True:
            time.sleep(1)
print("sleeping", flush=True)
time.sleep(3600)
"""
    async with live() as environment:
        result = await environment.python(source, timeout_seconds=3)
        seen = await environment.python(
            "import os\nprint([p for p in os.listdir('/proc') if p.isdigit()])"
        )
    assert result.killed_by is KillReason.TIMEOUT
    assert result.timed_out
    assert result.stdout == b"sleeping\n"
    assert 3000 <= result.duration_ms < 30_000
    survivors = seen.stdout.decode().count(",") + 1
    assert survivors <= 2, f"processes besides init and the lister: {seen.stdout!r}"


@pytest.mark.case("RES-07")
async def test_endless_output_is_ended_with_exactly_the_cap() -> None:
    async with live() as environment:
        daemon = _daemon_rss()
        result = await environment.python(
            "import os\nwhile True: os.write(1, b'x' * 65536)", maximum_output_bytes=3 * MIB + 17
        )
        grown = _daemon_rss() - daemon
    assert result.killed_by is KillReason.OUTPUT_LIMIT
    assert result.stdout_truncated
    assert not result.stderr_truncated
    assert result.stdout == b"x" * (3 * MIB + 17)
    assert grown < 16 * MIB, f"the daemon grew by {grown} bytes"


async def test_output_of_exactly_the_cap_is_no_violation() -> None:
    async with live() as environment:
        result = await environment.python(
            "import sys; sys.stdout.write('y' * 70000)", maximum_output_bytes=70_000
        )
    assert result.killed_by is None
    assert not result.stdout_truncated
    assert len(result.stdout) == 70_000


SPIN = "while True: pass"
SPIN_SECONDS = 8


async def _processor_time(*tenants: str) -> list[int]:
    """How many ms each got, of commands that spin at the same time."""
    used = [0] * len(tenants)

    async def spin(position: int, environment: Live, begin: trio.Event) -> None:
        await begin.wait()
        result = await environment.python(SPIN, timeout_seconds=SPIN_SECONDS)
        assert result.killed_by is KillReason.TIMEOUT
        assert result.usage.cpu_ms is not None
        used[position] = result.usage.cpu_ms

    async with AsyncExitStack() as stack:
        begin = trio.Event()
        environments = [await stack.enter_async_context(live(tenant=each)) for each in tenants]
        async with trio.open_nursery() as nursery:
            for position, environment in enumerate(environments):
                nursery.start_soon(spin, position, environment, begin)
            begin.set()
    return used


@pytest.mark.case("RES-08", "RES-16")
async def test_a_tenant_with_three_busy_environments_gets_no_more_than_one_with_one() -> None:
    *many, single = await _processor_time("many", "many", "many", "single")
    share = single / (sum(many) + single)
    assert share > 0.36, f"the single one got {share:.0%} of {many} and {single}"


async def test_control_of_one_tenant_each_environment_gets_its_part() -> None:
    *rest, last = await _processor_time("many", "many", "many", "many")
    share = last / (sum(rest) + last)
    assert share < 0.36, f"the last one got {share:.0%} of {rest} and {last}"


@pytest.mark.case("RES-08")
async def test_many_short_burners_together_have_the_rate_of_one() -> None:
    """None of them lives long enough for a limit of its own."""
    source = """
import os, time
while True:
    for _ in range(4):
        if os.fork() == 0:
            end = time.process_time() + 0.02
            while time.process_time() < end:
                pass
            os._exit(0)
    for _ in range(4):
        os.wait()
"""
    limits = msgspec.structs.replace(LIMITS, cpu_millicores=200)
    async with live(limits) as environment:
        result = await environment.python(source, timeout_seconds=5)
    assert result.killed_by is KillReason.TIMEOUT
    assert result.usage.cpu_ms is not None
    allowed_ms = result.duration_ms * 200 // 1000
    assert result.usage.cpu_ms <= allowed_ms * 12 // 10 + 100
    async with live() as environment:
        control = await environment.python(source, timeout_seconds=5)
    assert control.usage.cpu_ms is not None
    assert control.usage.cpu_ms > 2 * allowed_ms, "the control: they would use more"


@pytest.mark.case("RES-05")
async def test_a_background_holder_of_stdout_does_not_delay_the_reply() -> None:
    async with live() as environment:
        result = await environment.run("sh", "-c", "sleep 60 & echo out; exit 3")
    assert result.exit_code == 3
    assert result.killed_by is None
    assert result.stdout == b"out\n"
    assert result.duration_ms < 20_000


def _daemon_rss() -> int:
    """Resident bytes of the process that runs sbxd."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                comm_ok = b"sbxd" in command and b"launcher" not in command
                if comm_ok and (entry / "cgroup").read_text().rstrip().endswith("/sbxd.service"):
                    return int((entry / "statm").read_text().split()[1]) * os.sysconf(
                        "SC_PAGE_SIZE"
                    )
            except (FileNotFoundError, ProcessLookupError):
                continue
    raise AssertionError("sbxd.service has no process")
