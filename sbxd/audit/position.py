"""How far the sequence has come, on disk: one line that is replaced in place after each record.

Invariants: the number is written after its record was handed over, never before. So a daemon that
is killed between the two leaves a number that its successor gives once more, which both records
show by their instance; it never leaves a number that no record has. The line survives the process
in the page cache; after a loss of power it may be older than the journal, never newer than what
the kernel wrote back. One daemon at a time: the file is locked.
"""

import fcntl
import os
import re
from pathlib import Path

from msgspec import Struct

from sbxd.audit.sink import AuditUnavailable

_LINE = re.compile(rb"([0-9a-f]{32}) ([0-9]{20}) ([0-9]{20})\n")
_LINE_BYTES = 75


class Position(Struct, frozen=True):
    """boot_id: 32 hex digits. sequence: the last number given. replayed_bytes: how much of the
    spool's file the journal has."""

    boot_id: str
    sequence: int
    replayed_bytes: int


class PositionFile:
    """The line, held open and locked. Raises OSError where the disk does; AuditUnavailable when
    another daemon holds it, or what is there is no position."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.found = parse_position(os.pread(self._fd, _LINE_BYTES + 1, 0))
        except BlockingIOError:
            os.close(self._fd)
            raise AuditUnavailable("the audit's position is held by another daemon") from None
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, position: Position) -> None:
        """Replace the line."""
        line = f"{position.boot_id} {position.sequence:020} {position.replayed_bytes:020}\n"
        os.pwrite(self._fd, line.encode("ascii"), 0)

    def close(self) -> None:
        os.close(self._fd)


def parse_position(raw: bytes) -> Position | None:
    """What the file says; None of one that is new. Raises AuditUnavailable.

    An unreadable one is no reason to count from 1 again: whoever
    could damage it could hide records that way."""
    if not raw:
        return None
    match = _LINE.fullmatch(raw)
    if match is None:
        raise AuditUnavailable("the audit's position is damaged: see docs/audit.md")
    return Position(match[1].decode("ascii"), int(match[2]), int(match[3]))
