"""What the installed daemon recorded while a block ran, by the audit's own numbers."""

import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sbxctl import journal
from sbxctl.audit_record import AuditRecord, audit_records
from sbxctl.journal import Query
from sbxd.audit.position import Position, parse_position

POSITION = Path("/var/lib/sbxd/audit/position")


@dataclass
class Recorded:
    """Filled when the block is left."""

    records: list[AuditRecord] = field(default_factory=list)

    @property
    def events(self) -> set[str]:
        return {each.event for each in self.records}

    def of(self, event: str) -> list[AuditRecord]:
        return [each for each in self.records if each.event == event]


def position() -> Position:
    """How far the daemon's numbers have come."""
    found = parse_position(POSITION.read_bytes())
    assert found is not None
    return found


def since(number: int) -> list[AuditRecord]:
    """Every record of this boot above a number, in the journal's order."""
    subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
    query = Query(matches=(journal.unit(), f"SBX_AUDIT_BOOT_ID={position().boot_id}"))
    with closing(journal.records(query.argv())) as found:
        return [each for each in audit_records(found) if (each.sequence or 0) > number]


@contextmanager
def recording() -> Iterator[Recorded]:
    """What was recorded from here to the end of the block."""
    recorded, before = Recorded(), position().sequence
    yield recorded
    recorded.records = since(before)
