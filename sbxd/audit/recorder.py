"""The daemon's audit: events become numbered records in the journal, or wait in order for it.

Invariants: a number is taken when its record is in the journal's queue or in the spool, in the same
instant, so that there is none without a record; the order of the numbers is that of the journal;
what waits goes first. While the journal takes nothing, new work is refused (`admit`, and what
`sbxd.audit.outage` says of an event) and what happens to running work is spooled. An event that
even the spool does not take is AuditUnavailable at its emitter, which ends what it was about to
allow and repeats what it must record. Nothing is dropped in silence: what was not kept is counted,
and the counts are a record of their own.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import trio
from msgspec import Struct

from sbxd.audit.encode import encode, serialize
from sbxd.audit.events import AuditEvent
from sbxd.audit.header import SCHEMA_VERSION, Header, header_fields
from sbxd.audit.journald import JournalReplaced, JournalSocket
from sbxd.audit.outage import Fate, fate_of, is_recorded, room_for
from sbxd.audit.position import Position, PositionFile
from sbxd.audit.sink import AuditUnavailable
from sbxd.audit.spool import SPOOL_BYTES_MAX, Spool, SpoolFull
from sbxd.audit.stream_events import AuditOpened, AuditRecovered

RETRY_SECONDS = 0.5
SETTLE_SECONDS = 0.01
# Of the spool at a time, before other tasks have their turn.
REPLAY_BATCH = 64

WallClock = Callable[[], int]  # microseconds since the epoch


class AuditCounts(Struct, frozen=True, kw_only=True):
    """Since the daemon's start. written: records that the journal's queue took, spooled ones
    among them once they were replayed. spooled: records that had to wait. refused: requests for
    new work that an outage refused. unrecorded: attempts that a full spool did not take.
    waiting: in the spool now. unread_bytes: in the journal's queue now, of the kernel's memory.
    sequence: the last number."""

    written: int
    spooled: int
    refused: int
    unrecorded: int
    waiting: int
    unread_bytes: int
    sequence: int


class _Outage:
    """From the first event that the journal did not take to the record of its recovery."""

    def __init__(self) -> None:
        self.since = trio.current_time()
        self.spooled = 0
        self.refused = 0
        self.unrecorded = 0


class Recorder:
    """Takes events (an AuditSink). `open_recorder` makes it and runs what it needs beside."""

    def __init__(
        self,
        journal: JournalSocket,
        position: PositionFile,
        spool: Spool,
        *,
        boot_id: str,
        clock: WallClock,
    ) -> None:
        self._journal = journal
        self._position = position
        self._spool = spool
        self._boot_id = boot_id
        self._clock = clock
        self._instance = uuid4().hex
        found = position.found
        self._sequence = found.sequence if found and found.boot_id == boot_id else 0
        self._turn = trio.Lock()
        self._waits = trio.Event()
        self._outage: _Outage | None = None
        self._written = self._spooled = self._refused = self._unrecorded = 0

    async def emit(self, event: AuditEvent) -> None:
        """Record one event; returns when the journal's queue or the spool has it.

        Raises:
            AuditUnavailable: it must not happen, or must end (`sbxd.audit.outage`), or was not
                recorded at all because the spool is full.

        Cancellation: the event is recorded whole or not at all.
        """
        # The lock is FIFO: events of one task keep their order. Taken at once when it is free, so
        # that no turn of the loop is lost.
        try:
            self._turn.acquire_nowait()
        except trio.WouldBlock:
            await self._turn.acquire()
        try:
            if self._spool.is_empty and await self._send(event):
                return
            self._keep(event)
        finally:
            self._turn.release()

    def admit(self) -> None:
        """Raises AuditUnavailable while new work must be refused: records wait, or the journal
        has read nothing for as long as a record may wait for it."""
        if self._outage is not None:
            raise AuditUnavailable("the journal takes no record: new work is refused")
        if self._journal.stalled_seconds() >= self._journal.wait_seconds:
            raise AuditUnavailable("the journal reads nothing: new work is refused")

    @property
    def counts(self) -> AuditCounts:
        return AuditCounts(
            written=self._written,
            spooled=self._spooled,
            refused=self._refused,
            unrecorded=self._unrecorded,
            waiting=self._spool.waiting,
            unread_bytes=self._journal.unread_bytes(),
            sequence=self._sequence,
        )

    async def begin(self) -> None:
        """Give the journal what an earlier daemon left waiting, and record the start."""
        found, waiting = self._position.found, self._spool.waiting
        if waiting:
            self._outage_begun().spooled += waiting
            await self._replay()
        earlier = found if found is not None and found.boot_id != self._boot_id else None
        await self.emit(
            AuditOpened(
                resumed_after=self._sequence,
                previous_boot_id=earlier.boot_id if earlier else None,
                previous_boot_sequence=earlier.sequence if earlier else None,
                waiting=waiting,
                discarded_bytes=self._spool.discarded_bytes,
            )
        )

    async def replay(self) -> None:
        """Give the journal what waits, whenever something does. Never returns."""
        while True:
            await self._waits.wait()
            await trio.sleep(RETRY_SECONDS)
            await self._replay()

    async def settle(self) -> None:
        """Until the journal has read everything, for as long as a record may wait for it. It
        learns whose a record is while the sender lives."""
        with trio.move_on_after(self._journal.wait_seconds):
            while True:
                if not self._journal.unread_bytes():
                    return
                await trio.sleep(SETTLE_SECONDS)

    async def _send(self, event: AuditEvent) -> bool:
        """Whether the journal's queue has it. An outage is waited for once, not by every event."""
        for _ in range(2):
            record = self._numbered(event)
            try:
                if self._outage is None:
                    await self._journal.send(record)
                elif not self._journal.send_nowait(record):
                    return False
            except AuditUnavailable:
                return False
            except JournalReplaced:
                # Another one may listen already; what the old one had not read goes first.
                self._keep_unread()
                if not self._drain(self._spool.waiting):
                    return False
            else:
                self._number_taken()
                self._written += 1
                return True
        return False

    def _outage_begun(self) -> _Outage:
        if self._outage is None:
            self._outage = _Outage()
            self._waits.set()
        return self._outage

    def _keep(self, event: AuditEvent) -> None:
        fate, outage = fate_of(event), self._outage_begun()
        if is_recorded(fate):
            self._append(self._numbered(event), room_for(event, self._spool.bytes_max))
            self._number_taken()
        elif fate is Fate.COUNTED:
            self._refused += 1
            outage.refused += 1
        if fate in (Fate.REFUSED, Fate.KEPT_AND_ENDED):
            raise AuditUnavailable("the journal takes no record: new work is refused")

    def _keep_unread(self) -> None:
        """Spool what a journal that was replaced may not have read; its numbers stay."""
        for record in self._journal.take_unread():
            with suppress(AuditUnavailable):
                self._append(record, self._spool.bytes_max)

    def _append(self, record: bytes, bytes_max: int) -> None:
        outage = self._outage_begun()
        try:
            self._spool.append(record, bytes_max=bytes_max)
        except (SpoolFull, OSError):
            self._unrecorded += 1
            outage.unrecorded += 1
            raise AuditUnavailable("the journal takes no record, nor does the spool") from None
        self._spooled += 1
        outage.spooled += 1

    def _drain(self, count: int) -> bool:
        """Replay so many at once; whether nothing waits any more."""
        for _ in range(count):
            if self._spool.is_empty:
                break
            try:
                if not self._journal.send_nowait(self._spool.first()):
                    return False
            except AuditUnavailable:
                return False
            except JournalReplaced:
                # Replaced again: these follow out of turn, which is better than not at all.
                self._keep_unread()
                return False
            self._spool.drop_first()
            self._write_position()
            self._written += 1
        return self._spool.is_empty

    async def _replay(self) -> None:
        while not self._spool.is_empty:
            before = self._spool.waiting
            self._drain(REPLAY_BATCH)
            if self._spool.waiting >= before and not await self._journal.wait_room():
                return
            await trio.lowlevel.checkpoint()
        async with self._turn:
            outage = self._outage
            if outage is None or not self._spool.is_empty:
                return
            recovered = AuditRecovered(
                outage_ms=round((trio.current_time() - outage.since) * 1000),
                spooled=outage.spooled,
                refused=outage.refused,
                unrecorded=outage.unrecorded,
            )
            # Taken by the journal, or it has not recovered.
            if await self._send(recovered) and self._spool.is_empty:
                self._outage = None
                self._waits = trio.Event()

    def _numbered(self, event: AuditEvent) -> bytes:
        header = Header(
            schema=SCHEMA_VERSION,
            boot_id=self._boot_id,
            instance=self._instance,
            sequence=self._sequence + 1,
            time=self._clock(),
        )
        return serialize([*encode(event), *header_fields(header)])

    def _number_taken(self) -> None:
        self._sequence += 1
        self._write_position()

    def _write_position(self) -> None:
        self._position.write(Position(self._boot_id, self._sequence, self._spool.replayed_bytes))


