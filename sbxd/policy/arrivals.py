"""How fast the connections of one uid may come.

Theory: two token buckets for each uid. Every new connection takes a token of the first, one that
comes to nothing (refused, or ended before it was greeted) a token of the second. While either is
empty, nothing further of that uid is served. So whoever connects without a pause costs the service
a fixed number of sessions a second, whatever the number of its connections.

Invariants: pure, no clock; what is kept is bounded by `UIDS_MAX`; beyond, new uids share one place.
"""

from collections import OrderedDict

from sbxd.policy.denials import Bucket

# New connections of one uid: so many at once, and so many in each `ARRIVALS_SECONDS` from then on.
ARRIVALS_MAX = 256
ARRIVALS_SECONDS = 4.0
# Those that came to nothing.
BROKEN_MAX = 32
BROKEN_SECONDS = 8.0
# Uids that are told apart. Whoever can map uids of his own has thousands.
UIDS_MAX = 256


class Arrivals:
    """The new connections of every uid at one door. Times are in seconds and never go back."""

    def __init__(self) -> None:
        self._uids: OrderedDict[int | None, _OfUid] = OrderedDict()

    def take(self, uid: int, now: float) -> bool:
        """Whether a new connection of this uid is within its rate."""
        of = self._of(uid, now)
        return not of.broken.is_empty(now) and of.all.take(now)

    def broke(self, uid: int, now: float) -> None:
        """A connection of this uid came to nothing."""
        self._of(uid, now).broken.take(now)

    def _of(self, uid: int, now: float) -> "_OfUid":
        key = uid if uid in self._uids or self._has_room(now) else None
        of = self._uids.setdefault(key, _OfUid(now))
        self._uids.move_to_end(key)
        return of

    def _has_room(self, now: float) -> bool:
        """Whether another uid may be told apart; the one that was quiet the longest may go."""
        if len(self._uids) < UIDS_MAX:
            return True
        quiet = next(iter(self._uids))
        if not self._uids[quiet].is_idle(now):
            return False
        del self._uids[quiet]
        return True


class _OfUid:
    """Those of one uid."""

    def __init__(self, now: float) -> None:
        self.all: Bucket[str] = Bucket(most=ARRIVALS_MAX, now=now, seconds=ARRIVALS_SECONDS)
        self.broken: Bucket[str] = Bucket(most=BROKEN_MAX, now=now, seconds=BROKEN_SECONDS)

    def is_idle(self, now: float) -> bool:
        return self.all.is_idle(now) and self.broken.is_idle(now)
