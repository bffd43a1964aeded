"""Measure sbxd beside its peers: `python3 -m tests.bench` as root in a lane (docs/performance.md).

Nothing is asserted about time. Exit status: 0, or 1 when an operation failed, after the whole
report.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import trio

from sbxd.port.errors import PortError
from tests.bench import (
    attacker,
    attacks,
    audit,
    canaries,
    chaos,
    kill,
    load,
    memory,
    queueing,
    roundtrip,
    soak,
    template,
)
from tests.bench.daemon import Daemon, FreshSandbox, Profile, daemon_here, live_sandbox, worker
from tests.bench.machine import machine
from tests.bench.peers import PROGRAMS, Peers, Tool, peers_on
from tests.bench.report import Detail, render
from tests.bench.results import Group, Results, group_of
from tests.bench.rounds import Operation, take
from tests.bench.samples import OperationFailed, Pace, leaves, summarise
from tests.bench.targets import EXEC, EXEC_EMPTY, EXEC_FULL, START, judge
from tests.redteam import faults
from tests.redteam.live import default_image

LANE_IMAGE = Path("/var/cache/sbxd-lab/image.tar")
IDLE_COUNT = 20
FILES = 10_000
FAULT_POINTS = 224
CANARIES = 1000
REQUESTS = 60

GVISOR = "gvisor"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int
    exec_rounds: int
    pings: int
    load_seconds: float
    peer_load_seconds: float


FULL = Scale(rounds=100, exec_rounds=200, pings=2000, load_seconds=20, peer_load_seconds=6)
QUICK = Scale(rounds=8, exec_rounds=20, pings=300, load_seconds=3, peer_load_seconds=1)


@dataclass
class Run:
    """What has been found so far."""

    scale: Scale
    rng: random.Random
    peers: Peers
    groups: list[Group] = field(default_factory=list)
    throughput: list[load.Throughput] = field(default_factory=list)
    idle: list[memory.IdleMemory] = field(default_factory=list)
    services: memory.ServiceMemory | None = None
    mechanism: str | None = None
    refill_ms: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def note(self, part: str, group: BaseExceptionGroup) -> None:
        """A part could not be run."""
        self.broken += [f"{part}: {error}" for error in leaves(group)]

    async def sample(
        self, name: str, operations: Sequence[Operation], rounds: int, *references: str
    ) -> None:
        """Sample a group in both paces."""
        for pace in Pace:
            _say(f"{name}, {pace}: {rounds} rounds of {len(operations)}")
            found = await take(operations, rounds=rounds, pace=pace, rng=self.rng, rest=trio.sleep)
            self.groups.append(
                group_of(name, found, pace=pace, rounds=rounds, references=references)
            )

    async def start(self, daemon: Daemon | None) -> None:
        """Fresh sandboxes, of everybody."""
        peers, programs = self.peers, tuple(PROGRAMS)
        operations: list[Operation] = []
        operations += [peers.bare(program) for program in programs]
        operations += [peers.bwrap(program) for program in programs]
        operations += [peers.crun(program) for program in ("true", "echo")]
        operations += [peers.scope("true")]
        if self.mechanism == GVISOR:
            operations += [peers.runsc(program) for program in programs]
        async with AsyncExitStack() as stack:
            if self.mechanism == GVISOR:
                operations += stack.enter_context(template.templates(peers))
            if daemon is not None:
                remote = await stack.enter_async_context(worker())
                operations += [
                    FreshSandbox(daemon, remote, Profile.RESERVE, program) for program in programs
                ]
                operations += [
                    FreshSandbox(daemon, remote, Profile.COLD, program)
                    for program in ("true", "echo")
                ]
            await self.sample(START, operations, self.scale.rounds, Tool.BARE, Tool.BWRAP)

    async def second(self, daemon: Daemon | None) -> None:
        """A second command in what runs already."""
        operations: list[Operation] = [self.peers.bare("true"), self.peers.crun_exec("true")]
        if self.mechanism == GVISOR:
            operations += [self.peers.runsc_exec(program) for program in ("true", "python3")]
        async with AsyncExitStack() as stack:
            if daemon is not None:
                remote = await stack.enter_async_context(worker())
                for tool, files in ((EXEC_EMPTY, 0), (EXEC_FULL, FILES)):
                    operations.append(
                        await stack.enter_async_context(
                            live_sandbox(daemon, remote, tool, files=files)
                        )
                    )
            await self.sample(EXEC, operations, self.scale.exec_rounds, Tool.BARE, Tool.CRUN_EXEC)

    async def kill(self, daemon: Daemon | None) -> None:
        """From cgroup.kill to populated 0, of processes that the host's kernel knows."""
        if daemon is None or self.mechanism == GVISOR:
            return
        async with worker() as remote, kill.kills(daemon, remote) as operations:
            await self.sample("kill to populated 0", operations, self.scale.rounds)

    async def protocol(self, daemon: Daemon) -> None:
        """Round trips."""
        count = self.scale.pings
        found = [roundtrip.pings(count), await roundtrip.lists(daemon, count)]
        self.groups.append(
            group_of("round trip", found, pace=Pace.TIGHT, rounds=count, references=())
        )

    async def together(self, daemon: Daemon | None) -> None:
        """1, 8 and 32 at a time."""
        scale = self.scale
        peers = [self.peers.bare("true"), self.peers.bwrap("true"), self.peers.crun("true")]
        if self.mechanism == GVISOR:
            peers.append(self.peers.runsc("true"))
        for at_once in load.AT_ONCE:
            for peer in peers:
                _say(f"{peer.tool}, {at_once} at a time")
                seconds = scale.peer_load_seconds
                found = await load.commands(peer, seconds=seconds, at_once=at_once)
                self.throughput.append(found)
            if daemon is not None:
                for profile, seconds in (
                    (Profile.RESERVE, scale.load_seconds),
                    (Profile.COLD, scale.peer_load_seconds),
                ):
                    _say(f"{profile}, {at_once} at a time")
                    self.throughput.append(
                        await load.sandboxes(daemon, profile, seconds=seconds, at_once=at_once)
                    )

    async def remember(self, daemon: Daemon | None) -> None:
        """Memory, which comes first since the daemon's grows with use."""
        _say(f"memory of {IDLE_COUNT} idle sandboxes")
        if daemon is not None:
            self.services = await memory.services(daemon)
            self.idle.append(await memory.idle_sandboxes(daemon, IDLE_COUNT))
        self.idle.append(await memory.idle_bwraps(self.peers, IDLE_COUNT))
        if self.mechanism == GVISOR:
            self.idle.append(await memory.idle_runscs(self.peers, IDLE_COUNT))


