"""How many denials are answered and recorded one by one, and the exact count of the others.

Theory: a token bucket. A denial that gets a token is recorded by itself and answered at once.
One that gets none is counted by its reason and answered after a pause, during which it holds one
of the proxy's few places for connections without a tunnel: so the rate of denials is bounded by
places over pause, whatever the sandbox does, and the audit gets a bounded number of records with
exact counts.

Invariants: pure, no clock; every denial is either recorded by itself or in exactly one count;
counts that could not be recorded are put back.
"""

from collections import Counter

from sbxd.egress.decisions import DenialsCounted, Reason


class Denials:
    """The denials of one proxy. rate: per second, as is the most that may come at once."""

    def __init__(self, *, rate: int, now: float) -> None:
        self._rate = rate
        self._tokens = float(rate)
        self._at = now
        self._counts: Counter[Reason] = Counter()

    def take(self, now: float) -> bool:
        """Whether a denial at this time (seconds, never going back) is recorded by itself."""
        self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def count(self, reason: Reason) -> None:
        """One that is not."""
        self._counts[reason] += 1

    def counted(self) -> DenialsCounted | None:
        """Everything counted since the last call, None for nothing."""
        if not self._counts:
            return None
        taken = DenialsCounted(counts=tuple(sorted(self._counts.items())))
        self._counts.clear()
        return taken

    def put_back(self, denials: DenialsCounted) -> None:
        """These were not recorded."""
        self._counts.update(dict(denials.counts))
