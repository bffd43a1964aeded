"""The states of one environment, as a table.

Theory: an environment begins as a slot without a tenant (PREPARING, READY), is taken by a run
(ASSIGNING), lives (LIVE, RUNNING while a command runs) and ends. `END` is legal in every state
that is not final and leads to DESTROYING, from which only a proof (DESTROYED) reaches GONE. What
cannot be proven stopped is QUARANTINED, which is final: when it is proven gone later, or released
by an operator, the whole record goes (`sbxd.lifecycle.reconcile`).

Invariants: a slot is READY at most once, after its construction: what was taken is never given
back. An unknown pair raises and changes nothing. Pure.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    PREPARING = "PREPARING"
    READY = "READY"
    ASSIGNING = "ASSIGNING"
    LIVE = "LIVE"
    RUNNING = "RUNNING"
    DESTROYING = "DESTROYING"
    GONE = "GONE"
    QUARANTINED = "QUARANTINED"


class Event(StrEnum):
    PREPARED = "PREPARED"
    TAKEN = "TAKEN"
    ASSIGNED = "ASSIGNED"
    COMMAND_STARTED = "COMMAND_STARTED"
    COMMAND_FINISHED = "COMMAND_FINISHED"
    END = "END"
    DESTROY_FAILED = "DESTROY_FAILED"
    DESTROYED = "DESTROYED"
    GIVEN_UP = "GIVEN_UP"


class IllegalTransition(Exception):
    """The event is not legal in this state: a bug of the caller."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event} is not legal in {state}")
        self.state = state
        self.event = event


TABLE: Mapping[State, Mapping[Event, State]] = MappingProxyType(
    {
        State.PREPARING: {Event.PREPARED: State.READY, Event.END: State.DESTROYING},
        State.READY: {Event.TAKEN: State.ASSIGNING, Event.END: State.DESTROYING},
        State.ASSIGNING: {Event.ASSIGNED: State.LIVE, Event.END: State.DESTROYING},
        State.LIVE: {Event.COMMAND_STARTED: State.RUNNING, Event.END: State.DESTROYING},
        State.RUNNING: {Event.COMMAND_FINISHED: State.LIVE, Event.END: State.DESTROYING},
        State.DESTROYING: {
            Event.END: State.DESTROYING,
            Event.COMMAND_FINISHED: State.DESTROYING,
            Event.DESTROY_FAILED: State.DESTROYING,
            Event.DESTROYED: State.GONE,
            Event.GIVEN_UP: State.QUARANTINED,
        },
        State.GONE: {Event.END: State.GONE, Event.COMMAND_FINISHED: State.GONE},
        State.QUARANTINED: {
            Event.END: State.QUARANTINED,
            Event.COMMAND_FINISHED: State.QUARANTINED,
        },
    }
)

# Handed out: a tenant's handle names it.
HANDED_OUT = frozenset({State.LIVE, State.RUNNING})


def transition(state: State, event: Event) -> State:
    """The state after the event. Raises IllegalTransition."""
    following = TABLE[state].get(event)
    if following is None:
        raise IllegalTransition(state, event)
    return following
