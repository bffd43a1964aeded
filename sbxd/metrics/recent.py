"""What happened within the last minutes, counted by kind in slots that are forgotten whole. Pure.

Invariant: as many kinds as whoever adds them has; as many slots as `SLOTS`, however long it runs.
"""

from collections import Counter as Tally
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

RECENT_SECONDS = 300.0
SLOTS = 10

KeyT = TypeVar("KeyT", bound=Hashable)


class Recent(Generic[KeyT]):
    """Counts of the last RECENT_SECONDS, to within one slot of it."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, Tally[KeyT]]] = deque(maxlen=SLOTS)

    def add(self, key: KeyT, now: float, *, by: int = 1) -> None:
        """Count. now: seconds, never going back."""
        slot = _slot(now)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Tally()))
        self._slots[-1][1][key] += by

    def counts(self, now: float) -> Mapping[KeyT, int]:
        """What was counted within the last RECENT_SECONDS, most first."""
        oldest = _slot(now) - SLOTS
        found: Tally[KeyT] = Tally()
        for slot, tally in self._slots:
            if slot > oldest:
                found.update(tally)
        return dict(found.most_common())


def _slot(now: float) -> int:
    return int(now // (RECENT_SECONDS / SLOTS))
