"""Whether a number of the audit is missing, given twice or out of its turn. Pure.

A sequence is a boot's; it begins with 1 and goes on over restarts of the daemon. Every start of the
daemon begins with `AuditOpened`, the first of a boot names the boot before and how far that came:
so a boot whose last records are missing is found as well. What proves nothing either way is a
note: the oldest boot of the journal may have lost its beginning to the journal's own retention.
"""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct, field

from sbxctl.journal import JournalRecord, number, text

# What is read of each record.
FIELDS = (
    "MESSAGE", "SBX_EVENT", "SBX_AUDIT_BOOT_ID", "SBX_AUDIT_INSTANCE", "SBX_AUDIT_SEQUENCE",
    "SBX_AUDIT_TIME", "SBX_PREVIOUS_BOOT_ID", "SBX_PREVIOUS_BOOT_SEQUENCE", "SBX_RESUMED_AFTER",
)  # fmt: skip
# How far back a number that comes again can be compared with what it was.
COMPARED = 4096
FINDINGS_MAX = 1000


class Kind(StrEnum):
    """MISSING: no record has the numbers. REORDERED: a number came after a higher one.
    CONFLICTING: two records have one number and say different things. UNNUMBERED: a record of the
    audit without a number, among numbered ones. Notes are the rest. REPEATED: a record is there
    twice, since the journal was replaced or the daemon killed. CONTINUED: a daemon was killed
    after it gave a number, and its successor gave it once more; both records are there.
    NOT_KEPT: older than the journal's oldest record. UNNUMBERED_BEFORE: recorded before the
    numbers began."""

    MISSING = "MISSING"
    REORDERED = "REORDERED"
    CONFLICTING = "CONFLICTING"
    UNNUMBERED = "UNNUMBERED"
    REPEATED = "REPEATED"
    CONTINUED = "CONTINUED"
    NOT_KEPT = "NOT_KEPT"
    UNNUMBERED_BEFORE = "UNNUMBERED_BEFORE"


FINDINGS = frozenset({Kind.MISSING, Kind.REORDERED, Kind.CONFLICTING, Kind.UNNUMBERED})


class Finding(Struct, frozen=True, kw_only=True):
    """boot_id: of the sequence. first, last: the numbers, both included; absent where there are
    none."""

    kind: Kind
    boot_id: str | None
    first: int | None = None
    last: int | None = None

    def __str__(self) -> str:
        where = f" of boot {self.boot_id}" if self.boot_id else ""
        if self.first is None:
            return f"{self.kind}{where}"
        numbers = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        return f"{self.kind} {numbers}{where}"


class BootSequence(Struct, kw_only=True):
    """One boot, as far as it was read. first, last: the lowest and the highest number. records:
    how many records, repetitions among them. instances: starts of the daemon."""

    boot_id: str
    first: int
    last: int
    records: int = 0
    instances: list[str] = field(default_factory=list)


