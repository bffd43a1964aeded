"""A soak with an enemy: `python3 -m tests.bench --chaos SECONDS`, as root in a lane.

Worker processes provision, execute and destroy without pause, while commands, workers, the daemon
and its launcher are killed at random. At the end, with everything settled and two passes of the
reaper, nothing may be left and journal and inventory must agree: every scope, volume, block of
uids and process is looked at by its name, and is one of the reserve's slots or a leftover.
Printed: throughput, p50 and p99, outcomes, the longest answers of the admin socket (the daemon's
event loop stalls no longer than that), and what the services' memory has grown by.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio
from msgspec import Struct

from sbxd.port.errors import PortError
from tests.bench.samples import Summary, summarise
from tests.bench.soak import JUDGED_FIELD, standing
from tests.redteam.faults import DAEMON, LAUNCHER, ids_held, journal_ids, main_pid
from tests.redteam.inventory import UID_RANGE, out_of_place, residents
from tests.redteam.live import admin

DEFAULT_SECONDS = 1800
WORKERS = 6
BETWEEN_KILLS_SECONDS = (0.5, 4.0)
# Of a hundred kills.
COMMANDS_SHARE, WORKERS_SHARE, DAEMON_SHARE = 55, 30, 8
PROBE_SECONDS = 0.25
# What a kill or a limit of the load itself brings about.
EXPECTED = frozenset(
    {"ok", "TIMEOUT", "OUTPUT_LIMIT", "CANCELLED", "SERVICE_SHUTDOWN", "CAPACITY", "PIDS",
     "UNREACHABLE", "SHUTTING_DOWN", "ENVIRONMENT_LOST", "ENVIRONMENT_GONE", "SETUP_FAILED",
     "START_BUDGET_EXCEEDED", "MEMORY"}
)  # fmt: skip


class Chaos(Struct, frozen=True, kw_only=True):
    """What has been found. latencies: of operations that went well. leftovers: all must be gone."""

    seconds: float
    seed: int
    operations: int
    latencies: dict[str, Summary]
    outcomes: dict[str, int]
    kills: dict[str, int]
    admin_answers: Summary | None
    memory_growth_kib: dict[str, float]
    leftovers: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing is left and nothing unexpected came back."""
        return not self.leftovers and not self.unexpected and self.operations > 0

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Outcomes that no kill explains."""
        return tuple(name for name in self.outcomes if name.partition(" ")[2] not in EXPECTED)


@dataclass
class _Tally:
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    answers: list[float] = field(default_factory=list)
    workers: dict[int, trio.Process] = field(default_factory=dict)


async def chaos(seconds: float, seed: int) -> Chaos:
    """Soak, then settle and compare. Raises OperationFailed when nothing settles."""
    before = await standing()
    tally = _Tally()
    rng = random.Random(seed)
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = begun + seconds
        for number in range(WORKERS):
            nursery.start_soon(_keep_working, number, seed, tally)
        nursery.start_soon(_enemy, rng, tally)
        nursery.start_soon(_ask, tally)
    elapsed = trio.current_time() - begun
    leftovers = await _left_over()
    after = await standing()
    leftovers += [
        f"{name}: {before.kernel[name]} before, {count} after"
        for name, count in after.kernel.items()
        if name != "processes" and count != before.kernel[name]
    ]
    # Before it one of them may be missing, which an enemy's victim was.
    leftovers += out_of_place(residents(), ids_held())
    leftovers += after.leftovers
    return Chaos(
        seconds=elapsed,
        seed=seed,
        operations=sum(tally.outcomes.values()),
        latencies={
            what: summary
            for what, values in tally.milliseconds.items()
            if (summary := summarise(values, failures=0)) is not None
        },
        outcomes=dict(tally.outcomes),
        kills=dict(tally.kills),
        admin_answers=summarise(tally.answers, failures=0),
        memory_growth_kib={
            name: service.memory_kib[JUDGED_FIELD] - before.services[name].memory_kib[JUDGED_FIELD]
            for name, service in after.services.items()
        },
        leftovers=tuple(leftovers),
    )


def render(found: Chaos) -> Iterator[str]:
    """The report, line by line."""
    rate = found.operations / found.seconds
    yield (
        f"chaos: {found.operations} operations in {found.seconds:.0f} s, {rate:.1f} a second, "
        f"{WORKERS} workers, seed {found.seed}"
    )
    for what, summary in sorted(found.latencies.items()):
        times = f"p50 {summary.p50:.0f} ms, p99 {summary.p99:.0f} ms"
        yield f"  {what}: {summary.n} went well, {times}"
    yield "  kills: " + ", ".join(f"{n} {what}" for what, n in sorted(found.kills.items()))
    for name, count in sorted(found.outcomes.items()):
        mark = "" if name not in found.unexpected else "  UNEXPECTED"
        yield f"    {name}: {count}{mark}"
    if found.admin_answers is not None:
        answers = found.admin_answers
        longest = max(answers.values_ms)
        yield (
            f"  event loop: stalled for {longest:.0f} ms at most, the longest answer of the admin "
            f"socket under load (p50 {answers.p50:.0f} ms, p99 {answers.p99:.0f} ms)"
        )
    for name, kib in sorted(found.memory_growth_kib.items()):
        yield f"  {name}: {kib:+.0f} KiB of memory of its own"
    for each in found.leftovers:
        yield f"  LEFT OVER: {each}"
    yield "  nothing is left over" if not found.leftovers else "  something is left over"


async def _keep_working(number: int, seed: int, tally: _Tally) -> None:
    """One worker process after another."""
    generation = 0
    while True:
        generation += 1
        program = [sys.executable, "-m", "tests.bench.chaos_worker"]
        async with _running([*program, f"{seed}{number}{generation}"]) as process:
            tally.workers[number] = process
            await _listen(process, tally)


@asynccontextmanager
async def _running(program: list[str]) -> AsyncIterator[trio.Process]:
    process = await trio.lowlevel.open_process(program, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
            await process.wait()


async def _listen(process: trio.Process, tally: _Tally) -> None:
    assert process.stdout is not None
    rest = b""
    async for piece in process.stdout:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            what, milliseconds, outcome = json.loads(line)
            tally.outcomes[f"{what} {outcome}"] += 1
            if outcome == "ok":
                tally.milliseconds.setdefault(what, []).append(milliseconds)


async def _enemy(rng: random.Random, tally: _Tally) -> None:
    while True:
        await trio.sleep(rng.uniform(*BETWEEN_KILLS_SECONDS))
        dice = rng.randrange(100)
        if dice < COMMANDS_SHARE:
            victims = _commands()
            if victims and _kill(rng.choice(victims)):
                tally.kills["commands"] += 1
        elif dice < COMMANDS_SHARE + WORKERS_SHARE:
            if tally.workers and _kill(rng.choice(list(tally.workers.values())).pid):
                tally.kills["workers"] += 1
        elif dice < COMMANDS_SHARE + WORKERS_SHARE + DAEMON_SHARE:
            tally.kills["daemon"] += _kill(main_pid(DAEMON))
        else:
            tally.kills["launcher"] += _kill(main_pid(LAUNCHER))


def _commands() -> list[int]:
    """Processes of sandboxes that run a command: those of the workload's uid in an exec leaf."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid in UID_RANGE and "/exec-" in (entry / "cgroup").read_text():
                    found.append(int(entry.name))
    return found


