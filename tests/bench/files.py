"""Workspace and artifact throughput beside a plain file copy: `python3 -m tests.bench.files`.

As root in a lane. Each way moves the same bytes from one file to another, or to and from the
workspace and the artifact store; in each round every way comes once, in random order, so that a
ratio to the plain copy survives a machine whose speed wanders. All of them end with the data on
disk where the thing itself promises that (a copy and an artifact; a workspace promises none). The
memory that the processes hold is read throughout. Nothing is asserted about time; exit status 1
when a way failed.
"""

import argparse
import hashlib
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import trio
from msgspec import Struct

from sbxd.artifacts.opening import Artifacts, ArtifactSettings, open_artifacts
from sbxd.artifacts.retention import Retention
from sbxd.client.workspace import RemoteWorkspace
from sbxd.port.artifact import ArtifactError, ArtifactOrigin, TrustLevel
from sbxd.port.errors import PortError
from sbxd.port.ids import RunId, TenantId
from sbxd.port.limits import GIB, MIB
from tests.bench.daemon import Daemon, Profile, daemon_here, worker
from tests.bench.machine import Machine, machine
from tests.bench.memory import pids_by_role, scope_groups, service_group
from tests.bench.samples import OperationFailed, leaves
from tests.bench.watching import Growth, Watched, watching

LANE_IMAGE = Path("/var/cache/sbxd-lab/image.tar")
PIECE_BYTES = 256 * 1024
SMALL_BYTES = 1024
TENANT, RUN = TenantId("bench"), RunId("bench-files")
COPY = "plain copy"
HASHED = "plain copy and SHA-256"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int
    bytes: int
    small: int


FULL = Scale(rounds=5, bytes=GIB, small=1000)
QUICK = Scale(rounds=2, bytes=64 * MIB, small=50)


class Way(Struct, frozen=True, kw_only=True):
    """One way to move the bytes. ratio: its median rate beside the plain copy's of the same run
    (below 1 is slower)."""

    name: str
    per_second: tuple[float, ...]
    ratio: float


