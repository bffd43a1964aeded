"""The closed table of what a test may need, and which lane has it.

A test says `@pytest.mark.needs("limits", "daemon")`; the runner places it in the first lane of
`LANES` that has all of it. A test without the mark needs nothing but an interpreter.

Invariant: what a lane is said to have here is asserted by `test_lane_facts.py` inside that lane,
so a machine on which a lane turns out less is a failed run and not a set of skipped tests.
"""

import ctypes
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path


class Feature(StrEnum):
    """What a test may need. Add a row here, to a lane below, and to `test_lane_facts.py`."""

    APPARMOR = "apparmor"  # the kernel enforces profiles
    CGROUP2 = "cgroup2"  # the unified hierarchy, with cgroup.kill; not a limit
    DAEMON = "daemon"  # the project's units are installed and its sockets listen
    GVISOR = "gvisor"  # runsc runs
    IDMAP = "idmap"  # id-mapped mounts of the file system at /var/lib/sbxd
    IMAGE = "image"  # a root file system for sandboxes, as a tar
    IMAGE_WORKLOADS = "image-workloads"  # a larger one: compilers, runtimes, numpy
    IMAGE_PROGRAMS = "image-programs"  # one more: Chromium, PostgreSQL, a Jupyter kernel, node
    IO = "io"  # the io controller, and a disk below /var/lib/sbxd that it knows
    LAB = "lab"  # lanes can be booted from here: for tests that boot one of their own
    LANDLOCK = "landlock"
    LIMITS = "limits"  # the cpu, memory and pids controllers
    LOOP = "loop"  # loop devices
    MONITORING = "monitoring"  # promtool, Prometheus and node_exporter at /opt/prometheus
    NSDELEGATE = "nsdelegate"  # cgroup namespaces are delegation boundaries
    LOOP_VOLUMES = "loop-volumes"  # no quota: each workspace is a loop-mounted ext4
    QUOTA = "quota"  # project quota, bytes and inodes, on /var/lib/sbxd
    ROOT = "root"  # root, with mounts and namespaces that are the test's to make
    SYSTEMD = "systemd"  # as PID 1, with its bus
    # For what is to be seen in one lane only.
    LANE_CONTAINER = "lane-container"
    LANE_GVISOR = "lane-gvisor"
    LANE_UML = "lane-uml"
    LANE_QEMU = "lane-qemu"


class LaneKind(StrEnum):
    """Where tests run, cheapest first: the order of placement."""

    HOST = "host"
    NATIVE = "native"
    CONTAINER = "container"
    GVISOR = "gvisor"  # as container; its daemon serves sandbox = "gvisor"
    UML = "uml"
    QEMU = "qemu"


_EVERYWHERE = frozenset(
    {
        Feature.CGROUP2,
        Feature.DAEMON,
        Feature.IDMAP,
        Feature.IMAGE,
        Feature.LOOP,
        Feature.ROOT,
        Feature.SYSTEMD,
    }
)
OFFERED: dict[LaneKind, frozenset[Feature]] = {
    LaneKind.HOST: frozenset({Feature.LAB}),
    LaneKind.CONTAINER: _EVERYWHERE
    | {
        Feature.GVISOR,
        Feature.IMAGE_PROGRAMS,
        Feature.IMAGE_WORKLOADS,
        Feature.LANDLOCK,
        Feature.LANE_CONTAINER,
        Feature.LOOP_VOLUMES,
        Feature.MONITORING,
    },
    LaneKind.GVISOR: _EVERYWHERE
    | {
        Feature.GVISOR,
        Feature.IMAGE_PROGRAMS,
        Feature.LANDLOCK,
        Feature.LANE_GVISOR,
        Feature.LOOP_VOLUMES,
    },
    LaneKind.UML: _EVERYWHERE
    | {
        Feature.APPARMOR,
        Feature.IO,
        Feature.LIMITS,
        Feature.NSDELEGATE,
        Feature.QUOTA,
        Feature.LANE_UML,
    },
    LaneKind.QEMU: _EVERYWHERE
    | {
        Feature.APPARMOR,
        Feature.GVISOR,
        Feature.IO,
        Feature.LANDLOCK,
        Feature.LIMITS,
        Feature.NSDELEGATE,
        Feature.QUOTA,
        Feature.LANE_QEMU,
    },
}


class UnknownFeature(Exception):
    """A test names something that is not in the table."""


def parse(names: Iterable[str]) -> frozenset[Feature]:
    """Names as a mark has them. Raises UnknownFeature."""
    try:
        return frozenset(Feature(name) for name in names)
    except ValueError as error:
        known = ", ".join(Feature)
        raise UnknownFeature(f"{error}; the table in tests/lab/features.py has: {known}") from error


def place(needs: frozenset[Feature], offered: dict[LaneKind, frozenset[Feature]]) -> LaneKind:
    """The cheapest lane that has all of it. Raises UnknownFeature when none has."""
    for lane in LaneKind:
        if lane in offered and needs <= offered[lane]:
            return lane
    raise UnknownFeature(f"no lane of this machine has all of: {', '.join(sorted(needs))}")


def offered_by(lane: str) -> frozenset[Feature]:
    """What a lane has; for `native`, what this machine has."""
    kind = LaneKind(lane)
    return OFFERED[kind] if kind in OFFERED else offered_natively()


def offered_natively() -> frozenset[Feature]:
    """What this machine itself has for tests: nothing unless systemd runs it and we are root.

    `daemon` is there when the package is installed; `io`, `image`, `image-workloads`,
    `image-programs`, `quota`, `idmap` and `gvisor` are left to the lanes, which have them in a
    known state.
    """
    if not Path("/run/systemd/system").is_dir() or os.geteuid() != 0:
        return frozenset()
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    if not controllers.exists():
        return frozenset()
    found = {Feature.SYSTEMD, Feature.CGROUP2, Feature.ROOT}
    if {"cpu", "memory", "pids"} <= set(controllers.read_text().split()):
        found.add(Feature.LIMITS)
    if any("nsdelegate" in line for line in _cgroup2_mounts()):
        found.add(Feature.NSDELEGATE)
    if Path("/dev/loop-control").exists():
        found.add(Feature.LOOP)
    if _text("/sys/module/apparmor/parameters/enabled") == "Y":
        found.add(Feature.APPARMOR)
    if landlock_version() > 0:
        found.add(Feature.LANDLOCK)
    if Path("/usr/lib/systemd/system/sbxd.service").exists():
        found.add(Feature.DAEMON)
    return frozenset(found)


def landlock_version() -> int:
    """The version of the kernel's Landlock interface, 0 where it has none."""
    version = ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1)
    return max(0, int(version))


def _cgroup2_mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if " - cgroup2 " in line]


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
