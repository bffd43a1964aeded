"""Something for each uid, in bounded room.

Invariants: pure, no clock; at most `UIDS_MAX` uids are told apart, and whoever can map uids of his
own has thousands: beyond, new ones share one place, until the one that was quiet the longest is
idle and goes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

UIDS_MAX = 256


class Forgettable(Protocol):
    """What is kept for a uid."""

    def is_idle(self, now: float) -> bool:
        """Whether nothing of it needs to be remembered. now: seconds, never going back."""
        ...


KeptT = TypeVar("KeptT", bound=Forgettable)


class ByUid(Generic[KeptT]):
    """make: something new for a uid, at a time in seconds that never goes back."""

    def __init__(self, make: Callable[[float], KeptT]) -> None:
        self._make = make
        self._kept: OrderedDict[int | None, KeptT] = OrderedDict()

    def of(self, uid: int | None, now: float) -> KeptT:
        """That of this uid, or the shared one where there is no room for another. None: of no uid,
        which is the shared one."""
        key = uid if uid in self._kept or self._has_room(now) else None
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = self._make(now)
        self._kept.move_to_end(key)
        return kept

    def known(self, uid: int) -> KeptT | None:
        """That of this uid, or the shared one if there is no room for another; nothing is made."""
        found = self._kept.get(uid)
        if found is None and len(self._kept) >= UIDS_MAX:
            found = self._kept.get(None)
        return found

    def items(self) -> Iterator[tuple[int | None, KeptT]]:
        """All that are kept, as of now."""
        return iter(tuple(self._kept.items()))

    def __len__(self) -> int:
        return len(self._kept)

    def _has_room(self, now: float) -> bool:
        if len(self._kept) < UIDS_MAX:
            return True
        quiet = next(iter(self._kept))
        if not self._kept[quiet].is_idle(now):
            return False
        del self._kept[quiet]
        return True
