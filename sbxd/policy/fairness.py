"""A bounded queue that is fair between those who wait in it: whose turn it is, and nothing else.

Theory: tickets of one party are served in the order of their arrival, parties in turn, so that one
who asks a thousand times waits a thousand turns and delays another by one. A party whose turn
cannot be served now (it has as much as it may) is passed over and keeps its turn.

Invariants: at most `total_max` tickets, at most `party_max` of one party. Pure: no clock, no task.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

PartyT = TypeVar("PartyT", bound=Hashable)


class QueueIsFull(Exception):
    """No ticket is to be had: refuse, with a time after which to ask again."""


@dataclass(eq=False)
class Ticket(Generic[PartyT]):
    """One who waits. party: who it is counted for."""

    party: PartyT


class FairQueue(Generic[PartyT]):
    """See the module."""

    def __init__(self, *, total_max: int, party_max: int) -> None:
        self._total_max = total_max
        self._party_max = party_max
        # In the order of their turns: who was served last stands last.
        self._parties: OrderedDict[PartyT, OrderedDict[Ticket[PartyT], None]] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def enter(self, party: PartyT) -> Ticket[PartyT]:
        """Raises QueueIsFull."""
        waiting = self._parties.get(party)
        if self._total >= self._total_max or (
            waiting is not None and len(waiting) >= self._party_max
        ):
            raise QueueIsFull
        ticket = Ticket(party)
        self._parties.setdefault(party, OrderedDict())[ticket] = None
        self._total += 1
        return ticket

    def turn(self, may_be_served: Callable[[Ticket[PartyT]], bool]) -> Ticket[PartyT] | None:
        """Whose turn it is among those whose party can be served now."""
        for waiting in self._parties.values():
            first = next(iter(waiting))
            if may_be_served(first):
                return first
        return None

    def served(self, ticket: Ticket[PartyT]) -> None:
        """It got what it waited for: its party's next turn is after everybody else's."""
        self.leave(ticket)
        if ticket.party in self._parties:
            self._parties.move_to_end(ticket.party)

    def leave(self, ticket: Ticket[PartyT]) -> None:
        """It does not wait any more. Idempotent."""
        waiting = self._parties.get(ticket.party)
        if waiting is None or ticket not in waiting:
            return
        del waiting[ticket]
        self._total -= 1
        if not waiting:
            del self._parties[ticket.party]
