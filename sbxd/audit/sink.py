"""Who takes events: a protocol and an in-memory implementation. The daemon's is
`sbxd.audit.recorder`.

Invariant: an event that a sink could not deliver is an error at its emitter, never a silent drop.
"""

from typing import Protocol, TypeVar

from sbxd.audit.events import AuditEvent

EventT = TypeVar("EventT", bound=AuditEvent)


class AuditUnavailable(Exception):
    """The event was not recorded. New work must be refused (AUDIT_UNAVAILABLE); work that is
    being ended is ended all the same."""


class AuditSink(Protocol):
    """Takes events, one at a time or many concurrently."""

    async def emit(self, event: AuditEvent) -> None:
        """Record one event; returns when it is handed over.

        Raises:
            AuditUnavailable: it was not recorded within the sink's own bound.

        Cancellation: the event is recorded whole or not at all.
        """
        ...

    def admit(self) -> None:
        """Before new work. Raises AuditUnavailable while it must be refused."""
        ...


class MemorySink:
    """Keeps events in order. For tests, and for `sandbox = "fake"` in process."""

    def __init__(self) -> None:
        self.events: list[AuditEvent] = []
        self._failing = False

    async def emit(self, event: AuditEvent) -> None:
        if self._failing:
            raise AuditUnavailable("the in-memory sink was told to fail")
        self.events.append(event)

    def admit(self) -> None:
        if self._failing:
            raise AuditUnavailable("the in-memory sink was told to fail")

    def fail(self) -> None:
        """From now on every emit raises AuditUnavailable."""
        self._failing = True

    def recover(self) -> None:
        """Undo `fail`."""
        self._failing = False

    def of(self, kind: type[EventT]) -> list[EventT]:
        """The recorded events of one type, in order."""
        return [event for event in self.events if isinstance(event, kind)]
