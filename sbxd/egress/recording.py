"""Keeping the records of one proxy: a record that has begun is finished, and none is forgotten.

Invariants: a cancellation never leaves it open whether a record was kept, since the attempt is
shielded, for RECORD_SECONDS at most; a record of something that has already happened (a tunnel's
end, counted denials) and that could not be kept is held and tried again before anything new is
recorded. So at most as many are held as there were tunnels when the audit failed.
"""

from collections import deque

import trio

from sbxd.egress.decisions import Record, Recorder, RecordUnavailable

RECORD_SECONDS = 5.0


class Recording:
    """Hands records to a recorder. `held`: those that it did not take, oldest first."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self.held: deque[Record] = deque()

    async def keep(self, record: Record) -> None:
        """Record it, after everything that is held.

        Raises:
            RecordUnavailable: it is not recorded.

        Cancellation: takes effect after the attempt.
        """
        await self.settle()
        await self._attempt(record)

    async def keep_or_hold(self, record: Record) -> None:
        """Record it now or, where that fails, hold it."""
        self.held.append(record)
        try:
            await self.settle()
        except RecordUnavailable:
            return

    async def settle(self) -> None:
        """Record what is held. Raises RecordUnavailable: some of it is held still."""
        while self.held:
            first = self.held.popleft()
            try:
                await self._attempt(first)
            except BaseException:
                self.held.appendleft(first)
                raise

    async def _attempt(self, record: Record) -> None:
        with trio.move_on_after(RECORD_SECONDS, shield=True):
            await self._record(record)
            return
        raise RecordUnavailable("not within the bound")