class Results(Struct, frozen=True, kw_only=True):
    """Everything of one run. large: in MiB a second; small: in files a second."""

    machine: Machine
    mechanism: str
    size_bytes: int
    small_count: int
    large: tuple[Way, ...]
    small: tuple[Way, ...]
    memory: tuple[Growth, ...]
    broken: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where the bytes come from and go to. source: a file of random bytes."""

    folder: Path
    source: Path
    size_bytes: int
    workspace: RemoteWorkspace
    artifacts: Artifacts


async def pieces(path: Path) -> AsyncIterator[bytes]:
    """A file's pieces. Read in this thread, as a plain copy's are: a page cache is no wait."""
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def copy(source: Path, target: Path, *, digest: "hashlib._Hash | None" = None) -> None:
    """The peer: read, write, flush to disk."""
    with source.open("rb", buffering=0) as file, target.open("wb", buffering=0) as copied:
        while piece := file.read(PIECE_BYTES):
            if digest is not None:
                digest.update(piece)
            copied.write(piece)
        os.fsync(copied.fileno())


async def copied(place: Place, *, hashed: bool) -> None:
    digest = hashlib.sha256() if hashed else None
    await trio.to_thread.run_sync(partial(copy, place.source, place.folder / "copy", digest=digest))
    (place.folder / "copy").unlink()


async def written(place: Place) -> None:
    await place.workspace.write_stream(
        "large", size_bytes=place.size_bytes, data=pieces(place.source)
    )


async def read(place: Place) -> None:
    target = place.folder / "read"
    with target.open("wb", buffering=0) as file:
        async with place.workspace.read_stream("large", maximum_bytes=place.size_bytes) as content:
            async for piece in content:
                file.write(piece)
    whole(target, place.size_bytes)


async def stored(place: Place) -> None:
    """A put; deleted and swept off the clock by `cleared`."""
    await put(place, place.source, "large")


async def opened(place: Place, artifact_id: str) -> None:
    target = place.folder / "opened"
    await fetch(place, artifact_id, target)
    whole(target, place.size_bytes)


async def put(place: Place, source: Path, name: str) -> str:
    """The id of what was stored."""
    writer = place.artifacts.writer(TENANT, RUN, ArtifactOrigin.SANDBOX_EXPORT)
    ref = await writer.create(
        pieces(source), name, "application/octet-stream", TrustLevel.EXTERNAL_UNTRUSTED
    )
    return ref.artifact_id


async def fetch(place: Place, artifact_id: str, target: Path) -> None:
    with target.open("wb", buffering=0) as file:
        found = place.artifacts.service.content(TENANT, artifact_id)  # type: ignore[arg-type]
        async with found as content:
            async for piece in content.chunks:
                file.write(piece)


def whole(target: Path, size_bytes: int) -> None:
    """Raises OperationFailed for a file that is not as long as it is to be; removes it."""
    found = target.stat().st_size
    target.unlink()
    if found != size_bytes:
        raise OperationFailed(f"{found} bytes arrived of {size_bytes}")


Ways = dict[str, Callable[[], Awaitable[None]]]


async def large_ways(place: Place) -> Ways:
    """By name; the workspace and the store hold what is read from them."""
    await written(place)
    known = await put(place, place.source, "large")
    return {
        COPY: partial(copied, place, hashed=False),
        HASHED: partial(copied, place, hashed=True),
        "workspace write": partial(written, place),
        "workspace read": partial(read, place),
        "artifact put": partial(stored, place),
        "artifact open": partial(opened, place, known),
    }


async def small_ways(place: Place, count: int) -> Ways:
    """The same for `count` files of SMALL_BYTES each."""
    sources = place.folder / "small"
    sources.mkdir()
    for number in range(count):
        (sources / str(number)).write_bytes(secrets.token_bytes(SMALL_BYTES))
    known: list[str] = []

    async def copy_all() -> None:
        target = place.folder / "copies"
        target.mkdir()
        for number in range(count):
            copy(sources / str(number), target / str(number))
        for number in range(count):
            (target / str(number)).unlink()
        target.rmdir()

    async def write_all() -> None:
        for number in range(count):
            data = (sources / str(number)).read_bytes()
            await place.workspace.write(f"small/{number}", data)

    async def read_all() -> None:
        for number in range(count):
            if len(await place.workspace.read(f"small/{number}")) != SMALL_BYTES:
                raise OperationFailed("a small file is not whole")

    async def list_all() -> None:
        if len(await place.workspace.listdir("small")) != count:
            raise OperationFailed("a listing is not whole")

    async def put_all() -> None:
        known[:] = [await put(place, sources / str(number), "small") for number in range(count)]

    async def open_all() -> None:
        for artifact_id in known:
            await fetch(place, artifact_id, place.folder / "opened")
            whole(place.folder / "opened", SMALL_BYTES)

    await write_all()
    await put_all()
    return {
        COPY: copy_all,
        "workspace write": write_all,
        "workspace read": read_all,
        "workspace listdir": list_all,
        "artifact put": put_all,
        "artifact open": open_all,
    }


async def cleared(place: Place, keep: frozenset[str]) -> None:
    """Take what a put left back out of the store, so that a run needs room for few of them."""
    for found in sorted((place.folder / "store" / "objects").rglob("*")):
        if found.is_file() and found.name not in keep:
            await place.artifacts.service.delete(TENANT, found.name)  # type: ignore[arg-type]
    await place.artifacts.sweeper.sweep()


async def measure(
    ways: Ways, amount: float, rounds: int, broken: list[str], clear: Callable[[], Awaitable[None]]
) -> tuple[Way, ...]:
    """Each way once a round, in random order. amount: what one call moves."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            begun = time.perf_counter()
            try:
                await ways[name]()
            except (PortError, ArtifactError, OSError, OperationFailed) as problem:
                broken.append(f"{name}: {problem}")
                continue
            rates[name].append(amount / (time.perf_counter() - begun))
        await clear()
    floor = statistics.median(rates[COPY] or [0.0]) or 1.0
    return tuple(
        Way(name=name, per_second=tuple(found), ratio=statistics.median(found or [0.0]) / floor)
        for name, found in rates.items()
    )


