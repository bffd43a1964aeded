"""What an idle sandbox costs in memory: our processes by their PSS, and the kernel by its totals.

PSS shares each page among those who map it, so the sum over all processes is what they really
hold together. The kernel's figures are of the whole machine, and other work on it disturbs them:
they are read twice, when the sandboxes have come and when they have gone, and both differences
are reported. Deliberately absent: dropping caches, which would act on the whole machine.
"""

import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import trio
from msgspec import Struct

from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import PortError
from tests.bench.daemon import Daemon, Profile, check, command, worker
from tests.bench.peers import PROGRAMS, Peers, Tool
from tests.bench.samples import OperationFailed
from tests.bench.spawn import ENVIRONMENT, must

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
KERNEL_FIELDS = ("Slab", "SReclaimable", "Percpu", "KernelStack", "PageTables")
COUNTED_FIELDS = ("Slab", "Percpu", "KernelStack", "PageTables")
SETTLE_SECONDS = 2.0
PAYLOAD = "sleep"

Kib = dict[str, float]


class IdleMemory(Struct, frozen=True, kw_only=True):
    """KiB for each of `count` idle sandboxes.

    by_role_kib: PSS of our processes by the cgroup they live in. kernel_up_kib, kernel_down_kib:
    differences of the kernel's totals when the sandboxes came and went.
    """

    tool: str
    count: int
    processes: float
    pss_kib: float
    by_role_kib: Kib
    kernel_up_kib: Kib
    kernel_down_kib: Kib
    daemon_growth_kib: float | None = None
    launcher_growth_kib: float | None = None

    @property
    def kernel_kib(self) -> float:
        """The mean of both differences. SReclaimable is part of Slab and not added again."""
        up = sum(self.kernel_up_kib[name] for name in COUNTED_FIELDS)
        down = sum(self.kernel_down_kib[name] for name in COUNTED_FIELDS)
        return (up + down) / 2


class ServiceMemory(Struct, frozen=True, kw_only=True):
    """PSS of the services with no environment, in KiB; the reserve's own processes beside them."""

    daemon_kib: float
    launcher_kib: float
    launcher_processes: int
    reserve_slots: int
    reserve_kib: float


def rollup_kib(pid: int) -> Kib:
    """smaps_rollup of one process; empty when it is gone or is the kernel's."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return {}
    return {name: float(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def pss_kib(pid: int) -> float:
    """Of one process; 0 when it is gone or is the kernel's."""
    return rollup_kib(pid).get("Pss", 0.0)


def kernel_kib() -> Kib:
    """The kernel's own memory on the whole machine."""
    text = (PROC / "meminfo").read_text()
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    return {name: float(fields[name]) for name in KERNEL_FIELDS}


def pids_by_role(group: Path) -> Iterator[tuple[str, int]]:
    """Each process below a cgroup, with the path of its own group (numbers as n)."""
    for procs in sorted(group.rglob("cgroup.procs")):
        role = re.sub(r"\d+", "n", str(procs.parent.relative_to(group)))
        for line in procs.read_text().split():
            yield ("anchor" if role == "." else role), int(line)


def scope_groups(pattern: str) -> list[Path]:
    """The cgroups of sandboxes' scopes, by the scope's name."""
    return sorted(CGROUPS.glob(f"sbx.slice/**/{pattern}"))


def service_group(unit: str) -> Path:
    """The cgroup of a unit. Raises OperationFailed."""
    said = must(("/usr/bin/systemctl", "show", "--property=ControlGroup", "--value", unit)).strip()
    if not said:
        raise OperationFailed(f"{unit} does not run")
    return CGROUPS / said.lstrip("/")


def group_pss(group: Path) -> tuple[float, int]:
    """PSS and number of the processes below a cgroup."""
    pids = {pid for _, pid in pids_by_role(group)}
    return sum(pss_kib(pid) for pid in pids), len(pids)


async def services(daemon: Daemon) -> ServiceMemory:
    """With no environment, and the reserve full. Raises OperationFailed."""
    await daemon.wait_reserve_full()
    launcher_kib, launcher_processes = group_pss(service_group("sbxd-launcher.service"))
    reserve = [group_pss(scope)[0] for scope in scope_groups("sbx-*.scope")]
    return ServiceMemory(
        daemon_kib=group_pss(service_group("sbxd.service"))[0],
        launcher_kib=launcher_kib,
        launcher_processes=launcher_processes,
        reserve_slots=len(reserve),
        reserve_kib=sum(reserve),
    )


