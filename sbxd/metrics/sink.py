"""The audit's sink with a counter behind it: the one subscriber of events.

Invariant: what a sink promises holds here unchanged; an event is counted after the sink took it,
and one that was not taken is counted as that alone.
"""

from collections.abc import Callable

from sbxd.audit.events import AuditEvent
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.metrics.derived import DerivedMetrics
from sbxd.metrics.readings import Backlog


class CountedSink:
    """Implements sbxd.audit.sink.AuditSink over another. backlog: of that one."""

    def __init__(
        self, inner: AuditSink, derived: DerivedMetrics, backlog: Callable[[], Backlog] = Backlog
    ) -> None:
        self._inner = inner
        self.derived = derived
        self.backlog = backlog

    async def emit(self, event: AuditEvent) -> None:
        """As `AuditSink.emit`."""
        try:
            await self._inner.emit(event)
        except AuditUnavailable:
            self.derived.observe_unrecorded()
            raise
        self.derived.observe(event)

    def admit(self) -> None:
        """As `AuditSink.admit`."""
        self._inner.admit()
