"""When an environment is over although nobody ended it: decided by a pure function, then done.

Two rules: it reached the end of its life (a slot of the reserve: of its age), or its owner's last
connection is gone for longer than the grace. Retrying a destruction is its supervisor's.

Deliberately absent: the lease authority's answer, which is `sbxd.lifecycle.leases`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from sbxd.audit.events import DestroyReason
from sbxd.port.ids import EnvironmentId


@dataclass(frozen=True)
class Tenure:
    """What decides over one environment. Times are of trio's clock; orphaned_at is None while a
    connection holds it, and for a slot of the reserve."""

    environment_id: EnvironmentId
    ends_at: float
    orphaned_at: float | None


def select_due(
    tenures: Iterable[Tenure], now: float, *, grace_seconds: float
) -> list[tuple[EnvironmentId, DestroyReason]]:
    """Which environments are over now, and why. Expiry is named before orphanhood."""
    due = []
    for tenure in tenures:
        if tenure.ends_at <= now:
            due.append((tenure.environment_id, DestroyReason.EXPIRED))
        elif tenure.orphaned_at is not None and tenure.orphaned_at + grace_seconds <= now:
            due.append((tenure.environment_id, DestroyReason.PEER_GONE))
    return due


def next_due(tenures: Iterable[Tenure], *, grace_seconds: float) -> float:
    """The earliest time at which `select_due` could name one; infinity for none."""
    earliest = float("inf")
    for tenure in tenures:
        earliest = min(earliest, tenure.ends_at)
        if tenure.orphaned_at is not None:
            earliest = min(earliest, tenure.orphaned_at + grace_seconds)
    return earliest


class Reaper:
    """Sleeps until something is due, or until it is told that something has changed."""

    def __init__(
        self,
        tenures: Callable[[], list[Tenure]],
        end: Callable[[EnvironmentId, DestroyReason], None],
        *,
        grace_seconds: float,
    ) -> None:
        self._tenures = tenures
        self._end = end
        self._grace_seconds = grace_seconds
        self._changed = trio.Event()

    def wake(self) -> None:
        """A tenure began or changed. Never blocks."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed = trio.Event()
            now = trio.current_time()
            for environment_id, reason in select_due(
                self._tenures(), now, grace_seconds=self._grace_seconds
            ):
                self._end(environment_id, reason)
            due = next_due(self._tenures(), grace_seconds=self._grace_seconds)
            with trio.move_on_at(due):
                await self._changed.wait()