async def idle_sandboxes(daemon: Daemon, count: int) -> IdleMemory:
    """Environments that have run one command each. Raises OperationFailed, the port's errors."""
    daemon_group, launcher_group = (
        service_group(unit) for unit in ("sbxd.service", "sbxd-launcher.service")
    )
    await daemon.wait_reserve_full()
    daemon_before, launcher_before = group_pss(daemon_group)[0], group_pss(launcher_group)[0]
    roles: Kib = {}
    processes = 0
    growth = {}

    async def read() -> None:
        nonlocal processes
        for info in await daemon.admin.list():
            for scope in scope_groups(info.scope):
                for role, pid in pids_by_role(scope):
                    roles[role] = roles.get(role, 0.0) + pss_kib(pid)
                    processes += 1
        growth["daemon"] = (group_pss(daemon_group)[0] - daemon_before) / count
        growth["launcher"] = (group_pss(launcher_group)[0] - launcher_before) / count

    up, down = await _around(lambda: _environments(daemon, count), read, count)
    if not processes:
        raise OperationFailed("no process of any environment was found in its scope")
    return IdleMemory(
        tool="sbxd",
        count=count,
        processes=processes / count,
        pss_kib=sum(roles.values()) / count,
        by_role_kib={role: kib / count for role, kib in sorted(roles.items())},
        kernel_up_kib=up,
        kernel_down_kib=down,
        daemon_growth_kib=growth["daemon"],
        launcher_growth_kib=growth["launcher"],
    )


async def idle_bwraps(peers: Peers, count: int) -> IdleMemory:
    """bwrap around `sleep`; the sleep itself is not counted, as it is the user's."""
    argv = peers.bwrap_argv(("/usr/bin/sleep", "infinity"))
    pids: list[int] = []
    total = 0.0
    processes = 0

    async def read() -> None:
        nonlocal total, processes
        for pid in _descendants(pids):
            if (PROC / str(pid) / "comm").read_text().strip() != PAYLOAD:
                total += pss_kib(pid)
                processes += 1

    up, down = await _around(lambda: _commands(argv, count, pids), read, count)
    return IdleMemory(
        tool="bwrap",
        count=count,
        processes=processes / count,
        pss_kib=total / count,
        by_role_kib={},
        kernel_up_kib=up,
        kernel_down_kib=down,
    )


async def idle_runscs(peers: Peers, count: int) -> IdleMemory:
    """runsc around `sleep`: the Sentry, its gofer and their stubs, as `runsc run` leaves them."""
    pids: list[int] = []
    total = 0.0
    processes = 0

    async def read() -> None:
        nonlocal total, processes
        for pid in _descendants(pids):
            total += pss_kib(pid)
            processes += 1

    @asynccontextmanager
    async def holding() -> AsyncIterator[None]:
        with peers.idle_runscs(count) as started:
            pids.extend(started)
            yield

    up, down = await _around(holding, read, count)
    return IdleMemory(
        tool=Tool.RUNSC,
        count=count,
        processes=processes / count,
        pss_kib=total / count,
        by_role_kib={},
        kernel_up_kib=up,
        kernel_down_kib=down,
    )


async def _around(
    holding: Callable[[], AbstractAsyncContextManager[None]],
    read: Callable[[], Awaitable[None]],
    count: int,
) -> tuple[Kib, Kib]:
    await trio.sleep(SETTLE_SECONDS)
    before = kernel_kib()
    async with holding():
        await trio.sleep(SETTLE_SECONDS)
        full = kernel_kib()
        await read()
    await trio.sleep(SETTLE_SECONDS)
    after = kernel_kib()
    return (
        {name: (full[name] - before[name]) / count for name in KERNEL_FIELDS},
        {name: (full[name] - after[name]) / count for name in KERNEL_FIELDS},
    )


@asynccontextmanager
async def _environments(daemon: Daemon, count: int) -> AsyncIterator[None]:
    handles: list[EnvironmentHandle] = []
    async with worker() as remote:
        try:
            for _ in range(count):
                handle = await remote.provision(daemon.specification(Profile.COLD))
                handles.append(handle)
                check(await remote.execute(handle, command(PROGRAMS["true"])))
            yield
        except PortError as error:
            raise OperationFailed(str(error)) from None
        finally:
            for handle in handles:
                await remote.destroy(handle)


@asynccontextmanager
async def _commands(argv: Sequence[str], count: int, pids: list[int]) -> AsyncIterator[None]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(_begin(argv))
        pids.extend(each.pid for each in started)
        yield
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait()


def _begin(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, env=ENVIRONMENT, stdin=subprocess.DEVNULL)


def _descendants(pids: Sequence[int]) -> list[int]:
    """The processes and all below them."""
    found = list(pids)
    for pid in found:
        for children in (PROC / str(pid) / "task").glob("*/children"):
            found += [int(child) for child in children.read_text().split()]
    return found