class Verification(Struct, frozen=True, kw_only=True):
    """What was found. sound: no finding. complete: nor is anything older that the journal does
    not keep. findings_omitted: beyond a thousand."""

    sound: bool
    complete: bool
    records: int
    boots: tuple[BootSequence, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    findings_omitted: int = 0


class _Sequence:
    """What is known of one boot while it is read."""

    def __init__(self, boot: BootSequence) -> None:
        self.boot = boot
        self.missing: list[tuple[int, int]] = []
        self.known: dict[int, tuple[str | None, ...]] = {}


class Verifier:
    """Takes records in the journal's order; `result` is the verdict.

    whole: the journal was read from its beginning.
    """

    def __init__(self, *, since_the_beginning: bool) -> None:
        self._whole = since_the_beginning
        self._sequences: dict[str, _Sequence] = {}
        self._claims: list[tuple[str, str, int]] = []
        self._findings: list[Finding] = []
        self._notes: list[Finding] = []
        self._records = 0
        self._unnumbered = 0
        self._omitted = 0
        self._not_kept = False

    def take(self, record: JournalRecord) -> None:
        """The next record of the journal; what is none of the audit's is passed over."""
        if "SBX_EVENT" not in record:
            return
        self._records += 1
        boot_id = text(record, "SBX_AUDIT_BOOT_ID")
        sequence = number(record, "SBX_AUDIT_SEQUENCE")
        if boot_id is None or sequence is None:
            kind = Kind.UNNUMBERED if self._sequences else Kind.UNNUMBERED_BEFORE
            if kind is Kind.UNNUMBERED or not self._unnumbered:
                self._find(kind, None)
            self._unnumbered += 1
            return
        self._claim(record, boot_id)
        known = self._sequences.get(boot_id)
        if known is None:
            boot = BootSequence(boot_id=boot_id, first=sequence, last=sequence - 1)
            known = self._sequences[boot_id] = _Sequence(boot)
        self._place(known, sequence, record)

    def require(self, boot_id: str, sequence: int) -> None:
        """A boot must have come as far as this number."""
        self._claims.append(("", boot_id, sequence))

    def result(self) -> Verification:
        """The verdict. Once, at the end."""
        oldest = next(iter(self._sequences), None)
        for boot_id, known in self._sequences.items():
            for first, last in known.missing:
                self._find(Kind.MISSING, boot_id, first, last)
            if known.boot.first > 1 and (self._whole or boot_id != oldest):
                kind = Kind.NOT_KEPT if boot_id == oldest else Kind.MISSING
                self._find(kind, boot_id, 1, known.boot.first - 1)
        for by, boot_id, sequence in self._claims:
            of = self._sequences.get(boot_id)
            if of is None and sequence > 0:
                if by != oldest:
                    self._find(Kind.MISSING, boot_id, 1, sequence)
                elif self._whole:
                    self._find(Kind.NOT_KEPT, boot_id, 1, sequence)
            elif of is not None and of.boot.last < sequence:
                self._find(Kind.MISSING, boot_id, of.boot.last + 1, sequence)
        return Verification(
            sound=not self._findings,
            complete=not self._findings and not self._not_kept,
            records=self._records,
            boots=tuple(each.boot for each in self._sequences.values()),
            findings=tuple(self._findings),
            notes=tuple(self._notes),
            findings_omitted=self._omitted,
        )

    def _claim(self, record: JournalRecord, boot_id: str) -> None:
        earlier = text(record, "SBX_PREVIOUS_BOOT_ID")
        sequence = number(record, "SBX_PREVIOUS_BOOT_SEQUENCE")
        if earlier is not None and sequence is not None:
            self._claims.append((boot_id, earlier, sequence))

    def _place(self, known: _Sequence, sequence: int, record: JournalRecord) -> None:
        boot, instance = known.boot, text(record, "SBX_AUDIT_INSTANCE") or ""
        boot.records += 1
        is_new = instance not in boot.instances
        identity = tuple(text(record, name) for name in FIELDS)
        if is_new:
            boot.instances.append(instance)
        if sequence > boot.last:
            if sequence > boot.last + 1:
                known.missing.append((boot.last + 1, sequence - 1))
            boot.last = sequence
            known.known[sequence] = identity
            known.known.pop(sequence - COMPARED, None)
        elif self._fill(known, sequence) or sequence < boot.first:
            self._find(Kind.REORDERED, boot.boot_id, sequence, sequence)
            if sequence < boot.first - 1:
                known.missing.insert(0, (sequence + 1, boot.first - 1))
            boot.first = min(boot.first, sequence)
            known.known[sequence] = identity
        elif known.known.get(sequence) == identity:
            self._find(Kind.REPEATED, boot.boot_id, sequence, sequence)
        elif is_new and sequence == boot.last:
            self._find(Kind.CONTINUED, boot.boot_id, sequence, sequence)
        else:
            self._find(Kind.CONFLICTING, boot.boot_id, sequence, sequence)

    def _fill(self, known: _Sequence, sequence: int) -> bool:
        """Whether the number was missing until now."""
        for position, (first, last) in enumerate(known.missing):
            if first <= sequence <= last:
                rest = [(first, sequence - 1), (sequence + 1, last)]
                known.missing[position : position + 1] = [(a, b) for a, b in rest if a <= b]
                return True
        return False

    def _find(
        self, kind: Kind, boot_id: str | None, first: int | None = None, last: int | None = None
    ) -> None:
        self._not_kept = self._not_kept or kind is Kind.NOT_KEPT
        found = Finding(kind=kind, boot_id=boot_id, first=first, last=last)
        into = self._findings if kind in FINDINGS else self._notes
        if len(into) < FINDINGS_MAX:
            into.append(found)
        else:
            self._omitted += 1


def verify(found: Iterable[JournalRecord], *, since_the_beginning: bool) -> Verification:
    """The verdict over records in the journal's order."""
    verifier = Verifier(since_the_beginning=since_the_beginning)
    for record in found:
        verifier.take(record)
    return verifier.result()