def _kill(pid: int) -> bool:
    if pid <= 1:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


async def _ask(tally: _Tally) -> None:
    """What an operator's question takes while all that goes on."""
    while True:
        try:
            # To connect may take a restart; to answer, no longer than the event loop stalls.
            async with admin() as client:
                begun = trio.current_time()
                await client.list()
        except PortError:
            _forgive()
        else:
            tally.answers.append((trio.current_time() - begun) * 1000)
        await trio.sleep(PROBE_SECONDS)


def _forgive() -> None:
    """A service that is killed often is started more and more slowly; not here."""
    subprocess.run(["systemctl", "reset-failed", DAEMON, LAUNCHER], check=False)


async def _left_over() -> list[str]:
    """Two passes of the reaper, then id by id."""
    with trio.fail_after(120):
        while True:
            _forgive()
            try:
                async with admin() as client:
                    for _ in range(2):
                        await client.reap()
                        await trio.sleep(1)
                await standing()
                async with admin() as client:
                    quarantined = {item.name for item in await client.quarantine()}
                break
            except PortError:
                await trio.sleep(1)
    held, journal = ids_held(), journal_ids()
    return [
        *(f"orphan {each}" for each in sorted(held - journal)),
        *(f"in the journal alone: {each}" for each in sorted(journal - held)),
        *(f"quarantined {each}" for each in sorted(quarantined)),
    ]
