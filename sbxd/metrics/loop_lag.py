"""How late the event loop is: a task that sleeps, and measures by how much it woke too late.

Everything in the daemon waits for the same loop, so this is the first number to look at when all
of it is slow. One wake in `INTERVAL_SECONDS` costs nothing that can be measured; what is shorter
than that may be missed in one pass, and not in the many passes of a loop that is ill.
"""

from collections import deque

import trio

from sbxd.metrics.families import Family, Histogram, Unit, gauge

INTERVAL_SECONDS = 0.5
# `worst_seconds` looks back on so many passes: one minute.
PASSES_KEPT = 120
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopLag:
    """Measures while `run` runs."""

    def __init__(self) -> None:
        self._histogram = Histogram(
            "sbxd_event_loop_lag_seconds",
            "How much later than asked the event loop woke a task.",
            bounds=BOUNDS,
        )
        self._latest: deque[float] = deque(maxlen=PASSES_KEPT)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due = trio.current_time() + INTERVAL_SECONDS
            await trio.sleep_until(due)
            self.note(max(0.0, trio.current_time() - due))

    def note(self, lag_seconds: float) -> None:
        """One measurement."""
        self._histogram.observe(lag_seconds)
        self._latest.append(lag_seconds)

    @property
    def worst_seconds(self) -> float:
        """Of the last minute."""
        return max(self._latest, default=0.0)

    def families(self) -> tuple[Family, ...]:
        """The distribution, and the worst of the last minute."""
        worst = gauge(
            "sbxd_event_loop_lag_worst_seconds",
            "The worst lag of the event loop within the last minute.",
            (self.worst_seconds, ()),
            unit=Unit.SECONDS,
        )
        return (self._histogram.family(), worst)
