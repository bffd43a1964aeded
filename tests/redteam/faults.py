"""The fault loop: kill the daemon, its launcher, or both, at a chosen instant of an operation, and
see what is left when they are back.

A point is a victim, an operation and an instant. The instant is either the n-th write to the
creation journal after the operation began (so that every step between intent, resource and
commit is met) or a seeded fraction of how long the operation takes. After each point, with the
services back and two passes of the reaper, what the kernel, systemd and the disk hold is compared
with the journal, id by id. A fresh environment whose command runs through both passes, and a
process that is none of ours, must still be there: otherwise the repair killed the wrong one.
"""

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import trio

from sbxd.client.admin import AdminClient
from sbxd.client.remote import RemoteExecutionEnvironment, connect
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import PortError
from sbxd.port.limits import MIB, ResourceLimits
from tests.pacing import next_look
from tests.redteam.inventory import CGROUP, STATE, journal_states, wait_settled
from tests.redteam.live import WORKER_SOCKET, Live, admin, specification

DAEMON, LAUNCHER = "sbxd.service", "sbxd-launcher.service"
WRITES_MAX = 4
INTERVAL_SECONDS = 0.2
LOOK_SECONDS = 0.0005
WITHIN_SECONDS = 120.0
WRITTEN_SECONDS = 30.0
SMALL = ResourceLimits(
    cpu_millicores=2000,
    memory_bytes=64 * MIB,
    pids_max=32,
    workspace_bytes=16 * MIB,
    inodes_max=500,
    wall_clock_seconds=60,
)


class Victim(StrEnum):
    DAEMON = "daemon"
    LAUNCHER = "launcher"
    BOTH = "both"


class Operation(StrEnum):
    """COLD: a provision that the reserve has nothing for."""

    PROVISION = "provision"
    COLD = "cold"
    EXECUTE = "execute"
    DESTROY = "destroy"


# About how long each takes on a quiet machine; a random instant lies within twice that.
TYPICAL_SECONDS = {
    Operation.PROVISION: 0.02,
    Operation.COLD: 0.2,
    Operation.EXECUTE: 0.15,
    Operation.DESTROY: 0.1,
}


@dataclass(frozen=True)
class Point:
    """after_writes: the n-th write to the journal; None: after_seconds."""

    victim: Victim
    operation: Operation
    after_writes: int | None
    after_seconds: float

    def __str__(self) -> str:
        if self.after_writes is not None:
            return f"{self.victim} at journal write {self.after_writes} of {self.operation}"
        return f"{self.victim} {self.after_seconds * 1000:.1f} ms into {self.operation}"


@dataclass
class Found:
    """What all points together have found. Every list but `points` must be empty."""

    points: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    wrong_kills: list[str] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    quarantined: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{len(self.points)} points, {len(self.orphans)} orphans, "
            f"{len(self.wrong_kills)} wrong kills, {len(self.disagreements)} disagreements of "
            f"journal and inventory, {len(self.quarantined)} quarantines"
        )


def points(count: int, seed: int) -> Iterator[Point]:
    """So many: the journal's steps first, every victim at each, then random instants."""
    made = 0
    for write in range(1, WRITES_MAX + 1):
        for operation in (Operation.COLD, Operation.DESTROY):
            for victim in Victim:
                if made == count:
                    return
                yield Point(victim, operation, write, 0.0)
                made += 1
    rng = random.Random(seed)
    for _ in range(count - made):
        operation = rng.choice(list(Operation))
        yield Point(
            rng.choice(list(Victim)),
            operation,
            None,
            rng.uniform(0, 2 * TYPICAL_SECONDS[operation]),
        )


async def try_point(point: Point, image: str, found: Found) -> None:
    """Bring one point about and look at what is left."""
    doomed: set[str] = set()
    operation_began = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_operate, point.operation, image, operation_began, doomed)
        with trio.fail_after(WITHIN_SECONDS):
            await operation_began.wait()
        await _instant(point)
        _kill(point.victim)
    await _restored()
    found.points.append(str(point))
    with decoy() as stranger:
        await _repair_beside_a_live_one(point, image, found)
        if stranger.poll() is not None:
            found.wrong_kills.append(f"{point}: a process that is none of ours")
    await wait_settled(within_seconds=WITHIN_SECONDS)
    await _compare(point, doomed, found)


async def _operate(operation: Operation, image: str, began: trio.Event, doomed: set[str]) -> None:
    """The operation, which the kill may end with any of the port's errors."""
    wanted = specification(image, SMALL)
    cold = specification(image, _other_volume())
    try:
        async with connect(WORKER_SOCKET, client_name="doomed") as remote:
            if operation in (Operation.PROVISION, Operation.COLD):
                began.set()
                await _provision(
                    remote, wanted if operation is Operation.PROVISION else cold, doomed
                )
                return
            handle = await _provision(remote, wanted, doomed)
            began.set()
            if operation is Operation.EXECUTE:
                with suppress(PortError):
                    await Live(remote, handle).run("sh", "-c", "echo x > f; sleep 0.1; echo y >> f")
            else:
                await remote.destroy(handle)
    except PortError:
        return
    finally:
        began.set()


