"""The cgroup tree of one environment: scope / box / {init, steward, exec-n}.

Invariants: systemd is the only writer of the scope's own limits, this module of everything below
it; directories, `cgroup.kill` and limit files stay root's, and only `cgroup.procs` of the box and
of the leaves belong to the environment's init (CLONE_INTO_CGROUP checks both with init's own
credentials). A leaf's limits are the specification's. The box is larger by `HEADROOM`, which is
what init, the steward and the one parked child ahead need: this is the only place that knows it.
A limit whose controller this host lacks is not written and is reported by `unenforced`. The
ceilings on the disk are the box's alone, so that what a removed leaf left to be written is still
held to them.
"""

import errno
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from sbxd.launcher.kernel import hostpaths
from sbxd.launcher.requests import CgroupLimits, Kernel
from sbxd.port.limits import IoCeilings

CONTROLLERS = ("cpu", "io", "memory", "pids")
# As the last of LEAF_DESCRIPTORS.
_COUNTERS = ("memory.events", "memory.peak", "pids.events", "pids.peak", "cpu.stat", "io.stat")
PERIOD_US = 100_000
HIGH_MARGIN_BYTES_MAX = 16 * 1024 * 1024
_FILE_BYTES_MAX = 64 * 1024
# The kernel tells of a cgroup file at most every 10 ms, later changes by a timer that the removal
# of the cgroup deletes; so the last word about a removed cgroup may never come.
_RECHECK_MS = 20


class Headroom(NamedTuple):
    """What the box may use above the specification."""

    memory_bytes: int
    pids: int
    cpu_millicores: int


# Init and the steward are Python processes of some 10 MB each; the steward may keep an index of
# a large workspace. Two processes, their transient children and one parked child.
HEADROOM = Headroom(memory_bytes=96 * 1024 * 1024, pids=16, cpu_millicores=100)


def box_limits(limits: CgroupLimits) -> CgroupLimits:
    """The limits of the whole environment."""
    return CgroupLimits(
        cpu_millicores=min(limits.cpu_millicores + HEADROOM.cpu_millicores, 1_024_000),
        memory_bytes=min(limits.memory_bytes + HEADROOM.memory_bytes, 2**50),
        pids_max=min(limits.pids_max + HEADROOM.pids, 4_194_304),
    )


# What a Sentry needs besides what the guest is promised: its own heap and page tables, the
# gofer, and host threads (Go's, and stub processes that grow with the guest's).
SENTRY_MEMORY_BYTES = 64 * 1024 * 1024
SENTRY_THREADS = 256
SENTRY_THREADS_PER_PROCESS = 4


def kernel_limits(limits: CgroupLimits, kernel: Kernel) -> CgroupLimits:
    """What the leaf of a command gets on the host, when the command is promised `limits`."""
    if kernel is Kernel.HOST:
        return limits
    return CgroupLimits(
        cpu_millicores=limits.cpu_millicores,
        memory_bytes=min(limits.memory_bytes + SENTRY_MEMORY_BYTES, 2**50),
        pids_max=min(SENTRY_THREADS + SENTRY_THREADS_PER_PROCESS * limits.pids_max, 4_194_304),
    )


