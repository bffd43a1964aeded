"""What a victim notices of each attack: `python3 -m tests.bench --attacks`.

A hostile worker (`tests.bench.attacker`, a process under a uid of its own) holds one attack open;
meanwhile a worker of another uid goes on with its own environments, an operator asks for the list,
and the memory of both services is read. The first row is without an attack: what the others are
compared with. A request of the victim that fails makes the run fail; times are reported alone.
"""

import grp
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
from msgspec import Struct

from sbxd.client.admin import connect_admin
from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import PortError
from tests.bench.attacker import ATTACKS
from tests.bench.daemon import ADMIN_SOCKET, Daemon, Profile, check, command, worker
from tests.bench.memory import pids_by_role, service_group
from tests.bench.samples import OperationFailed, Summary, leaves, summarise
from tests.bench.soak import SERVICES
from tests.bench.spawn import elapsed_ms
from tests.bench.watching import Growth, Watched, watching

ATTACKER_UID = 61_234
WORKERS_GROUP = "sbxd-workers"
DEFAULT_SECONDS = 20.0
READY_SECONDS = 120.0
PAUSE_SECONDS = 0.02
NOTHING = "nothing"
OPERATIONS = ("execute", "whole sandbox", "list")
SOURCE = Path(__file__).parents[2]


class Row(Struct, frozen=True, kw_only=True):
    """One attack. operations: the victim's, by name, None where none was finished. failures: what
    the victim was refused. memory: of both services."""

    attack: str
    seconds: float
    operations: dict[str, Summary | None]
    failures: tuple[str, ...]
    memory: tuple[Growth, ...]


class Attacks(Struct, frozen=True, kw_only=True):
    """All rows; the first is without an attack."""

    rows: tuple[Row, ...]

    @property
    def sound(self) -> bool:
        """Whether each of the victim's requests was finished, and some of every kind."""
        return all(not row.failures and all(row.operations.values()) for row in self.rows)


@dataclass
class _Victim:
    taken: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    failures: list[str] = field(default_factory=list)

    async def again(self, name: str, once: Callable[[], Awaitable[None]]) -> None:
        """Do this again and again, and note how long each took."""
        while True:
            begun_ns = time.perf_counter_ns()
            try:
                await once()
            except* (PortError, OperationFailed) as group:
                self.failures += [f"{name}: {error}" for error in leaves(group)]
            else:
                self.taken[name].append(elapsed_ms(begun_ns))
            await trio.sleep(PAUSE_SECONDS)

    async def work(
        self, daemon: Daemon, remote: RemoteExecutionEnvironment, handle: EnvironmentHandle
    ) -> None:
        """All three operations side by side, until this is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.again, "execute", lambda: _execute(remote, handle))
            nursery.start_soon(self.again, "whole sandbox", lambda: _whole(daemon))
            nursery.start_soon(self.again, "list", _list)


async def attacks(daemon: Daemon, seconds: float, names: Sequence[str]) -> Attacks:
    """Each of these attacks for so long; with no names, every attack. Raises OperationFailed when
    an attacker does not begin, or the service does not come back."""
    rows = []
    for name in (NOTHING, *(names or ATTACKS)):
        _say(f"{name}, {seconds:.0f} s")
        rows.append(await attacked(daemon, name, seconds))
    return Attacks(rows=tuple(rows))


async def attacked(daemon: Daemon, name: str, seconds: float) -> Row:
    """One attack. A service that it ends is one of the row's failures.

    Raises OperationFailed when the attack does not begin, or the service does not come back.
    """
    await _wait_service(daemon)
    services = [
        Watched(service, pid)
        for service, unit in SERVICES.items()
        for pid in sorted({pid for _, pid in pids_by_role(service_group(unit))})
    ]
    victim = _Victim()
    begun = trio.current_time()
    async with watching(services) as memory:
        try:
            async with worker() as remote:
                handle = await remote.provision(daemon.specification(Profile.RESERVE))
                async with attacker(name, daemon.image):
                    begun = trio.current_time()
                    with trio.move_on_after(seconds):
                        await victim.work(daemon, remote, handle)
                await remote.destroy(handle)
        except* PortError as group:
            victim.failures += [str(error) for error in leaves(group)]
    return Row(
        attack=name,
        seconds=trio.current_time() - begun,
        operations={each: summarise(taken, failures=0) for each, taken in victim.taken.items()},
        failures=tuple(victim.failures),
        memory=memory(),
    )


async def _wait_service(daemon: Daemon) -> None:
    """Until a sandbox can be had. Raises OperationFailed after `READY_SECONDS`."""
    with trio.move_on_after(READY_SECONDS):
        while True:
            try:
                await _whole(daemon)
            except* (PortError, OperationFailed):
                await trio.sleep(PAUSE_SECONDS)
            else:
                return
    raise OperationFailed(f"no sandbox could be had for {READY_SECONDS:.0f} s")


async def _execute(remote: RemoteExecutionEnvironment, handle: EnvironmentHandle) -> None:
    check(await remote.execute(handle, command(("/usr/bin/true",))))


async def _whole(daemon: Daemon) -> None:
    async with worker() as remote:
        handle = await remote.provision(daemon.specification(Profile.RESERVE))
        try:
            await _execute(remote, handle)
        finally:
            await remote.destroy(handle)


async def _list() -> None:
    async with connect_admin(ADMIN_SOCKET, client_name="bench") as admin:
        await admin.list()


@asynccontextmanager
async def attacker(name: str, image: str) -> AsyncIterator[None]:
    """A hostile worker's process, from when its attack goes on until the end of the block.
    Raises OperationFailed."""
    if name == NOTHING:
        yield
        return
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.bench.attacker", name, image],
        cwd=SOURCE,
        stdout=subprocess.PIPE,
        user=ATTACKER_UID,
        group=grp.getgrnam(WORKERS_GROUP).gr_gid,
        extra_groups=[],
        env={**os.environ, "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        assert process.stdout is not None
        said = b""
        with trio.move_on_after(READY_SECONDS):
            said = bytes(await process.stdout.receive_some())
        if said != b"ready\n":
            raise OperationFailed(f"the attack {name!r} did not begin: {said!r}")
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await process.wait()


def render(found: Attacks) -> Iterator[str]:
    """The report, line by line."""
    baseline = found.rows[0]
    yield "attacks: times of another worker's requests in ms, p50 / p99 / longest (x of no attack)"
    for row in found.rows:
        yield f"  {row.attack}, {row.seconds:.0f} s"
        for name in OPERATIONS:
            now, before = row.operations[name], baseline.operations[name]
            if now is None or before is None:
                yield f"    {name}: none was finished"
                continue
            yield (
                f"    {name}: {now.n}, {now.p50:.1f} / {now.p99:.1f} / {max(now.values_ms):.1f}"
                f" ({now.p50 / before.p50:.2f} / {now.p99 / before.p99:.2f})"
            )
        for each in row.memory:
            yield (
                f"    {each.name}: {each.before_kib / 1024:.1f} MiB before, "
                f"{each.most_kib / 1024:.1f} at most, {each.after_kib / 1024:.1f} after"
            )
        for failure in row.failures[:5]:
            yield f"    FAILED: {failure}"
        if len(row.failures) > 5:
            yield f"    FAILED: {len(row.failures) - 5} more"


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)
