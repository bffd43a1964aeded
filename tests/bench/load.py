"""How many a second, with 1, 8 and 32 at a time: each worker makes the next as soon as its last is
gone.

Beside the rate, which other work on the machine lowers, the CPU time of one cycle is measured, by
the cgroups of those who work for it: what it allows at most does not depend on who else runs.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import trio
from msgspec import Struct

from tests.bench.daemon import Daemon, FreshSandbox, Profile, worker
from tests.bench.memory import CGROUPS, service_group
from tests.bench.peers import Peer
from tests.bench.samples import Mark, Marks, OperationFailed, Summary, summarise
from tests.bench.spawn import elapsed_ms

AT_ONCE = (1, 8, 32)
FAILURES_MAX = 20

Cycle = Callable[[], Awaitable[Marks]]


class Throughput(Struct, frozen=True, kw_only=True):
    """`cycle`: one create + run + destroy, in ms, with the others at work beside it."""

    tool: str
    at_once: int
    seconds: float
    done: int
    per_second: float
    failures: int
    cycle: Summary | None
    steps: dict[Mark, Summary]
    # CPU time of each cycle in ms, by who spends it; empty for a peer.
    cpu_ms: dict[str, float]
    reasons: tuple[str, ...]


@dataclass
class _Tally:
    values: dict[Mark, list[float]] = field(default_factory=dict)
    cycles: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def cpu_ms() -> dict[str, float]:
    """CPU time so far of all who work for a sandbox; of kernel threads, nothing. Raises
    OperationFailed."""
    groups = {
        "daemon": service_group("sbxd.service"),
        "launcher": service_group("sbxd-launcher.service"),
        "sandboxes": CGROUPS / "sbx.slice",
        "PID 1": CGROUPS / "init.scope",
    }
    found = {}
    for name, group in groups.items():
        fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        found[name] = int(fields["usage_usec"]) / 1000
    return found


async def sandboxes(
    daemon: Daemon, profile: Profile, *, seconds: float, at_once: int
) -> Throughput:
    """Fresh sandboxes, each of so many workers over a connection of its own."""
    await daemon.wait_reserve_full()
    tally = _Tally()

    async def one_worker(ends_at: float) -> None:
        async with worker() as remote:

            async def cycle() -> Marks:
                fresh = FreshSandbox(daemon, remote, profile, "true")
                try:
                    marks = await fresh.run()
                finally:
                    cleaned = await fresh.clean()
                return {**marks, **cleaned}

            await _repeat(cycle, tally, ends_at)

    before = cpu_ms()
    found = await _together(profile, one_worker, tally, seconds, at_once)
    spent = {name: used - before[name] for name, used in cpu_ms().items()}
    return msgspec.structs.replace(
        found, cpu_ms={name: used / max(found.done, 1) for name, used in spent.items()}
    )


async def commands(peer: Peer, *, seconds: float, at_once: int) -> Throughput:
    """A peer's command line, from so many threads."""
    tally = _Tally()

    async def one_worker(ends_at: float) -> None:
        async def cycle() -> Marks:
            return await trio.to_thread.run_sync(peer.run_blocking)

        await _repeat(cycle, tally, ends_at)

    return await _together(peer.tool, one_worker, tally, seconds, at_once)


async def _repeat(cycle: Cycle, tally: _Tally, ends_at: float) -> None:
    while trio.current_time() < ends_at and len(tally.reasons) < FAILURES_MAX:
        begun_ns = time.perf_counter_ns()
        try:
            marks = await cycle()
        except OperationFailed as error:
            tally.reasons.append(str(error))
            continue
        tally.cycles.append(elapsed_ms(begun_ns))
        for mark, value in marks.items():
            tally.values.setdefault(mark, []).append(value)


async def _together(
    tool: str,
    one_worker: Callable[[float], Awaitable[None]],
    tally: _Tally,
    seconds: float,
    at_once: int,
) -> Throughput:
    begun_ns = time.perf_counter_ns()
    ends_at = trio.current_time() + seconds
    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(one_worker, ends_at)
    took = elapsed_ms(begun_ns) / 1000
    summaries = {mark: summarise(v, failures=0) for mark, v in tally.values.items()}
    return Throughput(
        tool=tool,
        at_once=at_once,
        seconds=took,
        done=len(tally.cycles),
        per_second=len(tally.cycles) / took,
        failures=len(tally.reasons),
        cycle=summarise(tally.cycles, failures=len(tally.reasons)),
        steps={mark: summary for mark, summary in summaries.items() if summary},
        cpu_ms={},
        reasons=tuple(tally.reasons[:5]),
    )
