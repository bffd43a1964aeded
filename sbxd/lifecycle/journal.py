"""The creation journal: which environments may exist, written before they do.

Invariants: `intend` is durable (fsync) when it returns, and no resource is made before it; so is
`quarantine`. What else is written is ordered after it and survives the death of this process, and
a power loss may take the latest of it: after a power loss nothing of an environment but its
volume exists, and the volume's intent is there (decision 0003). One thread, one connection, WAL.

Epochs: for each (uid, tenant, run) the highest that was seen; checked and raised in the same
transaction that records the hand-out.

When the database refuses a quarantine, a marker file beside it says the same: `open` reads both.
"""

import os
import re
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import trio

from sbxd.port.ids import ENVIRONMENT_ID_PATTERN, EnvironmentId, RunId, TenantId

ResultT = TypeVar("ResultT")

SCHEMA_VERSION = 1
# Of environments that are gone, so many of the latest stay to recognise what a leak belonged to.
GONE_KEPT = 16_384
# Epochs are forgotten when they are older than this and not among so many of the latest: a clock
# that is set forward alone makes no outdated worker's epoch acceptable again.
EPOCHS_KEPT_SECONDS = 30 * 86_400
EPOCHS_KEPT = 16_384
_PRUNE_EVERY = 1024
# The table decides; so many of the latest, at hand, spare an outdated request a slot.
EPOCHS_AT_HAND = 256
# Without a bound the daemon grows with the journal, by 2 MiB; the kernel caches the pages anyway.
_CACHE_KIB = 256
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS environments (
        sequence INTEGER PRIMARY KEY,
        environment_id TEXT NOT NULL UNIQUE,
        boot_id TEXT NOT NULL,
        state TEXT NOT NULL,
        owner_uid INTEGER,
        tenant_id TEXT,
        run_id TEXT,
        lease_epoch INTEGER,
        noted_at REAL NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS environments_by_state ON environments (state)",
    """CREATE TABLE IF NOT EXISTS epochs (
        owner_uid INTEGER NOT NULL,
        tenant_id TEXT NOT NULL,
        run_id TEXT NOT NULL,
        lease_epoch INTEGER NOT NULL,
        seen_at REAL NOT NULL,
        PRIMARY KEY (owner_uid, tenant_id, run_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS epochs_by_time ON epochs (seen_at)",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)


class JournalState(StrEnum):
    PREPARING = "PREPARING"
    LIVE = "LIVE"
    DESTROYING = "DESTROYING"
    GONE = "GONE"
    QUARANTINED = "QUARANTINED"


class Durability(StrEnum):
    """FULL: on disk when it returns. ORDERED: before whatever is written later."""

    FULL = "FULL"
    ORDERED = "NORMAL"


@dataclass(frozen=True)
class Tenancy:
    """Whose an environment is, and under which lease."""

    owner_uid: int
    tenant_id: TenantId
    run_id: RunId
    lease_epoch: int

    def is_of_same_run(self, other: "Tenancy") -> bool:
        """Whether both are leases of one run: of the same uid, tenant and run id."""
        return (self.owner_uid, self.tenant_id, self.run_id) == (
            other.owner_uid,
            other.tenant_id,
            other.run_id,
        )


class JournalUnwritable(Exception):
    """The journal did not take a record. Nothing new may be built."""


class JournalUnreadable(Exception):
    """The journal cannot be opened: the daemon must not start."""


class EpochTooLow(Exception):
    """A higher epoch of this run has been seen."""

    def __init__(self, seen: int) -> None:
        super().__init__(f"epoch {seen} has been seen")
        self.seen = seen


class JournalStore:
    """The blocking half: one connection and the marker directory. Not thread-safe.

    now: seconds of wall time, for pruning alone.
    """

    def __init__(self, directory: Path, boot_id: str, now: Callable[[], float]) -> None:
        self._boot_id = boot_id
        self._now = now
        self._markers = directory / "quarantine"
        self._gone_since_prune = 0
        try:
            self._markers.mkdir(mode=0o700, exist_ok=True)
            self._connection = sqlite3.connect(
                directory / "journal.sqlite", isolation_level=None, check_same_thread=False
            )
            self._prepare()
        except (OSError, sqlite3.Error) as problem:
            raise JournalUnreadable(f"the journal cannot be opened: {problem}") from None

    def _prepare(self) -> None:
        run = self._connection.execute
        (mode,) = run("PRAGMA journal_mode = WAL").fetchone()
        (version,) = run("PRAGMA user_version").fetchone()
        if mode != "wal" or version not in (0, SCHEMA_VERSION):
            raise JournalUnreadable(f"journal mode {mode}, schema version {version}")
        (verdict,) = run("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise JournalUnreadable(f"the journal is damaged: {verdict}")
        run("PRAGMA synchronous = FULL")
        run(f"PRAGMA cache_size = -{_CACHE_KIB}")
        run("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            run(statement)
        self._prune_epochs(run)
        run("COMMIT")

    def close(self) -> None:
        self._connection.close()

    def intend(self, environment_id: EnvironmentId, tenancy: Tenancy | None) -> None:
        def write(run: "_Run") -> None:
            if tenancy is not None:
                self._claim(run, tenancy)
            run(
                "INSERT INTO environments (environment_id, boot_id, state, noted_at) "
                "VALUES (?, ?, ?, ?)",
                (environment_id, self._boot_id, JournalState.PREPARING, self._now()),
            )
            if tenancy is not None:
                self._name(run, environment_id, tenancy)

        self._transact(Durability.FULL, write)

    def assign(self, environment_id: EnvironmentId, tenancy: Tenancy) -> None:
        def write(run: "_Run") -> None:
            self._claim(run, tenancy)
            self._name(run, environment_id, tenancy)
            self._set_state(run, environment_id, JournalState.LIVE)

        self._transact(Durability.ORDERED, write)

    def note(self, environment_id: EnvironmentId, state: JournalState) -> None:
        def write(run: "_Run") -> None:
            self._set_state(run, environment_id, state)
            if state is JournalState.GONE:
                self._gone_since_prune += 1
            if self._gone_since_prune >= _PRUNE_EVERY:
                self._gone_since_prune = 0
                run(
                    "DELETE FROM environments WHERE state = ? AND "
                    "sequence < (SELECT max(sequence) FROM environments) - ?",
                    (JournalState.GONE, GONE_KEPT),
                )
                self._prune_epochs(run)

        self._transact(Durability.ORDERED, write)

    def quarantine(self, environment_id: EnvironmentId) -> None:
        def write(run: "_Run") -> None:
            run(
                "INSERT INTO environments (environment_id, boot_id, state, noted_at) "
                "VALUES (?, ?, ?, ?) ON CONFLICT (environment_id) DO UPDATE SET state = ?3",
                (environment_id, self._boot_id, JournalState.QUARANTINED, self._now()),
            )

        try:
            self._transact(Durability.FULL, write)
        except JournalUnwritable:
            self._mark(environment_id)

    def release(self, environment_id: EnvironmentId) -> None:
        def write(run: "_Run") -> None:
            run(
                "UPDATE environments SET state = ?, noted_at = ? WHERE environment_id = ?",
                (JournalState.GONE, self._now(), environment_id),
            )

        self._transact(Durability.FULL, write)
        if re.fullmatch(ENVIRONMENT_ID_PATTERN, environment_id):
            try:
                (self._markers / environment_id).unlink(missing_ok=True)
            except OSError as problem:
                raise JournalUnwritable(f"the marker stays: {problem.errno}") from None

    def states(self) -> Mapping[EnvironmentId, JournalState]:
        """Every record that is not GONE, markers included."""
        try:
            rows = self._connection.execute(
                "SELECT environment_id, state FROM environments WHERE state != ? ORDER BY sequence",
                (JournalState.GONE,),
            ).fetchall()
            marked = sorted(os.listdir(self._markers))
        except (OSError, sqlite3.Error) as problem:
            raise JournalUnreadable(f"the journal cannot be read: {problem}") from None
        found = {EnvironmentId(name): JournalState(state) for name, state in rows}
        found.update({EnvironmentId(name): JournalState.QUARANTINED for name in marked})
        return found

    def _transact(self, durability: Durability, write: "Callable[[_Run], None]") -> None:
        run = self._connection.execute
        try:
            run(f"PRAGMA synchronous = {durability.value}")
            run("BEGIN IMMEDIATE")
            try:
                write(run)
                run("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    run("ROLLBACK")
                raise
        except sqlite3.Error as problem:
            # None of the database's own: it may quote what was to be written.
            raise JournalUnwritable(
                getattr(problem, "sqlite_errorname", type(problem).__name__)
            ) from None

    def _prune_epochs(self, run: "_Run") -> None:
        run(
            "DELETE FROM epochs WHERE seen_at < ? AND seen_at < "
            "(SELECT seen_at FROM epochs ORDER BY seen_at DESC LIMIT 1 OFFSET ?)",
            (self._now() - EPOCHS_KEPT_SECONDS, EPOCHS_KEPT - 1),
        )

    def _claim(self, run: "_Run", tenancy: Tenancy) -> None:
        key = _key(tenancy)
        row = run(
            "SELECT lease_epoch FROM epochs WHERE owner_uid = ? AND tenant_id = ? AND run_id = ?",
            key,
        ).fetchone()
        if row is not None and row[0] > tenancy.lease_epoch:
            raise EpochTooLow(row[0])
        run(
            "INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?, ?)",
            (*key, tenancy.lease_epoch, self._now()),
        )

    def _name(self, run: "_Run", environment_id: EnvironmentId, tenancy: Tenancy) -> None:
        run(
            "UPDATE environments SET owner_uid = ?, tenant_id = ?, run_id = ?, lease_epoch = ? "
            "WHERE environment_id = ?",
            (
                tenancy.owner_uid,
                tenancy.tenant_id,
                tenancy.run_id,
                tenancy.lease_epoch,
                environment_id,
            ),
        )

    def _set_state(self, run: "_Run", environment_id: EnvironmentId, state: JournalState) -> None:
        run(
            "UPDATE environments SET state = ?, noted_at = ? "
            "WHERE environment_id = ? AND state != ?",
            (state, self._now(), environment_id, JournalState.QUARANTINED),
        )

    def _mark(self, environment_id: EnvironmentId) -> None:
        if not re.fullmatch(ENVIRONMENT_ID_PATTERN, environment_id):
            raise JournalUnwritable("not a name for a marker")
        try:
            marker_fd = os.open(
                self._markers / environment_id, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            os.close(marker_fd)
            directory_fd = os.open(self._markers, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory_fd)
            finally:
                os.close(directory_fd)
        except OSError as problem:
            raise JournalUnwritable(f"neither database nor marker: {problem.errno}") from None


_Run = Callable[..., sqlite3.Cursor]
_RunKey = tuple[int, TenantId, RunId]


def _key(tenancy: Tenancy) -> _RunKey:
    return tenancy.owner_uid, tenancy.tenant_id, tenancy.run_id


class Runner(Protocol):
    """Runs a blocking operation; one at a time, in the order of the calls."""

    async def __call__(self, operation: Callable[[], ResultT]) -> ResultT: ...


class OneThread:
    """A runner that lends one worker thread at a time."""

    def __init__(self) -> None:
        self._one = trio.CapacityLimiter(1)

    async def __call__(self, operation: Callable[[], ResultT]) -> ResultT:
        """Cancellation: before the operation has begun, or not at all."""
        return await trio.to_thread.run_sync(operation, limiter=self._one)


class Journal:
    """The awaiting half. Calls are served one at a time, in order.

    Every method raises JournalUnwritable when the record was not taken. Cancellation: takes
    effect before the record is begun, or not at all.
    """

    def __init__(self, store: JournalStore, run: Runner) -> None:
        self._store = store
        self._run = run
        self._epochs: OrderedDict[_RunKey, int] = OrderedDict()

    def refuse_outdated(self, tenancy: Tenancy) -> None:
        """Raises EpochTooLow for an epoch that is below one at hand. That none is raised says
        nothing: what records a tenancy decides. Never blocks."""
        seen = self._epochs.get(_key(tenancy), 0)
        if seen > tenancy.lease_epoch:
            raise EpochTooLow(seen)

    @contextmanager
    def _noting_epoch(self, tenancy: Tenancy) -> Iterator[None]:
        try:
            yield
        except EpochTooLow as problem:
            self._note_epoch(tenancy, problem.seen)
            raise
        self._note_epoch(tenancy, tenancy.lease_epoch)

    def _note_epoch(self, tenancy: Tenancy, seen: int) -> None:
        key = _key(tenancy)
        self._epochs[key] = max(seen, self._epochs.pop(key, 0))
        if len(self._epochs) > EPOCHS_AT_HAND:
            self._epochs.popitem(last=False)

    async def intend(self, environment_id: EnvironmentId, tenancy: Tenancy | None) -> None:
        """Record, durably, that an environment may be built from now on.

        tenancy: None for a slot of the reserve. Raises EpochTooLow; then nothing is recorded.
        """
        operation = partial(self._store.intend, environment_id, tenancy)
        if tenancy is None:
            await self._run(operation)
            return
        with self._noting_epoch(tenancy):
            await self._run(operation)

    async def assign(self, environment_id: EnvironmentId, tenancy: Tenancy) -> None:
        """Record that an intended environment is handed to a run.

        Raises EpochTooLow; then nothing is recorded.
        """
        with self._noting_epoch(tenancy):
            await self._run(partial(self._store.assign, environment_id, tenancy))

    async def note(self, environment_id: EnvironmentId, state: JournalState) -> None:
        """Record where an environment is. A quarantined one stays quarantined."""
        await self._run(partial(self._store.note, environment_id, state))

    async def quarantine(self, environment_id: EnvironmentId) -> None:
        """Record, durably, that an environment was not proven stopped; by a marker file if the
        database does not take it."""
        await self._run(partial(self._store.quarantine, environment_id))

    async def release(self, environment_id: EnvironmentId) -> None:
        """Record, durably, that a quarantine is over: the only way out of it."""
        await self._run(partial(self._store.release, environment_id))

    async def states(self) -> Mapping[EnvironmentId, JournalState]:
        """Every record that is not GONE. Raises JournalUnreadable."""
        return await self._run(self._store.states)
