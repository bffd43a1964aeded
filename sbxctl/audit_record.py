"""One record of the audit as the journal has it, and as a document of its own."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from msgspec import Struct, field

from sbxctl.journal import JournalRecord, number, text

_FIELD = "SBX_"
_HEADER = "SBX_AUDIT_"
# What says why, under whatever name its event has it.
REASONS = (
    "SBX_REASON", "SBX_CODE", "SBX_VIOLATION", "SBX_KILLED_BY", "SBX_REFUSAL", "SBX_BUDGET",
    "SBX_STANDING", "SBX_PROOF", "SBX_PART",
)  # fmt: skip


class AuditRecord(Struct, frozen=True, kw_only=True):
    """`docs/audit.md` is the description of this document. sequence, boot_id, instance: the place
    of the record; absent in what a version without them recorded. decided_at: when it was
    decided. received_at: when the journal got it. cut: what was cut in this record, in the words of
    SBX_AUDIT_CUT. fields: SBX_ fields without the prefix, in lower
    case; a list is a field that was there more than once."""

    sequence: int | None
    boot_id: str | None
    instance: str | None
    decided_at: datetime
    received_at: datetime
    event: str
    message_id: str
    priority: int
    message: str
    fields: dict[str, str | list[str]]
    cut: list[str] = field(default_factory=list)


def audit_records(found: Iterable[JournalRecord]) -> Iterator[AuditRecord]:
    """Those of the records that are the audit's."""
    for record in found:
        event = text(record, "SBX_EVENT")
        if event is not None:
            yield _audit_record(record, event)


def has_reason(record: JournalRecord, reason: str) -> bool:
    """Whether one of the fields that say why has this value, whatever its case."""
    wanted = reason.casefold()
    return any((text(record, name) or "").casefold() == wanted for name in REASONS)


def _audit_record(record: JournalRecord, event: str) -> AuditRecord:
    received = number(record, "__REALTIME_TIMESTAMP") or 0
    decided = number(record, "SBX_AUDIT_TIME")
    return AuditRecord(
        sequence=number(record, "SBX_AUDIT_SEQUENCE"),
        boot_id=text(record, "SBX_AUDIT_BOOT_ID"),
        instance=text(record, "SBX_AUDIT_INSTANCE"),
        decided_at=_instant(received if decided is None else decided),
        received_at=_instant(received),
        event=event,
        message_id=text(record, "MESSAGE_ID") or "",
        priority=number(record, "PRIORITY") or 0,
        message=text(record, "MESSAGE") or "",
        fields={
            name.removeprefix(_FIELD).lower(): _values(record, name)
            for name in sorted(record)
            if name.startswith(_FIELD) and not name.startswith(_HEADER) and name != "SBX_EVENT"
        },
        cut=_list(record, "SBX_AUDIT_CUT"),
    )


def _instant(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1_000_000, UTC)


def _list(record: JournalRecord, name: str) -> list[str]:
    found = _values(record, name) if name in record else []
    return [found] if isinstance(found, str) else found


def _values(record: JournalRecord, name: str) -> str | list[str]:
    """One text, or one for each time that the field was there."""
    single = text(record, name)
    if single is not None:
        return single
    value = record[name]
    if not isinstance(value, list):
        return ""
    return [text({name: each}, name) or "" for each in value]