async def measure(run: Run, image: Path | None, only: frozenset[str]) -> None:
    """Run all parts; what fails as a whole is noted and the next part goes on."""
    async with AsyncExitStack() as stack:
        daemon: Daemon | None = None
        if "sbxd" in only:
            try:
                daemon = await stack.enter_async_context(daemon_here(image))
                run.mechanism, run.refill_ms = daemon.mechanism, daemon.refill_ms
            except* (PortError, OperationFailed) as group:
                run.note("sbxd", group)
        parts = {
            "memory": run.remember,
            "start": run.start,
            "exec": run.second,
            "load": run.together,
            "kill": run.kill,
        }
        for name, part in parts.items():
            if name in only:
                try:
                    await part(daemon)
                except* (PortError, OperationFailed) as group:
                    run.note(name, group)
        if daemon is not None and "protocol" in only:
            try:
                await run.protocol(daemon)
            except* (PortError, OperationFailed) as group:
                run.note("protocol", group)


FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class Alone(Generic[FoundT]):
    """One thing that is run by itself. run: raises OperationFailed and the port's errors. lines:
    the report. is_good: for the exit status."""

    name: str
    run: Callable[[Daemon], Awaitable[FoundT]]
    lines: Callable[[FoundT], Iterable[str]]
    is_good: Callable[[FoundT], bool]

    def report(self, image: Path | None, json: Path | None) -> int:
        """Run it, show what was found, write it to `json`; the exit status."""
        found: list[FoundT] = []

        async def run() -> None:
            async with daemon_here(image) as daemon:
                found.append(await self.run(daemon))

        try:
            trio.run(run)
        except* (PortError, OperationFailed) as group:
            found.clear()
            sys.stdout.write("".join(f"{self.name}: {error}\n" for error in leaves(group)))
        if not found:
            return 1
        sys.stdout.write("\n".join(self.lines(found[0])) + "\n")
        if json is not None:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(found[0])))
        return 0 if self.is_good(found[0]) else 1


async def find_faults(count: int, seed: int) -> faults.Found:
    """So many points of the fault loop. Raises the port's errors."""
    found = faults.Found()
    digest = await default_image()
    for point in faults.points(count, seed):
        await faults.try_point(point, digest, found)
        _say(f"{point}: {found}")
    return found


def fault_lines(found: faults.Found, seed: int) -> Iterable[str]:
    """The report of a fault loop."""
    yield f"faults, seed {seed}: {found}"
    for each in (*found.orphans, *found.wrong_kills, *found.disagreements):
        yield f"  {each}"


