"""The table of states: what can be reached, and what can never be left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.lifecycle.machine import HANDED_OUT, TABLE, Event, IllegalTransition, State, transition


def test_every_state_has_a_row_and_every_event_is_legal_somewhere() -> None:
    assert set(TABLE) == set(State)
    assert {event for row in TABLE.values() for event in row} == set(Event)


def test_an_unknown_pair_raises_and_names_both() -> None:
    with pytest.raises(IllegalTransition) as illegal:
        transition(State.GONE, Event.TAKEN)
    assert (illegal.value.state, illegal.value.event) == (State.GONE, Event.TAKEN)


def test_an_end_is_always_legal_and_never_leads_back() -> None:
    for state in State:
        after = transition(state, Event.END)
        assert after in (State.DESTROYING, State.GONE, State.QUARANTINED)


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_a_slot_is_handed_out_at_most_once_and_gone_means_proven(events: list[Event]) -> None:
    state = State.PREPARING
    hand_outs = 0
    is_over = False
    for event in events:
        try:
            after = transition(state, event)
        except IllegalTransition:
            continue
        if after is State.LIVE and state is State.ASSIGNING:
            hand_outs += 1
        if after is State.GONE and state is not State.GONE:
            assert event is Event.DESTROYED
        if is_over:
            assert after is state
        is_over = is_over or after in (State.GONE, State.QUARANTINED)
        if event is Event.END:
            assert after not in HANDED_OUT
        state = after
    assert hand_outs <= 1
