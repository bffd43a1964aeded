"""`sbxctl logs`: what the service's processes said, and systemd about them. The audit is elsewhere
(`sbxctl audit`): nothing here is a decision's record.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime

import click
from rich.text import Text

from sbxctl import journal
from sbxctl.journal import JournalRecord, Query, number, text
from sbxctl.report import json_line, page, tell
from sbxctl.stream import endless
from sbxctl.units import LINES_MAX, Whole
from sbxctl.when import When

UNITS = {
    "daemon": "sbxd.service",
    "launcher": "sbxd-launcher.service",
    "reaper": "sbxd-reap.service",
}
PRIORITIES = ("emerg", "alert", "crit", "err", "warning", "notice", "info", "debug")
LINES = 100
STYLES = {0: "bold red", 1: "bold red", 2: "bold red", 3: "red", 4: "yellow", 5: "bold"}
_SYSTEMD = "systemd"


@click.command("logs")
@click.argument("of", nargs=-1, type=click.Choice(tuple(UNITS)), metavar="[PART]...")
@click.option("--since", type=When(), help="Since then: 15m, today, 2026-03-01T14:00.")
@click.option("-n", "--lines", type=Whole(0, LINES_MAX), help=f"The newest; {LINES} by default.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes.")
@click.option(
    "-p",
    "--priority",
    type=click.Choice(PRIORITIES),
    metavar="NAME",
    help="This priority and what is more urgent, as err or warning.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document a line.")
def logs(
    of: tuple[str, ...],
    since: datetime | None,
    lines: int | None,
    follow: bool,
    priority: str | None,
    as_json: bool,
) -> None:
    """Show what the daemon, the launcher and the reaper said; PART is one of those three words.

    \b
    sbxctl logs -f
    sbxctl logs launcher --since 1h -p warning
    """
    units = [UNITS[each] for each in of] or list(UNITS.values())
    if lines is None and since is None:
        lines = LINES
    for unit in units:
        if journal.require_readable(journal.unit(unit)):
            break
    query = Query(
        matches=(
            *(journal.unit(unit) for unit in units),
            "_TRANSPORT=stdout",
            "+",
            "_PID=1",
            *(f"UNIT={unit}" for unit in units),
        ),
        since=journal.instant(since),
        newest=lines,
        priority=priority,
        follow=follow,
    )
    with endless(), closing(journal.records(query.argv())) as found:
        _show(found, as_json=as_json)


class _Line:
    """One record: what and when, of whom, how urgent."""

    def __init__(self, record: JournalRecord) -> None:
        microseconds = number(record, "__REALTIME_TIMESTAMP") or 0
        self.at = datetime.fromtimestamp(microseconds / 1_000_000, UTC)
        self.priority = number(record, "PRIORITY") or 0
        manager = text(record, "UNIT")
        self.unit = manager or text(record, "_SYSTEMD_UNIT") or "-"
        self.by = _SYSTEMD if manager else self.unit.removesuffix(".service")
        said = text(record, "MESSAGE") or ""
        self.message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said)

    def __str__(self) -> str:
        moment = self.at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return f"{moment}  {self.by:<13}  {self.message}"


def _show(found: Iterable[JournalRecord], *, as_json: bool) -> None:
    if as_json:
        for line in _documents(found):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    elif sys.stdout.isatty():
        out = page()
        for each in map(_Line, found):
            out.print(Text(str(each), STYLES.get(each.priority, "")))
    else:
        for each in map(_Line, found):
            tell(str(each))


def _documents(found: Iterable[JournalRecord]) -> Iterator[bytes]:
    for line in map(_Line, found):
        yield json_line(
            {
                "at": line.at,
                "unit": line.unit,
                "by": line.by,
                "priority": line.priority,
                "message": line.message,
            }
        )
