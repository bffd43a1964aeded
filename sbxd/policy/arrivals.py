"""How fast the connections of one uid may come.

Theory: two token buckets for each uid. Every new connection takes a token of the first, one that
comes to nothing (refused, or ended before it was greeted) a token of the second. While either is
empty, nothing further of that uid is served. So whoever connects without a pause costs the service
a fixed number of sessions a second, whatever the number of its connections.

Invariants: pure, no clock; what is kept is bounded (`sbxd.policy.by_uid`).
"""

from sbxd.policy.by_uid import ByUid
from sbxd.policy.denials import Bucket

# New connections of one uid: so many at once, and so many in each `ARRIVALS_SECONDS` from then on.
ARRIVALS_MAX = 256
ARRIVALS_SECONDS = 4.0
# Those that came to nothing.
BROKEN_MAX = 32
BROKEN_SECONDS = 8.0


class Arrivals:
    """The new connections of every uid at one door. Times are in seconds and never go back."""

    def __init__(self) -> None:
        self._uids = ByUid(_OfUid)

    def take(self, uid: int, now: float) -> bool:
        """Whether a new connection of this uid is within its rate."""
        of = self._uids.of(uid, now)
        return not of.broken.is_empty(now) and of.all.take(now)

    def broke(self, uid: int, now: float) -> None:
        """A connection of this uid came to nothing."""
        self._uids.of(uid, now).broken.take(now)


class _OfUid:
    """Those of one uid."""

    def __init__(self, now: float) -> None:
        self.all: Bucket[str] = Bucket(most=ARRIVALS_MAX, now=now, seconds=ARRIVALS_SECONDS)
        self.broken: Bucket[str] = Bucket(most=BROKEN_MAX, now=now, seconds=BROKEN_SECONDS)

    def is_idle(self, now: float) -> bool:
        return self.all.is_idle(now) and self.broken.is_idle(now)