def asked_alone(options: argparse.Namespace, seed: int) -> Alone[Any] | None:
    """What is to be run by itself; None for the whole bench."""
    if options.faults is not None:
        return Alone(
            "faults",
            lambda _daemon: find_faults(options.faults, seed),
            lambda found: fault_lines(found, seed),
            lambda found: not (found.orphans or found.wrong_kills or found.disagreements),
        )
    if options.chaos is not None:
        return Alone(
            "chaos",
            lambda _daemon: chaos.chaos(options.chaos, seed),
            chaos.render,
            lambda found: found.sound,
        )
    if options.audit is not None:
        return Alone(
            "audit",
            lambda daemon: audit.audited(daemon, options.audit),
            audit.render,
            lambda found: found.holds,
        )
    if options.attacks is not None:
        return Alone(
            "attacks",
            lambda daemon: attacks.attacks(daemon, options.attacks, options.attack),
            attacks.render,
            lambda found: found.sound,
        )
    if options.canaries is not None:
        return Alone(
            "canaries",
            lambda daemon: canaries.canaries(daemon, options.canaries, options.within),
            canaries.render,
            lambda found: found.sound,
        )
    if options.queueing is not None:
        return Alone(
            "queueing",
            lambda daemon: queueing.queueing(daemon, seed, options.queueing),
            queueing.render,
            lambda found: found.agrees,
        )
    if options.soak is not None:
        return Alone(
            "soak",
            lambda daemon: soak.soak(daemon, options.soak, options.at_once, options.within),
            soak.render,
            lambda found: found.sound,
        )
    return None


PARTS = ("sbxd", "memory", "start", "exec", "load", "kill", "protocol")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything: under a minute")
    parser.add_argument("--profile", action="store_true", help="show where the time goes, by step")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every sample there")
    parser.add_argument("--image", type=Path, help="root file system tar (default: the lane's)")
    parser.add_argument("--seed", type=int, help="of the random order (default: from the clock)")
    parser.add_argument("--rounds", type=int, help="instead of the mode's own number")
    parser.add_argument("--skip", action="append", default=[], choices=PARTS, help="leave out")
    parser.add_argument("--soak", type=int, metavar="CYCLES", help="that many cycles, nothing else")
    parser.add_argument("--at-once", type=int, default=32, help="cycles at a time of a soak")
    parser.add_argument(
        "--within",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="end a soak or canaries early",
    )
    parser.add_argument(
        "--chaos",
        type=float,
        nargs="?",
        const=chaos.DEFAULT_SECONDS,
        metavar="SECONDS",
        help="a soak with random kills, nothing else (default: 30 minutes)",
    )
    parser.add_argument(
        "--audit", type=int, metavar="EVENTS", help="so many audit events under load, nothing else"
    )
    parser.add_argument(
        "--attacks",
        type=float,
        nargs="?",
        const=attacks.DEFAULT_SECONDS,
        metavar="SECONDS",
        help="what a worker notices while another attacks, each attack for so long, nothing else",
    )
    parser.add_argument(
        "--attack",
        action="append",
        default=[],
        choices=attacker.ATTACKS,
        help="of --attacks only this one; may be given again",
    )
    parser.add_argument(
        "--faults",
        type=int,
        nargs="?",
        const=FAULT_POINTS,
        metavar="POINTS",
        help=f"SIGKILL at so many instants, nothing else (default: {FAULT_POINTS})",
    )
    parser.add_argument(
        "--canaries",
        type=int,
        nargs="?",
        const=CANARIES,
        metavar="HAND_OUTS",
        help=f"hand-outs of the pool with planted canaries, nothing else (default: {CANARIES})",
    )
    parser.add_argument(
        "--queueing",
        type=int,
        nargs="?",
        const=REQUESTS,
        metavar="REQUESTS",
        help=f"the pool simulated and with so many requests at each load (default: {REQUESTS})",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, report; the exit status."""
    options = arguments(argv)
    scale = QUICK if options.quick else FULL
    if options.rounds:
        scale = Scale(**{**vars(scale), "rounds": options.rounds, "exec_rounds": options.rounds})
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000
    image = options.image or (LANE_IMAGE if LANE_IMAGE.exists() else None)
    alone = asked_alone(options, seed)
    if alone is not None:
        return alone.report(image, options.json)
    here = machine()
    with peers_on(image) as peers:
        run = Run(scale, random.Random(seed), peers)
        trio.run(measure, run, image, frozenset(PARTS) - frozenset(options.skip))
    results = Results(
        machine=here,
        mechanism=run.mechanism,
        seed=seed,
        quick=options.quick,
        groups=tuple(run.groups),
        throughput=tuple(run.throughput),
        services=run.services,
        idle=tuple(run.idle),
        refill=summarise(run.refill_ms, failures=0),
        targets=judge(run.groups, run.throughput, run.idle, run.services, run.mechanism),
        broken=tuple(run.broken),
    )
    sys.stdout.write(render(results, Detail.PROFILE if options.profile else Detail.RESULTS))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 1 if results.failures else 0


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
