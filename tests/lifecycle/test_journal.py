"""The creation journal: durable intents, epochs, quarantine that survives what it must."""

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbxd.lifecycle.journal import (
    EPOCHS_AT_HAND,
    EPOCHS_KEPT_SECONDS,
    GONE_KEPT,
    EpochTooLow,
    Journal,
    JournalState,
    JournalStore,
    JournalUnreadable,
    JournalUnwritable,
    OneThread,
    Tenancy,
)
from sbxd.port.ids import EnvironmentId, RunId, TenantId

A, B, C = (EnvironmentId(digit * 32) for digit in "abc")


def store_in(directory: Path, now: float = 0.0) -> JournalStore:
    return JournalStore(directory, "boot", lambda: now)


def tenancy(epoch: int, run: str = "run", uid: int = 1) -> Tenancy:
    return Tenancy(uid, TenantId("tenant"), RunId(run), epoch)


def test_an_intent_survives_the_process_and_gone_ends_it(tmp_path: Path) -> None:
    first = store_in(tmp_path)
    first.intend(A, None)
    first.intend(B, tenancy(1))
    first.assign(A, tenancy(2, "other"))
    # Not closed: as after a kill, another connection reads what was written.
    second = store_in(tmp_path)
    assert second.states() == {A: JournalState.LIVE, B: JournalState.PREPARING}
    second.note(A, JournalState.GONE)
    assert second.states() == {B: JournalState.PREPARING}
    first.close()
    second.close()


def test_a_lower_epoch_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.intend(A, tenancy(5))
    with pytest.raises(EpochTooLow) as refused:
        store.intend(B, tenancy(4))
    assert refused.value.seen == 5
    assert store.states() == {A: JournalState.PREPARING}
    store.intend(B, None)
    with pytest.raises(EpochTooLow):
        store.assign(B, tenancy(4))
    assert store.states()[B] is JournalState.PREPARING
    store.assign(B, tenancy(5))
    store.close()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["r", "s"]), st.integers(1, 2), st.integers(0, 4)), max_size=12
    )
)
def test_the_highest_epoch_of_each_run_and_uid_decides(
    tmp_path_factory: pytest.TempPathFactory, claims: list[tuple[str, int, int]]
) -> None:
    store = store_in(tmp_path_factory.mktemp("journal"))
    seen: dict[tuple[str, int], int] = {}
    for number, (run, uid, epoch) in enumerate(claims):
        accepted = True
        try:
            store.intend(EnvironmentId(f"{number:032x}"), tenancy(epoch, run, uid))
        except EpochTooLow:
            accepted = False
        assert accepted == (epoch >= seen.get((run, uid), 0))
        seen[run, uid] = max(epoch, seen.get((run, uid), 0))
    store.close()


def test_epochs_are_forgotten_after_their_time_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbxd.lifecycle.journal.EPOCHS_KEPT", 1)
    store = store_in(tmp_path)
    store.intend(A, tenancy(5))
    store.close()
    kept = store_in(tmp_path, EPOCHS_KEPT_SECONDS)
    with pytest.raises(EpochTooLow):
        kept.intend(B, tenancy(4))
    kept.close()
    later = store_in(tmp_path, EPOCHS_KEPT_SECONDS + 1)
    later.intend(B, tenancy(1, run="another"))
    later.close()
    forgotten = store_in(tmp_path, EPOCHS_KEPT_SECONDS + 1)
    forgotten.intend(C, tenancy(4))
    forgotten.close()