async def run(scale: Scale, image: Path | None, folder: Path) -> Results:
    """Measure everything. Raises OperationFailed, the port's errors."""
    broken: list[str] = []
    async with daemon_here(image) as daemon, placed(scale, daemon, folder) as place:
        watched = [Watched("this worker", os.getpid()), *services()]
        async with watching(watched) as memory:
            _say(f"{scale.bytes // MIB} MiB, {scale.rounds} rounds")
            large = await large_ways(place)
            keep = frozenset(path.name for path in (folder / "store").rglob("*") if path.is_file())
            clear = partial(cleared, place, keep)
            found = await measure(large, scale.bytes / MIB, scale.rounds, broken, clear)
            _say(f"{scale.small} files of {SMALL_BYTES} bytes")

            async def nothing() -> None:
                """Few bytes: they stay until the end."""

            small = await measure(
                await small_ways(place, scale.small), scale.small, scale.rounds, broken, nothing
            )
        return Results(
            machine=machine(),
            mechanism=daemon.mechanism,
            size_bytes=scale.bytes,
            small_count=scale.small,
            large=found,
            small=small,
            memory=memory(),
            broken=tuple(broken),
        )


def services() -> list[Watched]:
    """The processes of daemon and launcher, and the stewards of the environments."""
    found = [
        Watched(name, pid)
        for name, unit in (("daemon", "sbxd.service"), ("launcher", "sbxd-launcher.service"))
        for _, pid in pids_by_role(service_group(unit))
    ]
    if not any(each.name == "daemon" for each in found):
        raise OperationFailed("the daemon has no process")
    stewards = [
        Watched("stewards", pid)
        for scope in scope_groups("sbx-*.scope")
        for role, pid in pids_by_role(scope)
        if role == "box/steward"
    ]
    return [*found, *stewards]


@asynccontextmanager
async def placed(scale: Scale, daemon: Daemon, folder: Path) -> AsyncIterator[Place]:
    """An environment with room, a store, and a file of random bytes."""
    source, store = folder / "source", folder / "store"
    store.mkdir(mode=0o700)
    with source.open("wb") as file:
        for _ in range(scale.bytes // MIB):
            file.write(os.urandom(MIB))
    limits = msgspec.structs.replace(
        daemon.limits,
        # A write is whole beside what it replaces.
        workspace_bytes=2 * scale.bytes + 256 * MIB,
        inodes_max=20_000,
    )
    wanted = msgspec.structs.replace(daemon.specification(Profile.COLD), limits=limits)
    retention = Retention(artifact_bytes_max=2 * scale.bytes)
    settings = ArtifactSettings(directory=str(store), retention=retention)
    async with open_artifacts(settings) as artifacts, worker() as remote:
        handle = await remote.provision(wanted)
        try:
            workspace = RemoteWorkspace(remote.channel, handle)
            yield Place(folder, source, scale.bytes, workspace, artifacts)
        finally:
            await remote.destroy(handle)


def render(results: Results) -> str:
    """The report."""
    m = results.machine
    lines = [
        f"{m.cores} cores of {m.processor}, kernel {m.kernel}, lane {m.lane}, "
        f"{results.mechanism}, load {m.load_at_start}"
    ]
    for title, ways in (
        (f"{results.size_bytes // MIB} MiB, in MiB a second", results.large),
        (f"{results.small_count} files of {SMALL_BYTES} bytes, in files a second", results.small),
    ):
        lines.append(f"{title:<44}{'p50':>9}{'least':>9}{'most':>9}{'x copy':>8}")
        for way in ways:
            rates = way.per_second or (0.0,)
            lines.append(
                f"  {way.name:<42}{statistics.median(rates):>9.0f}{min(rates):>9.0f}"
                f"{max(rates):>9.0f}{way.ratio:>8.2f}"
            )
    lines.append(f"{'anonymous memory, KiB':<44}{'before':>9}{'most':>9}{'after':>9}")
    lines += [
        f"  {each.name:<42}{each.before_kib:>9.0f}{each.most_kib:>9.0f}{each.after_kib:>9.0f}"
        for each in results.memory
    ]
    lines += [f"failed: {each}" for each in results.broken]
    return "\n".join(lines) + "\n"


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Measure, report; the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.bench.files", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--rounds", type=int, help="instead of the mode's own number")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every sample there")
    parser.add_argument("--image", type=Path, help="root file system tar (default: the lane's)")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on which disk")
    options = parser.parse_args(argv)
    scale = QUICK if options.quick else FULL
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    image = options.image or (LANE_IMAGE if LANE_IMAGE.exists() else None)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="sbxd-bench-") as place:
        results: Results | None = None
        try:
            results = trio.run(run, scale, image, Path(place))
        except* (PortError, ArtifactError, OperationFailed) as group:
            sys.stdout.write("".join(f"failed: {error}\n" for error in leaves(group)))
    if results is None:
        return 1
    sys.stdout.write(render(results))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 1 if results.broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
