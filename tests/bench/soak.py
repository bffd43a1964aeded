"""Many cycles at once, and what they leave: `python3 -m tests.bench --soak 10000 --at-once 32`.

A cycle is create, a command that writes a file, destroy. Before (after a warm-up) and after, with
the reserve full and nothing moving, the kernel's inventory, the descriptors and the threads of
the services must be equal; the services' memory is compared in per cent. A refusal for want of
capacity is waited out and counted; every other failure, and every leftover, fails the run.
"""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trio
from msgspec import Struct

from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import ExecutionUnavailable, PortError, UnavailableCode
from tests.bench.daemon import Daemon, Profile, check, command, worker
from tests.bench.memory import PROC, pids_by_role, rollup_kib, service_group
from tests.bench.samples import OperationFailed, Summary, leaves, summarise
from tests.bench.spawn import elapsed_ms
from tests.redteam.inventory import Kernel, wait_settled

SERVICES = {"daemon": "sbxd.service", "launcher": "sbxd-launcher.service"}
WARM_UP_CYCLES = 200
GROWTH_GOAL_PER_CENT = 5.0
# Anonymous is what a service holds itself, and is held against the goal. PSS moves with how many
# other processes map the same pages, of programs and of what a sandbox's init has from its fork.
JUDGED_FIELD = "Anonymous"
MEMORY_FIELDS = (JUDGED_FIELD, "Pss", "Pss_Anon", "Rss")
FAILURES_MAX = 200
CAPACITY_PAUSE_SECONDS = 0.2
CAPACITY_SECONDS_MAX = 120
# Helpers end, and sessions close, a moment after the last reply.
SETTLE_SECONDS = 5
SETTLE_WITHIN_SECONDS = 180
PROGRESS_SECONDS = 30


class Service(Struct, frozen=True, kw_only=True):
    """What one service holds when nothing moves."""

    memory_kib: dict[str, float]
    descriptors: int
    threads: int
    processes: int


class Standing(Struct, frozen=True, kw_only=True):
    """What exists when nothing moves."""

    kernel: dict[str, object]
    leftovers: tuple[str, ...]
    services: dict[str, Service]


class Soak(Struct, frozen=True, kw_only=True):
    """What a soak has found. failures, refusals: by code."""

    wanted: int
    done: int
    at_once: int
    seconds: float
    cycle: Summary | None
    destroy: Summary | None
    failures: dict[str, int]
    refusals: dict[str, int]
    examples: tuple[str, ...]
    before: Standing
    after: Standing

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Every difference between before and after that is no memory."""
        found = list(self.after.leftovers)
        for name, count in self.after.kernel.items():
            if count != self.before.kernel[name]:
                found.append(f"{name}: {self.before.kernel[name]} before, {count} after")
        for service, after in self.after.services.items():
            before = self.before.services[service]
            for name in ("descriptors", "threads", "processes"):
                if getattr(after, name) > getattr(before, name):
                    found.append(
                        f"{service} {name}: {getattr(before, name)} before, "
                        f"{getattr(after, name)} after"
                    )
        return tuple(found)

    @property
    def sound(self) -> bool:
        """Whether every cycle succeeded and nothing is left."""
        return self.done == self.wanted and not self.failures and not self.leftovers

    def growth_per_cent(self, service: str, name: str) -> float:
        """Of one service's memory, over the whole soak."""
        before = self.before.services[service].memory_kib[name]
        return (self.after.services[service].memory_kib[name] / before - 1) * 100


@dataclass
class _Tally:
    left: int
    # On trio's clock.
    ends_at: float
    cycles: list[float] = field(default_factory=list)
    destroys: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def failed(self, code: str, text: str) -> None:
        self.failures[code] += 1
        if self.failures[code] <= 2:
            self.examples.append(text)

    def may_go_on(self) -> bool:
        """Whether cycles and time are left, and not too much has failed."""
        return (
            self.left > 0
            and trio.current_time() < self.ends_at
            and self.failures.total() < FAILURES_MAX
        )

    def claim(self) -> bool:
        """Take one of the cycles that are left."""
        if not self.may_go_on():
            return False
        self.left -= 1
        return True


async def soak(daemon: Daemon, cycles: int, at_once: int, within_seconds: float) -> Soak:
    """Warm up (never longer than the soak itself), soak, compare.

    Args: within_seconds: after that no more cycles begin, and those that were not done are
    missing from the result.
    Raises: OperationFailed when the warm-up fails or the services never settle.
    """
    first = min(WARM_UP_CYCLES, cycles)
    _say(f"warm-up of {first}")
    warm_up = await _run(daemon, first, at_once, math.inf)
    if warm_up.failures:
        raise OperationFailed(f"the warm-up failed: {'; '.join(warm_up.examples)}")
    before = await standing()
    begun_ns = time.perf_counter_ns()
    _say(f"{cycles} cycles, {at_once} at a time")
    tally = await _run(daemon, cycles, at_once, within_seconds)
    seconds = elapsed_ms(begun_ns) / 1000
    after = await standing()
    failures = tally.failures.total()
    return Soak(
        wanted=cycles,
        done=len(tally.cycles),
        at_once=at_once,
        seconds=seconds,
        cycle=summarise(tally.cycles, failures=failures),
        destroy=summarise(tally.destroys, failures=failures),
        failures=dict(tally.failures),
        refusals=dict(tally.refusals),
        examples=tuple(tally.examples),
        before=before,
        after=after,
    )