async def _provision(
    remote: RemoteExecutionEnvironment, wanted: EnvironmentSpec, doomed: set[str]
) -> EnvironmentHandle:
    handle = await remote.provision(wanted)
    doomed.add(handle.environment_id)
    return handle


def _other_volume() -> ResourceLimits:
    """Limits that no slot of the reserve was prepared for."""
    return ResourceLimits(
        cpu_millicores=2000,
        memory_bytes=64 * MIB,
        pids_max=32,
        workspace_bytes=17 * MIB,
        inodes_max=501,
        wall_clock_seconds=60,
    )


async def _instant(point: Point) -> None:
    if point.after_writes is None:
        with trio.move_on_after(point.after_seconds):
            await trio.sleep_forever()
        return
    wal = STATE / "journal" / "journal.sqlite-wal"
    seen, writes = _stamp(wal), 0
    # What the operation does not write any more, nobody waits for.
    with trio.move_on_after(4 * TYPICAL_SECONDS[point.operation] + 0.5):
        while writes < point.after_writes:
            with trio.move_on_after(LOOK_SECONDS):
                await trio.sleep_forever()
            now = _stamp(wal)
            writes += now != seen
            seen = now


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _kill(victim: Victim) -> None:
    units = {
        Victim.DAEMON: (DAEMON,),
        Victim.LAUNCHER: (LAUNCHER,),
        Victim.BOTH: (LAUNCHER, DAEMON),
    }[victim]
    for pid in [main_pid(unit) for unit in units]:
        if pid > 1:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main_pid(unit: str) -> int:
    """Of a service that runs; 0 of one that does not."""
    shown = subprocess.run(
        ["systemctl", "show", "-p", "MainPID", "--value", unit],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(shown.stdout)


def _forgive() -> None:
    subprocess.run(["systemctl", "reset-failed", DAEMON, LAUNCHER], check=False)


async def _restored() -> None:
    """Until both answer again. The pause before a restart, which grows with each, begins anew."""
    with trio.fail_after(WITHIN_SECONDS):
        while True:
            _forgive()
            try:
                async with admin() as client:
                    await client.describe()
            except PortError:
                await next_look()
            else:
                return


@contextmanager
def decoy() -> Iterator["subprocess.Popen[bytes]"]:
    """A process in no cgroup of ours."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _repair_beside_a_live_one(point: Point, image: str, found: Found) -> None:
    async with connect(WORKER_SOCKET, client_name="bystander") as remote:
        handle = await remote.provision(specification(image, SMALL))
        outcome: list[int | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_waiting_command, remote, handle, outcome)
            async with admin() as client:
                await _passes(client, handle)
        if outcome != [7]:
            found.wrong_kills.append(f"{point}: {handle.environment_id} {outcome}")
        await remote.destroy(handle)


async def _waiting_command(
    remote: RemoteExecutionEnvironment, handle: EnvironmentHandle, outcome: list[int | None]
) -> None:
    """Runs until a file appears that the test writes."""
    try:
        result = await Live(remote, handle).run(
            "sh", "-c", "until test -e go; do sleep 0.02; done; exit 7"
        )
    except PortError:
        outcome.append(None)
    else:
        outcome.append(result.exit_code)


async def _passes(client: AdminClient, handle: EnvironmentHandle) -> None:
    """Two intervals of the reaper and a reconciliation, then the command may go."""
    for _ in range(2):
        await client.reap()
        await client.reconcile()
        with trio.move_on_after(INTERVAL_SECONDS):
            await trio.sleep_forever()
    async with connect(WORKER_SOCKET, client_name="bystander") as remote:
        with suppress(PortError):
            await Live(remote, handle).workspace.write("go", b"")


async def _compare(point: Point, doomed: set[str], found: Found) -> None:
    held, journal = await _at_rest()
    async with admin() as client:
        quarantined = {item.name for item in await client.quarantine()}
    found.quarantined |= quarantined
    found.orphans += [f"{point}: {each}" for each in sorted((held & doomed) - quarantined)]
    found.orphans += [f"{point}: {each}" for each in sorted(held - journal - quarantined)]
    found.disagreements += [
        f"{point}: {each} is in the journal alone" for each in sorted(journal - held)
    ]


async def _at_rest() -> tuple[set[str], set[str]]:
    """What is held, and what the journal says: once they agree, or are not going to. Whoever waits
    for an end does not wait until it is written down."""
    with trio.move_on_after(WRITTEN_SECONDS):
        while ids_held() != journal_ids():
            await next_look()
    return ids_held(), journal_ids()


def ids_held() -> set[str]:
    """Every environment id under which systemd, the kernel or the disk hold something."""
    listed = subprocess.run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "sbx-*.scope"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {line.split()[0][4:-6] for line in listed.splitlines() if line.strip()}
    found |= {path.name[4:-6] for path in (CGROUP / "sbx.slice").glob("**/sbx-*.scope")}
    found |= {path.name[:32] for path in (STATE / "volumes").glob("*") if len(path.name) >= 32}
    found |= {path.name.rpartition("-")[2] for path in (STATE / "uids").glob("*-*")}
    return found


def journal_ids() -> set[str]:
    """Every id that the journal does not call gone."""
    return {name for name, state in journal_states().items() if state != "GONE"}
