"""How long the kernel takes to empty a command's cgroup: from `cgroup.kill` to `populated 0`.

Measured on the leaf of a real command, from outside and without the daemon, which learns of the
end by itself: the kill is written here as the daemon writes it, and `cgroup.events` is read until
it says that no process is left. Blocking, on purpose: nothing of this process may stand between
the kernel and the clock.
"""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import PortError
from tests.bench.daemon import Daemon, Profile, command
from tests.bench.memory import PROC, scope_groups
from tests.bench.samples import Mark, Marks, OperationFailed
from tests.bench.spawn import elapsed_ms

TOOL = "cgroup.kill"
APPEAR_SECONDS = 30
POLL_SECONDS = 0.01
EMPTY_WITHIN_SECONDS = 10
# The kernel tells of a change at most every 10 ms; the file itself is always true.
REREAD_SECONDS = 0.0001

# One process, then 7 children of it, then 6 of each.
TREE = """
import os, signal
for width in (7, 6):
    if all(os.fork() for _ in range(width)):
        break
signal.pause()
"""

# Full at once, and never at rest: each child that cannot fork makes room for another now and then.
BOMB = """
import os, random, resource, signal
resource.setrlimit(resource.RLIMIT_NPROC, (56, 56))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
first = os.getpid()
while True:
    try:
        os.fork()
    except BlockingIOError:
        if os.getpid() != first and random.random() < 0.1:
            os._exit(0)
"""


@dataclass(frozen=True)
class Victim:
    """A command to be killed. processes: how many there must be before."""

    name: str
    argv: tuple[str, ...]
    processes: int


VICTIMS = (
    Victim("sleeper", ("/usr/bin/sleep", "86400"), 1),
    Victim("tree 50", ("/usr/bin/python3", "-c", TREE), 50),
    Victim("bomb", ("/usr/bin/python3", "-c", BOMB), 40),
)


@dataclass
class Kill:
    """Start the victim off the clock, kill its leaf on it. An Operation."""

    remote: RemoteExecutionEnvironment
    handle: EnvironmentHandle
    victim: Victim
    nursery: trio.Nursery
    tool: str = TOOL
    leaf: Path | None = None
    ended: trio.Event = field(default_factory=trio.Event)
    problem: str | None = None

    @property
    def program(self) -> str:
        return self.victim.name

    async def ready(self) -> None:
        self.ended, self.problem = trio.Event(), None
        self.nursery.start_soon(self._execute)
        with trio.move_on_after(APPEAR_SECONDS):
            while not self.ended.is_set():
                self.leaf = self._find()
                if self.leaf is not None:
                    return
                await trio.sleep(POLL_SECONDS)
        raise OperationFailed(f"{self.victim.name} was not seen: {self.problem}")

    async def run(self) -> Marks:
        if self.leaf is None:
            raise OperationFailed("nothing is there to be killed")
        return {Mark.EMPTY: kill_and_wait(self.leaf)}

    async def clean(self) -> Marks:
        """Until the daemon has replied, and the next command may come."""
        self.leaf = None
        with trio.move_on_after(APPEAR_SECONDS):
            await self.ended.wait()
        if not self.ended.is_set() or self.problem is not None:
            raise OperationFailed(self.problem or "no reply after the kill")
        return {}

    async def _execute(self) -> None:
        try:
            result = await self.remote.execute(self.handle, command(self.victim.argv))
            if result.exit_code == 0:
                self.problem = f"{self.victim.name} ended by itself"
        except PortError as error:
            self.problem = str(error)
        finally:
            self.ended.set()

    def _find(self) -> Path | None:
        """The victim's leaf, once all of it is there; the other leaf holds the parked child."""
        wanted = b"\0".join(os.fsencode(word) for word in self.victim.argv) + b"\0"
        for scope in scope_groups(f"sbx-{self.handle.environment_id}.scope"):
            for leaf in scope.glob("box/exec-*"):
                try:
                    pids = (leaf / "cgroup.procs").read_text().split()
                    found = len(pids) >= self.victim.processes and any(
                        (PROC / pid / "cmdline").read_bytes() == wanted for pid in pids
                    )
                except OSError:  # a process or the leaf went meanwhile: look again
                    continue
                if found:
                    return leaf
        return None


def kill_and_wait(leaf: Path) -> float:
    """Kill a cgroup and wait until it is empty; ms. Raises OperationFailed."""
    kill = os.open(leaf / "cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
    events = os.open(leaf / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if b"populated 1" not in os.pread(events, 256, 0):
            raise OperationFailed("the victim was gone before it was killed")
        begun_ns = time.perf_counter_ns()
        os.write(kill, b"1")
        while True:
            try:
                populated = b"populated 1" in os.pread(events, 256, 0)
            except OSError:  # empty, and removed already
                populated = False
            took = elapsed_ms(begun_ns)
            if not populated:
                return took
            if took > EMPTY_WITHIN_SECONDS * 1000:
                raise OperationFailed(f"not empty {EMPTY_WITHIN_SECONDS} s after cgroup.kill")
            time.sleep(REREAD_SECONDS)
    finally:
        os.close(kill)
        os.close(events)


@asynccontextmanager
async def kills(
    daemon: Daemon, remote: RemoteExecutionEnvironment
) -> AsyncIterator[tuple[Kill, ...]]:
    """One environment, and its victims as operations. Raises OperationFailed."""
    try:
        handle = await remote.provision(daemon.specification(Profile.COLD))
    except PortError as error:
        raise OperationFailed(str(error)) from None
    try:
        async with trio.open_nursery() as nursery:
            yield tuple(Kill(remote, handle, victim, nursery) for victim in VICTIMS)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await remote.destroy(handle)
