"""The proof that no number is missing: every way in which one can be is found and named."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxctl.audit_verify import Kind, Verification, Verifier, verify

BOOT, LATER = "b" * 32, "c" * 32
ONE, TWO = "1" * 32, "2" * 32


def record(
    sequence: int, boot: str = BOOT, instance: str = ONE, said: str = "x", **more: str
) -> dict[str, object]:
    return {
        "SBX_EVENT": "ImageRemoved",
        "SBX_AUDIT_BOOT_ID": boot,
        "SBX_AUDIT_SEQUENCE": str(sequence),
        "SBX_AUDIT_INSTANCE": instance,
        "SBX_AUDIT_TIME": str(1000 + sequence),
        "MESSAGE": said,
        **more,
    }


def opened(previous: int, boot: str = LATER, of: str = BOOT) -> dict[str, object]:
    return record(1, boot, TWO, SBX_PREVIOUS_BOOT_ID=of, SBX_PREVIOUS_BOOT_SEQUENCE=str(previous))


def found(records: Sequence[dict[str, object]], *, whole: bool = True) -> Verification:
    return verify(records, since_the_beginning=whole)


def named(verdict: Verification) -> list[tuple[Kind, int | None, int | None]]:
    return [(each.kind, each.first, each.last) for each in verdict.findings]


def noted(verdict: Verification) -> list[tuple[Kind, int | None, int | None]]:
    return [(each.kind, each.first, each.last) for each in verdict.notes]


def test_a_whole_sequence_is_sound() -> None:
    verdict = found([record(n) for n in range(1, 100)])
    assert verdict.sound
    assert (verdict.findings, verdict.notes) == ((), ())
    (boot,) = verdict.boots
    assert (boot.first, boot.last, boot.records, boot.instances) == (1, 99, 99, [ONE])


def test_what_is_none_of_the_audits_is_passed_over() -> None:
    assert found([{"MESSAGE": "x"}, record(1), {"MESSAGE": "y"}, record(2)]).records == 2


@given(st.integers(2, 60), st.data())
def test_any_set_of_missing_numbers_is_named_exactly(count: int, data: st.DataObject) -> None:
    numbers = list(range(1, count + 1))
    gone = data.draw(st.sets(st.sampled_from(numbers[1:-1] or [2]), max_size=count))
    kept = [n for n in numbers if n not in gone or n in (1, count)]
    verdict = found([record(n) for n in kept])
    missing = {n for each in verdict.findings for n in range(each.first or 0, (each.last or 0) + 1)}
    assert missing == set(numbers) - set(kept)
    assert verdict.sound is not bool(missing)
    assert {each.kind for each in verdict.findings} <= {Kind.MISSING}


@given(st.permutations(list(range(1, 12))))
def test_an_order_is_sound_only_when_it_is_the_order(order: list[int]) -> None:
    verdict = found([record(n) for n in order])
    assert verdict.sound is (order == sorted(order))
    assert {each.kind for each in verdict.findings} <= {Kind.REORDERED}


def test_a_gap_in_the_middle_is_one_finding() -> None:
    assert named(found([record(1), record(5)])) == [(Kind.MISSING, 2, 4)]


def test_a_number_that_comes_late_is_reordered_and_not_missing() -> None:
    assert named(found([record(1), record(3), record(2), record(4)])) == [(Kind.REORDERED, 2, 2)]


def test_the_same_record_twice_is_a_note() -> None:
    verdict = found([record(1), record(2), record(2), record(1)])
    assert verdict.sound
    assert noted(verdict) == [(Kind.REPEATED, 2, 2), (Kind.REPEATED, 1, 1)]


def test_one_number_for_two_decisions_is_conflicting() -> None:
    verdict = found([record(1), record(2), record(2, said="another")])
    assert named(verdict) == [(Kind.CONFLICTING, 2, 2)]


def test_a_successor_that_gives_the_last_number_again_is_a_note_and_no_other_is() -> None:
    verdict = found([record(1), record(2), record(2, instance=TWO), record(3, instance=TWO)])
    assert verdict.sound
    assert noted(verdict) == [(Kind.CONTINUED, 2, 2)]
    verdict = found([record(1), record(2), record(3), record(2, instance=TWO)])
    assert named(verdict) == [(Kind.CONFLICTING, 2, 2)]


def test_the_end_of_a_boot_is_known_from_the_next_one() -> None:
    whole = [record(1), record(2)]
    assert found([*whole, opened(2)]).sound
    assert named(found([*whole, opened(4)])) == [(Kind.MISSING, 3, 4)]
    # After a loss of power the book may be older than the journal.
    assert found([*whole, opened(1)]).sound


def test_a_boot_that_is_not_there_at_all_is_missing_unless_the_journal_begins_later() -> None:
    records = [record(1), opened(7, of="d" * 32)]
    assert [str(each) for each in found(records).findings] == [f"MISSING 1 to 7 of boot {'d' * 32}"]
    assert noted(found([opened(7)])) == [(Kind.NOT_KEPT, 1, 7)]


def test_a_beginning_that_the_journal_no_longer_keeps_is_a_note_of_the_oldest_boot() -> None:
    assert noted(found([record(5), record(6)])) == [(Kind.NOT_KEPT, 1, 4)]
    assert found([record(5), record(6)], whole=False).notes == ()
    later = [record(1), record(3, LATER)]
    assert named(found(later)) == [(Kind.MISSING, 1, 2)]


def test_the_end_that_the_book_knows_must_be_there() -> None:
    verifier = Verifier(since_the_beginning=True)
    verifier.take(record(1))
    verifier.require(BOOT, 3)
    assert named(verifier.result()) == [(Kind.MISSING, 2, 3)]
    nothing = Verifier(since_the_beginning=True)
    nothing.require(BOOT, 3)
    assert named(nothing.result()) == [(Kind.MISSING, 1, 3)]


def test_a_record_without_a_number_among_numbered_ones_is_found() -> None:
    old: dict[str, object] = {"SBX_EVENT": "ImageRemoved", "MESSAGE": "x"}
    before = found([old, old, record(1)])
    assert before.sound
    assert noted(before) == [(Kind.UNNUMBERED_BEFORE, None, None)]
    assert named(found([record(1), old, record(2)])) == [(Kind.UNNUMBERED, None, None)]


@pytest.mark.parametrize("sequence", ["x", "-1", "٣", "", None, ["1", "2"]])
def test_a_number_that_is_none_is_found(sequence: object) -> None:
    damaged = {**record(2), "SBX_AUDIT_SEQUENCE": sequence}
    assert Kind.UNNUMBERED in {each.kind for each in found([record(1), damaged]).findings}
