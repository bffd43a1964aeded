"""The audit's sink with a counter behind it: the one subscriber of events.

Invariants: what a sink promises holds here, and beyond it: refusals of a peer and workspace
operations never fail to be kept, since what is not recorded by itself is counted
(`sbxd.audit.counting`), and the counts are records of their own. An event is counted for the
metrics when the sink took it or a count has it; one that was not taken is counted as that alone.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from sbxd.audit.counted_events import WorkspaceUsed, WorkspaceUsesCounted
from sbxd.audit.counting import WINDOW_SECONDS, Refusal, Refusals, WorkspaceUses, as_refusal
from sbxd.audit.events import AuditEvent, EnvironmentDestroyed, EnvironmentQuarantined
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
        self._refusals = Refusals()
        self._uses = WorkspaceUses()

    async def emit(self, event: AuditEvent) -> None:
        """As `AuditSink.emit`. What may be counted is, where it is not recorded by itself."""
        refusal = as_refusal(event)
        if refusal is not None:
            await self._refused(refusal)
        elif isinstance(event, WorkspaceUsed):
            await self._used(event)
        else:
            if isinstance(event, EnvironmentDestroyed | EnvironmentQuarantined):
                await self._keep_uses(self._uses.of_environment(event.environment_id))
            await self._record(event)

    def admit(self) -> None:
        """As `AuditSink.admit`."""
        self._inner.admit()

    def count(self, event: Refusal) -> None:
        """Count a refusal that is not recorded by itself; never waits."""
        self._refusals.count(event, trio.current_time())
        self.derived.observe_counted(event)

    def is_beyond(self, uid: int) -> bool:
        """Whether refusals of this uid come so fast that each is to cost it time."""
        return self._refusals.is_beyond(uid, trio.current_time())

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        """Record what was counted: in each window within the block, and at its end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_recording)
            yield
            nursery.cancel_scope.cancel()
        await self.settle()

    async def settle(self) -> bool:
        """Record everything that was counted; whether nothing is left.

        Cancellation: what is not recorded stays counted.
        """
        is_settled = await self._keep_refusals()
        for environment_id in self._uses.environments():
            uses = self._uses.of_environment(environment_id)
            is_settled = await self._keep_uses(uses) and is_settled
        return is_settled

    async def _keep_recording(self) -> None:
        while True:
            await trio.sleep(WINDOW_SECONDS)
            await self._keep_refusals()

    async def _refused(self, event: Refusal) -> None:
        if self._refusals.take(event, trio.current_time()):
            try:
                await self._record(event)
            except AuditUnavailable:
                pass
            else:
                return
        self.count(event)

    async def _used(self, event: WorkspaceUsed) -> None:
        if self._uses.take(event):
            try:
                await self._record(event)
            except AuditUnavailable:
                return  # counted already
        await self._keep_uses(self._uses.overflow())

    async def _keep_refusals(self) -> bool:
        counted = list(self._refusals.counted(trio.current_time()))
        is_settled = True
        while counted:
            first = counted.pop()
            try:
                await self._record(first)
            except AuditUnavailable:
                is_settled = False
                self._refusals.put_back(first, trio.current_time())
            except BaseException:
                for each in (first, *counted):
                    self._refusals.put_back(each, trio.current_time())
                raise
        return is_settled

    async def _keep_uses(self, event: WorkspaceUsesCounted | None) -> bool:
        if event is None:
            return True
        try:
            await self._record(event)
        except AuditUnavailable:
            self._uses.put_back(event)
            return False
        except BaseException:
            self._uses.put_back(event)
            raise
        return True

    async def _record(self, event: AuditEvent) -> None:
        try:
            await self._inner.emit(event)
        except AuditUnavailable:
            self.derived.observe_unrecorded()
            raise
        self.derived.observe(event)