def limit_files(
    limits: CgroupLimits, controllers: frozenset[str], kernel: Kernel = Kernel.HOST
) -> list[tuple[str, str]]:
    """File name and text for each limit that these controllers can enforce.

    A Sentry has no memory.high: there is nothing of a guest's memory to reclaim, and slowed down
    it takes minutes to the limit, so that its command ends with TIMEOUT instead of MEMORY.
    """
    files: list[tuple[str, str]] = []
    if "memory" in controllers:
        files.append(("memory.swap.max", "0"))
        high = memory_high_bytes(limits.memory_bytes) if kernel is Kernel.HOST else "max"
        files.append(("memory.high", str(high)))
        files.append(("memory.max", str(limits.memory_bytes)))
    if "pids" in controllers:
        files.append(("pids.max", str(limits.pids_max)))
    if "cpu" in controllers:
        quota_us = max(limits.cpu_millicores * PERIOD_US // 1000, 1000)
        files.append(("cpu.max", f"{quota_us} {PERIOD_US}"))
    return files


def memory_high_bytes(maximum: int) -> int:
    """Where the kernel begins to reclaim and to slow the cgroup down: 5 % below the limit, and
    never so far below that a program without anything to reclaim is slowed for long before it is
    killed (the delay grows with the square of the excess)."""
    return maximum - min(maximum // 20, HIGH_MARGIN_BYTES_MAX)


def io_max(device: str, ceilings: IoCeilings) -> str:
    """The line of `io.max` for this device ("MAJ:MIN"); "" without a ceiling."""
    keys = {
        "rbps": ceilings.read_bytes,
        "wbps": ceilings.write_bytes,
        "riops": ceilings.read_operations,
        "wiops": ceilings.write_operations,
    }
    words = [f"{key}={value:d}" for key, value in keys.items() if value is not None]
    return " ".join([device, *words]) if words else ""


def limit_io(
    directory: int, ceilings: IoCeilings, device: str | None, controllers: frozenset[str]
) -> tuple[str, ...]:
    """Write the ceilings on this device (None: the state directory has none); what is left
    unenforced of them is returned. Raises OSError when the kernel refuses."""
    if ceilings == IoCeilings():
        return ()
    if device is None or "io" not in controllers:
        return ("io",)
    write(directory, "io.max", io_max(device, ceilings))
    return ()


def unenforced(controllers: frozenset[str]) -> tuple[str, ...]:
    """The limits of a specification that stay unenforced where only these controllers exist."""
    return tuple(name for name in ("memory", "pids", "cpu") if name not in controllers)


def parse_controllers(text: str) -> frozenset[str]:
    """The controllers of CONTROLLERS that a `cgroup.controllers` file names."""
    return frozenset(text.split()) & frozenset(CONTROLLERS)


def parse_populated(raw: bytes) -> bool:
    """Whether a `cgroup.events` file says that a process lives. Raises ValueError if neither."""
    for line in raw.splitlines():
        key, _, value = line.partition(b" ")
        if key == b"populated" and value in (b"0", b"1"):
            return value == b"1"
    raise ValueError("cgroup.events has no populated line")


def open_directory(path: str) -> int:
    """Open a cgroup directory; the caller owns the descriptor."""
    return os.open(path, os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


@contextmanager
def box_of(environment_id: str) -> Iterator[int]:
    """The box directory of an environment, open for the length of the block."""
    descriptor = open_directory(f"{hostpaths.scope_directory(environment_id)}/box")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read(directory: int, name: str) -> bytes:
    """The whole of one small cgroup file."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    try:
        return os.read(descriptor, _FILE_BYTES_MAX)
    finally:
        os.close(descriptor)


def write(directory: int, name: str, text: str) -> None:
    """Write one cgroup file in one write, as the kernel wants it."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


def controllers_of(directory: int) -> frozenset[str]:
    """The controllers that this cgroup can hand to its children."""
    return parse_controllers(read(directory, "cgroup.controllers").decode("ascii"))


def enable(directory: int, controllers: frozenset[str]) -> None:
    """Hand these controllers to the children. The cgroup may hold no process of its own."""
    if controllers:
        text = " ".join(f"+{name}" for name in sorted(controllers))
        write(directory, "cgroup.subtree_control", text)


def apply(
    directory: int,
    limits: CgroupLimits,
    controllers: frozenset[str],
    kernel: Kernel = Kernel.HOST,
) -> None:
    """Write these limits."""
    for name, text in limit_files(limits, controllers, kernel):
        write(directory, name, text)


def give_procs(directory: int, uid: int) -> None:
    """Let this uid move processes in and out: `cgroup.procs` and no other file."""
    os.chown("cgroup.procs", uid, uid, dir_fd=directory, follow_symlinks=False)


def make_leaf(
    box: int, number: int, limits: CgroupLimits, owner: int, kernel: Kernel = Kernel.HOST
) -> tuple[int, ...]:
    """Make `exec-<number>` with its limits, and open LEAF_DESCRIPTORS in their order.

    The caller owns the descriptors. Raises OSError; then the leaf is gone again.
    """
    name = f"exec-{number:d}"
    os.mkdir(name, 0o755, dir_fd=box)
    opened: list[int] = []
    try:
        leaf = os.open(name, os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=box)
        opened.append(leaf)
        controllers = controllers_of(leaf)
        apply(leaf, limits, controllers, kernel)
        if "memory" in controllers:
            write(leaf, "memory.oom.group", "1")
        write(leaf, "cgroup.max.descendants", "0")
        give_procs(leaf, owner)
        opened.append(os.open("cgroup.kill", os.O_WRONLY | os.O_CLOEXEC, dir_fd=leaf))
        opened.append(os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=leaf))
        for file in _COUNTERS:
            opened.append(open_or_null(leaf, file))
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
        with suppress(OSError):
            os.rmdir(name, dir_fd=box)
        raise
    return tuple(opened)


def open_or_null(directory: int, name: str) -> int:
    """Open a counter for reading; the null device where this host has no such counter."""
    try:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    except FileNotFoundError:
        return os.open(hostpaths.NULL_DEVICE, os.O_RDONLY | os.O_CLOEXEC)


def remove_leaf(box: int, number: int) -> None:
    """Remove an empty leaf; a gone one is no error. Raises OSError(EBUSY) while it has a
    process."""
    with suppress(FileNotFoundError):
        os.rmdir(f"exec-{number:d}", dir_fd=box)


def kill(directory: int) -> None:
    """Kill every process of this cgroup and of all below it."""
    write(directory, "cgroup.kill", "1")


def wait_empty(directory: int, deadline: float) -> bool:
    """Until no process is left at or below this cgroup; False when the deadline (monotonic
    seconds) came first."""
    events = os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        while True:
            try:
                if not parse_populated(os.pread(events, _FILE_BYTES_MAX, 0)):
                    return True
            except OSError as problem:
                if problem.errno == errno.ENODEV:  # removed while we held it: it was empty
                    return True
                raise
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0:
                return False
            poll.poll(min(left_ms, _RECHECK_MS))
    finally:
        os.close(events)


def children(directory: int) -> list[str]:
    """The names of the cgroups directly below this one."""
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def remove_below(directory: int) -> None:
    """Remove every cgroup below this one, deepest first. Whoever removes it too (systemd) may
    win any of the races."""
    for name in children(directory):
        try:
            child = os.open(name, os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
        except FileNotFoundError:
            continue
        try:
            with suppress(FileNotFoundError):
                remove_below(child)
        finally:
            os.close(child)
        with suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=directory)


@contextmanager
def leaf_of(box: int, number: int) -> Iterator[int]:
    """The directory of `exec-<number>`, open for the length of the block."""
    flags = os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(f"exec-{number:d}", flags, dir_fd=box)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