async def standing() -> Standing:
    """What exists once nothing moves. Raises OperationFailed."""
    try:
        await wait_settled(within_seconds=SETTLE_WITHIN_SECONDS)
        await trio.sleep(SETTLE_SECONDS)
        kernel: Kernel = await wait_settled(within_seconds=SETTLE_WITHIN_SECONDS)
    except trio.TooSlowError:
        raise OperationFailed(f"nothing settled within {SETTLE_WITHIN_SECONDS} s") from None
    report = kernel.report()
    del report["leftovers"]
    return Standing(
        kernel=report,
        leftovers=kernel.leftovers,
        services={name: service_now(unit) for name, unit in SERVICES.items()},
    )


def render(found: Soak) -> Iterator[str]:
    """The report, line by line."""
    rate = found.done / found.seconds
    yield (
        f"soak: {found.done} of {found.wanted} cycles, {found.at_once} at a time, "
        f"{found.seconds:.0f} s, {rate:.1f} a second"
    )
    for name, summary in (("cycle", found.cycle), ("destroy", found.destroy)):
        if summary is not None:
            yield f"  {name}: p50 {summary.p50:.0f} ms, p99 {summary.p99:.0f} ms"
    yield f"  failures: {_counts(found.failures)}; retried refusals: {_counts(found.refusals)}"
    for text in found.examples:
        yield f"    {text}"
    for service, before in found.before.services.items():
        after = found.after.services[service]
        for name in MEMORY_FIELDS:
            grown = found.growth_per_cent(service, name)
            verdict = ""
            if name == JUDGED_FIELD:
                met = "met" if grown <= GROWTH_GOAL_PER_CENT else "MISSED"
                verdict = f" (goal {GROWTH_GOAL_PER_CENT:.0f} %: {met})"
            yield (
                f"  {service} {name}: {before.memory_kib[name]:.0f} KiB before, "
                f"{after.memory_kib[name]:.0f} after: {grown:+.1f} %{verdict}"
            )
        yield (
            f"  {service}: {after.descriptors} descriptors ({before.descriptors} before), "
            f"{after.threads} threads ({before.threads}), "
            f"{after.processes} processes ({before.processes})"
        )
    counted = ", ".join(f"{name} {count}" for name, count in found.after.kernel.items())
    yield f"  inventory: {counted}"
    for each in found.leftovers:
        yield f"  LEFT OVER: {each}"
    yield "  nothing is left over" if not found.leftovers else "  something is left over"


async def _run(daemon: Daemon, cycles: int, at_once: int, seconds: float) -> _Tally:
    tally = _Tally(left=cycles, ends_at=trio.current_time() + seconds)
    async with trio.open_nursery() as beside:
        beside.start_soon(_progress, tally, cycles)
        async with trio.open_nursery() as workers:
            for _ in range(at_once):
                workers.start_soon(_work, daemon, tally)
        beside.cancel_scope.cancel()
    return tally


async def _progress(tally: _Tally, cycles: int) -> None:
    begun = trio.current_time()
    while True:
        await trio.sleep(PROGRESS_SECONDS)
        done, seconds = len(tally.cycles), trio.current_time() - begun
        memory = ", ".join(
            f"{name} {service_now(unit).memory_kib['Pss']:.0f} KiB"
            for name, unit in SERVICES.items()
        )
        _say(
            f"{done} of {cycles} after {seconds:.0f} s, failures {_counts(tally.failures)}, "
            f"refusals {_counts(tally.refusals)}; PSS at work: {memory}"
        )


async def _work(daemon: Daemon, tally: _Tally) -> None:
    """One worker, with a connection of its own until that is lost."""
    while tally.may_go_on():
        try:
            async with worker() as remote:
                while tally.claim():
                    if not await _cycle(daemon, remote, tally):
                        break
        except* PortError as group:
            tally.failed("CONNECTION", "; ".join(str(error) for error in leaves(group)))


async def _cycle(daemon: Daemon, remote: RemoteExecutionEnvironment, tally: _Tally) -> bool:
    """One cycle; whether the connection is still good."""
    begun_ns = time.perf_counter_ns()
    try:
        handle = await _provision(daemon, remote, tally)
        try:
            check(await remote.execute(handle, command(("/usr/bin/cp", "/etc/passwd", "f"))))
        finally:
            destroy_ns = time.perf_counter_ns()
            await remote.destroy(handle)
            tally.destroys.append(elapsed_ms(destroy_ns))
    except OperationFailed as error:
        tally.failed("COMMAND", str(error))
    except PortError as error:
        tally.failed(error.code, str(error))
        return error.code is not UnavailableCode.UNREACHABLE
    else:
        tally.cycles.append(elapsed_ms(begun_ns))
    return True


async def _provision(
    daemon: Daemon, remote: RemoteExecutionEnvironment, tally: _Tally
) -> EnvironmentHandle:
    """A fresh environment; a refusal for want of capacity is waited out."""
    specification = daemon.specification(Profile.RESERVE)
    ends_at = trio.current_time() + CAPACITY_SECONDS_MAX
    while True:
        try:
            return await remote.provision(specification)
        except ExecutionUnavailable as error:
            if error.code is not UnavailableCode.CAPACITY or trio.current_time() > ends_at:
                raise
            tally.refusals[error.code] += 1
            await trio.sleep(CAPACITY_PAUSE_SECONDS)


def service_now(unit: str) -> Service:
    """What a service holds now."""
    pids = sorted({pid for _, pid in pids_by_role(service_group(unit))})
    memory = [rollup_kib(pid) for pid in pids]
    return Service(
        memory_kib={name: sum(each.get(name, 0.0) for each in memory) for name in MEMORY_FIELDS},
        descriptors=sum(_entries(PROC / str(pid) / "fd") for pid in pids),
        threads=sum(_entries(PROC / str(pid) / "task") for pid in pids),
        processes=len(pids),
    )


def _entries(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except (FileNotFoundError, ProcessLookupError):  # the process has gone
        return 0


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in sorted(counted.items())) or "none"


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)
