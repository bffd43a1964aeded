"""One command's leaf as the daemon holds it: nine descriptors, and what is read from them.

Invariants: a leaf is used for one command, so its counters begin at zero with it and need no
difference (the parked child, which becomes the command, is in them). Killing and proving need no
other process's help.
"""

import errno
from collections.abc import Sequence

from sbxd.launcher.channel import close_all
from sbxd.launcher.requests import LEAF_DESCRIPTORS
from sbxd.mechanism import kernel_events
from sbxd.mechanism.kernel_events import (
    BadCounter,
    Watch,
    parse_bytes_written,
    parse_flat_keyed,
    parse_single,
)
from sbxd.mechanism.protocol import Counters, MechanismError


class Leaf:
    """Owns its descriptors, which are LEAF_DESCRIPTORS in their order."""

    def __init__(self, number: int, descriptors: Sequence[int]) -> None:
        if len(descriptors) != len(LEAF_DESCRIPTORS):
            close_all(descriptors)
            raise MechanismError("leaf", 0, "the launcher sent another number of descriptors")
        self.number = number
        self._fds: dict[str, int] = dict(zip(LEAF_DESCRIPTORS, descriptors, strict=True))
        self._absent = {
            name
            for name, descriptor in self._fds.items()
            if name not in ("leaf_directory", "leaf_kill") and kernel_events.is_absent(descriptor)
        }
        self._closed = False

    @property
    def directory(self) -> int:
        """The directory's descriptor, for PARK."""
        return self._fds["leaf_directory"]

    def kill(self) -> None:
        """Kill every process in it. A leaf that is gone or closed has none."""
        if self._closed:
            return
        kernel_events.kill(self._fds["leaf_kill"])

    def counters(self) -> Counters:
        """The kernel's counters now; all None once the leaf is removed. Raises MechanismError."""
        if self._closed:
            return Counters()
        try:
            memory = self._keyed("leaf_memory_events")
            pids = self._keyed("leaf_pids_events")
            cpu = self._keyed("leaf_cpu_stat")
            return Counters(
                oom_kill=memory.get("oom_kill"),
                oom_group_kill=memory.get("oom_group_kill"),
                pids_max_events=pids.get("max"),
                pids_peak=self._single("leaf_pids_peak"),
                memory_peak_bytes=self._single("leaf_memory_peak"),
                cpu_usage_us=cpu.get("usage_usec"),
                disk_written_bytes=self._written(),
            )
        except OSError as problem:
            if problem.errno == errno.ENODEV:
                return Counters()
            raise MechanismError("counters", problem.errno or 0) from None
        except BadCounter as problem:
            raise MechanismError("counters", 0, str(problem)) from None

    def watch(self) -> Watch:
        """Ends a wait when an oom kill or a refused fork may have happened; the caller closes."""
        return Watch(self._fds["leaf_memory_events"], self._fds["leaf_pids_events"])

    async def wait_empty(self) -> None:
        """Until no process is left in it. Raises MechanismError."""
        if self._closed:
            return
        try:
            await kernel_events.wait_unpopulated(self._fds["leaf_events"])
        except (OSError, BadCounter) as problem:
            number = problem.errno if isinstance(problem, OSError) else 0
            raise MechanismError("wait_empty", number or 0) from None

    def close(self) -> None:
        """Release the descriptors. Idempotent."""
        if not self._closed:
            self._closed = True
            close_all(list(self._fds.values()))

    def _keyed(self, name: str) -> dict[str, int]:
        if name in self._absent:
            return {}
        return parse_flat_keyed(kernel_events.read(self._fds[name]))

    def _single(self, name: str) -> int | None:
        if name in self._absent:
            return None
        return parse_single(kernel_events.read(self._fds[name]))

    def _written(self) -> int | None:
        if "leaf_io_stat" in self._absent:
            return None
        return parse_bytes_written(kernel_events.read(self._fds["leaf_io_stat"]))