def _wall_microseconds() -> int:
    return time.time_ns() // 1000


def _open_position(directory: Path) -> PositionFile:
    directory.mkdir(mode=0o700, exist_ok=True)
    return PositionFile(directory / "position")


@asynccontextmanager
async def open_recorder(
    directory: Path,
    journal_socket: str,
    *,
    boot_id: str,
    clock: WallClock = _wall_microseconds,
    spool_bytes_max: int = SPOOL_BYTES_MAX,
) -> AsyncIterator[Recorder]:
    """A recorder for the length of the block, which its own first record begins.

    boot_id: 32 hex digits.

    Raises:
        AuditUnavailable: another daemon has the directory, or what is in it is damaged.
        OSError: the directory cannot be used.
    """
    position = _open_position(directory)
    journal = JournalSocket(journal_socket)
    try:
        found = position.found
        spool = Spool(
            directory / "spool",
            replayed_bytes=found.replayed_bytes if found else 0,
            bytes_max=spool_bytes_max,
        )
        try:
            recorder = Recorder(journal, position, spool, boot_id=boot_id, clock=clock)
            async with trio.open_nursery() as nursery:
                await recorder.begin()
                nursery.start_soon(recorder.replay)
                yield recorder
                await recorder.settle()
                nursery.cancel_scope.cancel()
        finally:
            spool.close()
    finally:
        journal.close()
        position.close()
