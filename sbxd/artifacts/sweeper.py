"""Removes what has ended: expired and deleted artifacts, and what dead puts left.

Invariants: a row is REMOVING before its object goes, and goes after it; so a sweep that dies
anywhere is taken up by the next, two at once do the same work once, and an artifact that anybody
can find has its object; a put that a process is still at is never taken for abandoned, whatever the
clocks say. One object that cannot be removed is counted and does not stop the others.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import final

import anyio.to_thread
from msgspec import Struct

from sbxd.artifacts.records import Doomed, MetadataStore, Removal
from sbxd.artifacts.retention import Retention, SharedClock
from sbxd.artifacts.tree import ArtifactTree
from sbxd.policy.storage_key import storage_key
from sbxd.port.artifact import ArtifactId, ArtifactUnavailable, ArtifactUnavailableCode

BATCH = 256

_OF_THE_TREE = frozenset({ArtifactUnavailableCode.REFUSED, ArtifactUnavailableCode.IO})


class SweepReport(Struct, frozen=True, kw_only=True):
    """What one sweep did. failed: objects that could not be removed and are tried again."""

    by_retention: int = 0
    by_request: int = 0
    abandoned: int = 0
    removed_bytes: int = 0
    failed: int = 0


@final
class Sweeper:
    """One tree and its metadata. Any number may run at once, in any number of processes."""

    def __init__(
        self, tree: ArtifactTree, metadata: MetadataStore, retention: Retention, now: SharedClock
    ) -> None:
        self._tree = tree
        self._metadata = metadata
        self._retention = retention
        self._now = now

    async def sweep(self) -> SweepReport:
        """Remove everything that has ended by now.

        Raises: ArtifactUnavailable when the database does not answer. Cancellation, and death:
        what was begun is taken up by the next sweep.
        """
        now = await self._now()
        before = now - timedelta(seconds=self._retention.abandoned_put_seconds)
        while await self._metadata.doom_expired(now=now, limit=BATCH) == BATCH:
            pass
        await self._doom_abandoned(before)
        counts = dict.fromkeys(Removal, 0)
        removed_bytes = failed = 0
        after: ArtifactId | None = None
        while batch := await self._metadata.doomed(after=after, limit=BATCH):
            after = batch[-1].artifact_id
            for doomed in batch:
                try:
                    await anyio.to_thread.run_sync(self._removal_of(doomed))
                except ArtifactUnavailable as problem:
                    if problem.code not in _OF_THE_TREE:
                        raise
                    failed += 1
                    continue
                gone = await self._metadata.forget(doomed.artifact_id)
                if gone is not None:
                    reason, size_bytes = gone
                    counts[reason] += 1
                    removed_bytes += size_bytes
        return SweepReport(
            by_retention=counts[Removal.RETENTION],
            by_request=counts[Removal.REQUEST],
            abandoned=counts[Removal.ABANDONED],
            removed_bytes=removed_bytes,
            failed=failed,
        )

    async def _doom_abandoned(self, before: datetime) -> None:
        """What began so long ago, and is held by nobody: no clock alone says that a put is dead."""
        after: ArtifactId | None = None
        while batch := await self._metadata.pending(begun_before=before, after=after, limit=BATCH):
            after = batch[-1].artifact_id
            for each in batch:
                if not await anyio.to_thread.run_sync(self._look_at(each)):
                    await self._metadata.abandon(each.artifact_id)

    def _look_at(self, pending: Doomed) -> Callable[[], bool]:
        key = storage_key(pending.tenant_id, pending.artifact_id)
        return lambda: self._tree.is_being_put(pending.artifact_id, key)

    def _removal_of(self, doomed: Doomed) -> Callable[[], None]:
        key = storage_key(doomed.tenant_id, doomed.artifact_id)

        def remove() -> None:
            self._tree.discard(doomed.artifact_id)
            self._tree.remove(key)

        return remove
