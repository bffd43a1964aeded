"""A pool of slots as a queue: what hit rate comes of which load and size. A simulation, and a real
run beside it: `python3 -m tests.bench --queueing`.

Model: requests arrive as a Poisson stream; one that finds a slot takes it, one that finds none is
built for and takes none; one builder fills the places one after the other, each in a time that is
drawn from measured ones. What the model leaves out: other use of the processors while slots are
built. So its error is stated: the real run's hit rate lies within ERROR_POINTS of the simulated.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import trio
from msgspec import Struct

from sbxd.port.errors import PortError
from tests.bench.daemon import Daemon, FreshSandbox, Profile, worker
from tests.bench.samples import OperationFailed, summarise
from tests.redteam.canaries import origins

ERROR_POINTS = 10.0
SIMULATED = 20_000
CALIBRATIONS = 12
LOADS = (0.25, 0.5, 1.0, 2.0)
SIZES = (1, 2, 4, 8, 16)


@dataclass
class Queue:
    """The pool: `ready` slots of `size`, a builder that is busy until `built_at` with one."""

    size: int
    rng: random.Random
    build_seconds: Sequence[float]
    ready: int = -1
    built_at: float | None = None

    def __post_init__(self) -> None:
        self.ready = self.size

    def arrive(self, now: float) -> bool:
        """A request; whether it found a slot."""
        self._advance(now)
        hit = self.ready > 0
        if hit:
            self.ready -= 1
            if self.built_at is None:
                self.built_at = now + self.rng.choice(self.build_seconds)
        return hit

    def _advance(self, now: float) -> None:
        while self.built_at is not None and self.built_at <= now:
            self.ready += 1
            full = self.ready >= self.size
            begun = self.built_at
            self.built_at = None if full else begun + self.rng.choice(self.build_seconds)


def arrivals(rng: random.Random, per_second: float, count: int) -> list[float]:
    """A Poisson stream, in seconds."""
    now, found = 0.0, []
    for _ in range(count):
        now += rng.expovariate(per_second)
        found.append(now)
    return found


def hit_rate(size: int, times: Sequence[float], build: Sequence[float], seed: int) -> float:
    """The share of these requests that find a slot."""
    queue = Queue(size, random.Random(seed), build)
    return sum(queue.arrive(now) for now in times) / len(times)


class Case(Struct, frozen=True, kw_only=True):
    """One load: its requests a second, as simulated with just these arrivals, and as it was."""

    load: float
    per_second: float
    requests: int
    simulated: float
    real: float

    @property
    def error_points(self) -> float:
        return 100 * abs(self.simulated - self.real)


class Queueing(Struct, frozen=True, kw_only=True):
    """build_seconds: how long a place stays empty after one hand-out. load: arrivals a second times
    the mean of those. table: simulated hit rates by load, then by size."""

    mechanism: str
    size: int
    build_seconds: tuple[float, ...]
    table: dict[str, tuple[float, ...]]
    cases: tuple[Case, ...]

    @property
    def agrees(self) -> bool:
        return all(case.error_points <= ERROR_POINTS for case in self.cases)


async def queueing(daemon: Daemon, seed: int, requests: int) -> Queueing:
    """Calibrate, simulate, and let real requests come. Raises OperationFailed."""
    rng = random.Random(seed)
    described = await daemon.admin.describe()
    size = described.reserve_target
    if size == 0:
        raise OperationFailed("the daemon keeps no pool")
    build = await _calibrate(daemon)
    mean = sum(build) / len(build)
    table = {
        f"{load:g}": tuple(
            hit_rate(each, arrivals(rng, load / mean, SIMULATED), build, seed) for each in SIZES
        )
        for load in LOADS
    }
    cases = []
    for load in LOADS[1:]:
        times = arrivals(rng, load / mean, requests)
        simulated = hit_rate(size, times, build, seed)
        real = await _real(daemon, times, f"queue-{seed}-{load:g}")
        cases.append(
            Case(
                load=load,
                per_second=load / mean,
                requests=requests,
                simulated=simulated,
                real=real,
            )
        )
    return Queueing(
        mechanism=daemon.mechanism,
        size=size,
        build_seconds=tuple(build),
        table=table,
        cases=tuple(cases),
    )


async def _calibrate(daemon: Daemon) -> list[float]:
    """How long a place stays empty, by the clock of whoever looks at it."""
    found = []
    async with worker() as remote:
        for _ in range(CALIBRATIONS):
            await daemon.wait_reserve_full()
            fresh = FreshSandbox(daemon, remote, Profile.RESERVE, "true")
            began = trio.current_time()
            await fresh.run()
            await fresh.clean()
            await daemon.wait_reserve_full()
            found.append(trio.current_time() - began)
    return found


async def _real(daemon: Daemon, times: Sequence[float], prefix: str) -> float:
    await daemon.wait_reserve_full()
    failures: list[str] = []

    async def one(number: int, at: float) -> None:
        await trio.sleep_until(at)
        specification = daemon.specification(Profile.RESERVE, f"{prefix}-{number}")
        try:
            handle = await remote.provision(specification)
            await remote.destroy(handle)
        except PortError as error:
            failures.append(str(error))

    async with worker() as remote, trio.open_nursery() as nursery:
        began = trio.current_time() + 0.1
        for number, at in enumerate(times):
            nursery.start_soon(one, number, began + at)
    if failures:
        raise OperationFailed(f"{len(failures)} requests failed: {failures[0]}")
    found = origins(prefix)
    return found.count("RESERVE") / len(found)


def render(found: Queueing) -> Iterator[str]:
    """The report."""
    build = summarise([1000 * each for each in found.build_seconds], failures=0)
    assert build is not None
    yield (
        f"the pool as a queue, {found.mechanism}: a place is empty for {build.p50:.0f} ms (p50), "
        f"{build.p99:.0f} (p99)"
    )
    yield "  simulated hit rate in % by load (arrivals a second x mean time to refill) and size"
    yield f"  {'load':>8}" + "".join(f"{size:>8}" for size in SIZES)
    for load, rates in found.table.items():
        yield f"  {load:>8}" + "".join(f"{100 * rate:>8.1f}" for rate in rates)
    yield f"  a real run with {found.size} slots: hit rate in %, error in points"
    yield f"  {'load':>8}{'a second':>10}{'requests':>10}{'simulated':>11}{'real':>8}{'error':>8}"
    for case in found.cases:
        yield (
            f"  {case.load:>8g}{case.per_second:>10.2f}{case.requests:>10}"
            f"{100 * case.simulated:>11.1f}{100 * case.real:>8.1f}{case.error_points:>8.1f}"
        )
    yield (
        f"the simulation {'agrees' if found.agrees else 'DOES NOT AGREE'} within "
        f"{ERROR_POINTS:g} points"
    )