def test_a_clock_that_is_set_forward_makes_no_outdated_epoch_acceptable(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.intend(A, tenancy(5))
    store.close()
    jumped = store_in(tmp_path, 100 * EPOCHS_KEPT_SECONDS)
    with pytest.raises(EpochTooLow):
        jumped.intend(B, tenancy(4))
    jumped.close()


def test_epochs_are_pruned_while_the_daemon_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbxd.lifecycle.journal._PRUNE_EVERY", 5)
    monkeypatch.setattr("sbxd.lifecycle.journal.EPOCHS_KEPT", 3)
    now = [0.0]
    store = JournalStore(tmp_path, "boot", lambda: now[0])
    for number in range(40):
        now[0] += EPOCHS_KEPT_SECONDS
        environment_id = EnvironmentId(f"{number:032x}")
        store.intend(environment_id, tenancy(1, run=f"run-{number}"))
        store.note(environment_id, JournalState.GONE)
    (rows,) = store._connection.execute("SELECT count(*) FROM epochs").fetchone()
    assert 3 <= rows <= 8
    store.close()


def test_a_quarantine_is_not_undone_by_a_later_note(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.intend(A, None)
    store.quarantine(A)
    store.note(A, JournalState.GONE)
    store.quarantine(B)  # also of an id that has no record
    assert store.states() == {A: JournalState.QUARANTINED, B: JournalState.QUARANTINED}
    store.close()


def test_a_quarantine_that_the_database_refuses_is_a_marker(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.intend(A, None)
    blocker = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    store._connection.execute("PRAGMA busy_timeout = 0")
    with pytest.raises(JournalUnwritable):
        store.intend(B, None)
    store.quarantine(A)
    blocker.execute("ROLLBACK")
    blocker.close()
    store.close()
    again = store_in(tmp_path)
    assert again.states() == {A: JournalState.QUARANTINED}
    again.close()


def test_a_name_that_is_no_id_never_becomes_a_path(tmp_path: Path) -> None:
    store = store_in(tmp_path / ".")
    store._connection.execute("PRAGMA query_only = 1")
    with pytest.raises(JournalUnwritable):
        store.quarantine(EnvironmentId("../escaped"))
    assert not (tmp_path / "escaped").exists()
    store.close()


@pytest.mark.parametrize("content", [b"not a database, but long enough to be one" * 100, b"x" * 10])
def test_a_damaged_journal_is_an_error_at_the_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.sqlite").write_bytes(content)
    with pytest.raises(JournalUnreadable):
        store_in(tmp_path)


def test_a_journal_of_another_version_is_an_error_at_the_start(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalUnreadable):
        store_in(tmp_path)


def test_an_intent_is_synced_and_a_hand_out_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    modes: list[str] = []
    store._connection.set_trace_callback(
        lambda statement: modes.append(statement) if "synchronous" in statement else None
    )
    store.intend(A, None)
    store.assign(A, tenancy(1))
    store.note(A, JournalState.DESTROYING)
    store.quarantine(A)
    assert [statement.rsplit(" ", 1)[1] for statement in modes] == [
        "FULL",
        "NORMAL",
        "NORMAL",
        "FULL",
    ]
    store.close()


def test_what_is_gone_is_pruned_and_what_is_not_never_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbxd.lifecycle.journal.GONE_KEPT", 10)
    monkeypatch.setattr("sbxd.lifecycle.journal._PRUNE_EVERY", 5)
    assert GONE_KEPT > 1000
    store = store_in(tmp_path)
    store.intend(A, None)
    for number in range(40):
        store.intend(EnvironmentId(f"{number:032x}"), None)
        store.note(EnvironmentId(f"{number:032x}"), JournalState.GONE)
    (rows,) = store._connection.execute("SELECT count(*) FROM environments").fetchone()
    assert rows <= 16
    assert store.states() == {A: JournalState.PREPARING}
    store.close()


async def test_the_awaiting_half_serves_from_a_thread(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    journal = Journal(store, OneThread())
    await journal.intend(A, tenancy(3))
    with pytest.raises(EpochTooLow):
        await journal.intend(B, tenancy(2))
    await journal.note(A, JournalState.LIVE)
    assert await journal.states() == {A: JournalState.LIVE}
    store.close()


async def test_an_epoch_at_hand_refuses_what_is_below_it_and_decides_nothing_else(
    tmp_path: Path,
) -> None:
    journal = Journal(store_in(tmp_path), OneThread())
    journal.refuse_outdated(tenancy(1))
    await journal.intend(A, tenancy(3))
    journal.refuse_outdated(tenancy(3))
    journal.refuse_outdated(tenancy(1, "other"))
    with pytest.raises(EpochTooLow) as refused:
        journal.refuse_outdated(tenancy(2))
    assert refused.value.seen == 3
    # A refusal of the table's is at hand from then on, and lowers nothing.
    with pytest.raises(EpochTooLow):
        await journal.assign(A, tenancy(1))
    with pytest.raises(EpochTooLow) as refused:
        journal.refuse_outdated(tenancy(2))
    assert refused.value.seen == 3


async def test_only_the_latest_epochs_are_at_hand(tmp_path: Path) -> None:
    journal = Journal(store_in(tmp_path), OneThread())
    await journal.intend(A, tenancy(2, "first"))
    for number in range(EPOCHS_AT_HAND):
        with pytest.raises(EpochTooLow):
            journal.refuse_outdated(tenancy(1, "first"))
        await journal.assign(A, tenancy(2, f"run-{number}"))
    journal.refuse_outdated(tenancy(1, "first"))
    with pytest.raises(EpochTooLow):  # the control: the table has not forgotten
        await journal.assign(A, tenancy(1, "first"))
