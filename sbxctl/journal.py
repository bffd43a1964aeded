"""The system's journal, read with journalctl: the only file here that knows how.

Invariants: a record counts as the daemon's by `_SYSTEMD_UNIT`, which no sender can set; whoever may
not read the system's journal is told so, and is never shown an empty one; a record is what
journalctl's JSON says, one a line, and nothing of it is interpreted here. Deliberately absent: a
binding of the journal's library, since journalctl is on every host that has a journal.
"""

import grp
import json
import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import suppress
from datetime import datetime

import click
from msgspec import Struct

from sbxctl.report import printable

UNIT = "sbxd.service"
WHO_MAY = "run as root or as a member of group systemd-journal"
READERS = ("systemd-journal", "adm")

JournalRecord = dict[str, object]
Records = Generator[JournalRecord, None, None]


class JournalUnreadable(click.ClickException):
    """The journal gave no records."""


class Query(Struct, frozen=True, kw_only=True):
    """What to read. matches: "FIELD=value", or "+" between alternatives; different fields must all
    match, of one field any value. since, until: as journalctl takes them. newest: only so many of
    the last. only: the fields to read, or all. follow: go on with what comes."""

    matches: tuple[str, ...]
    since: str | None = None
    until: str | None = None
    newest: int | None = None
    only: tuple[str, ...] = ()
    priority: str | None = None
    follow: bool = False

    def argv(self) -> list[str]:
        words = ["journalctl", "--output=json", "--all", "--quiet", "--no-pager"]
        if self.since is not None:
            words.append(f"--since={self.since}")
        if self.until is not None:
            words.append(f"--until={self.until}")
        if self.newest is not None:
            words.append(f"--lines={self.newest}")
        elif self.follow:
            words.append("--no-tail")
        if self.only:
            words.append(f"--output-fields={','.join(self.only)}")
        if self.priority is not None:
            words.append(f"--priority={self.priority}")
        if self.follow:
            words.append("--follow")
        return [*words, *self.matches]


def instant(moment: datetime | None) -> str | None:
    """A point in time as journalctl takes it, to the second before."""
    return None if moment is None else f"@{int(moment.timestamp())}"


def unit(name: str = UNIT) -> str:
    """The match of what a unit's processes recorded."""
    return f"_SYSTEMD_UNIT={name}"


def records(argv: Sequence[str], *, at_most: int | None = None) -> Records:
    """The records of one journalctl, oldest first. Closing the iterator ends it.

    Raises JournalUnreadable.
    """
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as problem:
        raise JournalUnreadable(f"journalctl: {problem.strerror}") from None
    with process as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        try:
            for number, line in enumerate(reading.stdout, start=1):
                record = _record(line)
                if record is not None:
                    yield record
                if number == at_most:
                    return
            said = reading.stderr.read(2000).decode("utf-8", "replace").strip()
            if reading.wait() != 0:
                hint = f" {WHO_MAY}" if "permission" in said else ""
                raise JournalUnreadable(f"journalctl: {printable(said) or 'no records'}{hint}")
        finally:
            if reading.poll() is None:
                reading.terminate()


def require_readable(match: str) -> bool:
    """Whether there is anything of this match at all.

    Raises JournalUnreadable: there is nothing to be seen, and this user is none of those who may
    see the system's journal.
    """
    for _ in records(Query(matches=(match,), newest=1).argv()):
        return True
    if not _is_reader():
        raise JournalUnreadable(f"the journal shows nothing of the service: {WHO_MAY}")
    return False


def synchronize() -> None:
    """Let the journal write what it was given, as far as this user may ask for that."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["journalctl", "--sync"], check=False, capture_output=True, timeout=30)


def text(record: JournalRecord, name: str) -> str | None:
    """A field of one value; the journal gives as numbers what is not printable."""
    value = record.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
        return bytes(value).decode("utf-8", "replace")
    return None


def number(record: JournalRecord, name: str) -> int | None:
    """A field that is a whole number."""
    value = record.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return None


def _is_reader() -> bool:
    if os.geteuid() == 0:
        return True
    mine = set(os.getgroups())
    for name in READERS:
        with suppress(KeyError):
            if grp.getgrnam(name).gr_gid in mine:
                return True
    return False


def _record(line: bytes) -> JournalRecord | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
