"""What ended a command: the first terminal event wins, and evidence corrects an own end.

Invariants: pure. `decide` is compare-and-set: whoever is second changes nothing. `settle` may
turn the main process's *own* end into MEMORY (a process of its tree was killed for memory behind
its back), OUTPUT_LIMIT (bytes beyond the cap were written before it ended and read after) or DISK
(it failed, and the volume had no room left); it never turns one kill reason into another.
"""

from collections import deque

from sbxd.audit.events import DestroyReason
from sbxd.mechanism.protocol import CommandExit, Counters
from sbxd.port.command import KillReason


class Lost:
    """The environment went away under the command: it has no known end."""


End = KillReason | CommandExit | Lost


class Verdict:
    """Holds the first end that it is told."""

    def __init__(self) -> None:
        self._end: End | None = None

    @property
    def end(self) -> End | None:
        return self._end

    def decide(self, end: End) -> bool:
        """Record an end. Returns whether it was the first."""
        if self._end is not None:
            return False
        self._end = end
        return True


def settle(end: End, counters: Counters, *, output_exceeded: bool, volume_exhausted: bool) -> End:
    """The end that is reported, once the tree is dead and its output has been read.

    counters: read after the leaf was proven empty. volume_exhausted: `DiskWatch.was_exhausted`.
    """
    if not isinstance(end, CommandExit):
        return end
    if counters.oom_kill:
        return KillReason.MEMORY
    if output_exceeded:
        return KillReason.OUTPUT_LIMIT
    if volume_exhausted and end.exit_code != 0:
        return KillReason.DISK
    return end


class ForkRefusals:
    """Counts refused forks in a sliding window, from a counter that only grows.

    A build with more jobs than pids is refused a few forks and goes on; a fork bomb is refused
    thousands in a second. The counter starts at zero with the command.
    """

    def __init__(self, *, refusals_max: int, window_seconds: float) -> None:
        self._refusals_max = refusals_max
        self._window_seconds = window_seconds
        self._samples: deque[tuple[float, int]] = deque([(float("-inf"), 0)])

    def exceeded(self, now: float, refusals: int) -> bool:
        """Whether this reading at `now` makes at least refusals_max within the window."""
        start = now - self._window_seconds
        while len(self._samples) > 1 and self._samples[1][0] <= start:
            self._samples.popleft()
        over = refusals - self._samples[0][1] >= self._refusals_max
        self._samples.append((now, refusals))
        return over


def command_end(reason: DestroyReason) -> End:
    """What a running command is told when its environment ends for this reason."""
    match reason:
        case DestroyReason.EXPIRED:
            return KillReason.EXPIRED
        case DestroyReason.SERVICE_SHUTDOWN:
            return KillReason.SERVICE_SHUTDOWN
        case DestroyReason.ENVIRONMENT_LOST:
            return Lost()
        case _:
            return KillReason.CANCELLED
