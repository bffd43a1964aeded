"""The queue for places: bounded, in turn between parties, in order within one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.policy.fairness import FairQueue, QueueIsFull, Ticket


def anybody(ticket: Ticket[str]) -> bool:
    return True


def drain(queue: FairQueue[str]) -> list[Ticket[str]]:
    order = []
    while (ticket := queue.turn(anybody)) is not None:
        queue.served(ticket)
        order.append(ticket)
    return order


def test_one_who_asks_often_delays_another_by_one() -> None:
    queue: FairQueue[str] = FairQueue(total_max=100, party_max=90)
    many = [queue.enter("many") for _ in range(50)]
    one = queue.enter("one")
    order = drain(queue)
    assert order.index(one) == 1
    assert [each for each in order if each.party == "many"] == many


def test_who_cannot_be_served_keeps_the_turn_and_holds_nobody() -> None:
    queue: FairQueue[str] = FairQueue(total_max=9, party_max=9)
    full, other = queue.enter("full"), queue.enter("other")
    assert queue.turn(lambda ticket: ticket.party != "full") is other
    assert queue.turn(anybody) is full


@pytest.mark.parametrize(("total", "party"), [(3, 9), (9, 3)])
def test_it_is_bounded_in_all_and_for_one(total: int, party: int) -> None:
    queue: FairQueue[str] = FairQueue(total_max=total, party_max=party)
    tickets = [queue.enter("a") for _ in range(3)]
    with pytest.raises(QueueIsFull):
        queue.enter("a")
    queue.leave(tickets[0])
    queue.leave(tickets[0])
    queue.enter("a")


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_between_two_turns_of_one_every_other_who_waits_has_one(parties: list[str]) -> None:
    queue: FairQueue[str] = FairQueue(total_max=100, party_max=100)
    entered = [queue.enter(party) for party in parties]
    order = drain(queue)
    assert sorted(map(id, order)) == sorted(map(id, entered))
    assert len(queue) == 0
    for index, ticket in enumerate(order):
        later = [each.party for each in order[index + 1 :]]
        if ticket.party in later:
            between = set(later[: later.index(ticket.party)])
            assert between == set(later) - {ticket.party}
