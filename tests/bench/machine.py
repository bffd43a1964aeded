"""What the figures were taken on. No host name, no address."""

import os
import platform
import re
from pathlib import Path

from msgspec import Struct

from tests.bench.samples import OperationFailed
from tests.bench.spawn import must


class Machine(Struct, frozen=True, kw_only=True):
    """Enough to compare two runs, and not enough to find the machine."""

    processor: str
    cores: int
    memory_mib: int
    kernel: str
    python: str
    systemd: str
    lane: str
    controllers: str
    bwrap: str
    crun: str
    load_at_start: float


def machine() -> Machine:
    """This machine as it is now."""
    return Machine(
        processor=_field(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)"),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=int(_field(Path("/proc/meminfo"), r"MemTotal:\s*(\d+) kB") or 0) // 1024,
        kernel=platform.release().partition("-")[0],
        python=platform.python_version(),
        systemd=_version("/usr/bin/systemctl", r"systemd (\d+)"),
        lane=os.environ.get("SBXD_LANE", "native"),
        controllers=_field(Path("/sys/fs/cgroup/cgroup.controllers"), r"(.*)"),
        bwrap=_version("/usr/bin/bwrap", r"bubblewrap ([\d.]+)"),
        crun=_version("/usr/bin/crun", r"crun version ([\d.]+)"),
        load_at_start=round(os.getloadavg()[0], 2),
    )


def _field(path: Path, pattern: str) -> str:
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        return ""
    return found[1].strip() if found else ""


def _version(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, must((path, "--version")))
    except (OSError, OperationFailed):
        return ""
    return found[1] if found else ""
