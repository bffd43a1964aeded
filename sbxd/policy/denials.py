"""How many denials are recorded one by one, and the exact count of the others.

Theory: a token bucket. A denial that gets a token is recorded by itself. One that gets none is
counted by its reason, and whoever caused it waits. So the number of records is bounded by the rate,
whatever the other side does, and the counts stay exact.

Invariants: pure, no clock; every denial is either recorded by itself or in exactly one count;
counts that could not be recorded are put back.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

ReasonT = TypeVar("ReasonT", bound=str)


class Bucket(Generic[ReasonT]):
    """The denials of one source.

    most: how many may come at once, and how many in each `seconds` from then on. now: seconds,
    never going back.
    """

    def __init__(self, *, most: int, now: float, seconds: float = 1.0) -> None:
        self._most = most
        self._seconds = seconds
        self._tokens = float(most)
        self._at = now
        self._counts: Counter[ReasonT] = Counter()

    def take(self, now: float) -> bool:
        """Whether a denial at this time is recorded by itself."""
        if self.is_empty(now):
            return False
        self._tokens -= 1
        return True

    def is_empty(self, now: float) -> bool:
        """Whether a denial at this time would be counted."""
        gained = (now - self._at) * self._most / self._seconds
        self._tokens = min(self._most, self._tokens + gained)
        self._at = now
        return self._tokens < 1

    def is_idle(self, now: float) -> bool:
        """Whether nothing of it needs to be remembered: nothing counted, every token there."""
        return not self.is_empty(now) and self._tokens >= self._most and not self._counts

    def count(self, reason: ReasonT) -> None:
        """One that is not."""
        self._counts[reason] += 1

    def take_counts(self) -> tuple[tuple[ReasonT, int], ...]:
        """Everything counted since the last call, by reason."""
        taken = tuple(sorted(self._counts.items()))
        self._counts.clear()
        return taken

    def put_counts_back(self, counts: Iterable[tuple[ReasonT, int]]) -> None:
        """These were not recorded."""
        self._counts.update(dict(counts))
