"""`sbxctl audit`: what the service decided, from the journal; and the proof that nothing of it is
missing. Reads the journal alone: it works without the daemon, and changes nothing.
"""

import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path

import click
import msgspec
from rich.text import Text

from sbxctl import journal
from sbxctl.audit_record import AuditRecord, audit_records, has_reason
from sbxctl.audit_verify import FIELDS, Finding, Verification, Verifier
from sbxctl.exits import Exit
from sbxctl.journal import JournalRecord, Query
from sbxctl.report import json_line, page, print_json, printable, tell
from sbxctl.session import fail
from sbxctl.stream import endless
from sbxctl.units import LINES_MAX, Whole
from sbxctl.untrusted import OwnedFolder
from sbxctl.when import When
from sbxd.audit.position import Position, parse_position
from sbxd.audit.sink import AuditUnavailable
from sbxd.audit.vocabulary import EVENT_TYPES
from sbxd.port.ids import IDENTIFIER_PATTERN
from sbxd.settings import Settings

EVENTS = sorted(kind.__name__ for kind in EVENT_TYPES)
FOLLOWED = 10
SHOWN_MAX = 50
# More than a position has, so that a longer one is seen to be none.
POSITION_BYTES_MAX = 256
_ID = re.compile(IDENTIFIER_PATTERN)
# syslog's priorities: alert, error, warning, notice.
STYLES = {1: "bold white on red", 3: "red", 4: "yellow", 5: "bold"}


class Identifier(click.ParamType[str]):
    """A tenant's, a run's or an environment's id, as the service takes them."""

    name = "id"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        if not _ID.match(str(value)):
            self.fail(f"{value!a} is no id", param, ctx)
        return str(value)


@click.group("audit", invoke_without_command=True)
@click.option("--tenant", type=Identifier(), help="Only of this tenant.")
@click.option("--run", type=Identifier(), help="Only of this run.")
@click.option("--environment", type=Identifier(), help="Only of this environment.")
@click.option(
    "--event",
    "events",
    type=click.Choice(EVENTS, case_sensitive=False),
    multiple=True,
    metavar="NAME",
    help="Only this type of event; again for more. docs/audit.md lists them.",
)
@click.option("--reason", help="Only with this reason, code, violation or kill, as MEMORY.")
@click.option("--since", type=When(), help="Decided since then: 15m, today, 2026-03-01T14:00.")
@click.option("--until", type=When(), help="Decided until then.")
@click.option("-n", "--lines", type=Whole(0, LINES_MAX), help="Only so many of the newest.")
@click.option("-f", "--follow", is_flag=True, help="Show the newest, then what comes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document a line (docs/audit.md).")
@click.option("--unit", default=journal.UNIT, hidden=True)
@click.pass_context
def audit(
    ctx: click.Context,
    tenant: str | None,
    run: str | None,
    environment: str | None,
    events: tuple[str, ...],
    reason: str | None,
    since: datetime | None,
    until: datetime | None,
    lines: int | None,
    follow: bool,
    as_json: bool,
    unit: str,
) -> None:
    """Show what the service decided: who was let in, what was started, denied, killed, destroyed.

    \b
    sbxctl audit --since 1h --tenant acme
    sbxctl audit -f --event EgressRefused --event PeerRefused
    sbxctl audit --reason MEMORY --json > killed-for-memory.jsonl
    sbxctl audit verify
    """
    if ctx.invoked_subcommand is not None:
        return
    pairs = (("SBX_TENANT_ID", tenant), ("SBX_RUN_ID", run), ("SBX_ENVIRONMENT_ID", environment))
    matches = [journal.unit(unit)]
    matches += [f"{name}={value}" for name, value in pairs if value is not None]
    matches += [f"SBX_EVENT={name}" for name in events]
    query = Query(
        matches=tuple(matches),
        since=journal.instant(since),
        follow=follow,
    )
    if not journal.require_readable(journal.unit(unit)):
        tell("sbxctl: the service has recorded nothing", err=True)
    if follow and lines is None and since is None:
        lines = FOLLOWED
    if follow and lines is not None:
        query = msgspec.structs.replace(query, newest=lines)

    def wanted(found: Iterable[JournalRecord]) -> Iterator[JournalRecord]:
        return (each for each in found if reason is None or has_reason(each, reason))

    with closing(journal.records(query.argv())) as found:
        chosen: Iterable[AuditRecord] = (
            record
            for record in audit_records(wanted(found))
            if (since is None or record.decided_at >= since)
            and (until is None or record.decided_at <= until)
        )
        if lines is not None and not follow:
            chosen = deque(chosen, maxlen=lines)
        _show(chosen, _json_line if as_json else _shown())


def _show(records: Iterable[AuditRecord], write: Callable[[AuditRecord], None]) -> None:
    with endless():
        for record in records:
            write(record)


def _json_line(record: AuditRecord) -> None:
    sys.stdout.buffer.write(json_line(record))
    sys.stdout.buffer.flush()


def _shown() -> Callable[[AuditRecord], None]:
    """One line for each, for people; coloured by priority on a terminal."""
    if not sys.stdout.isatty():
        return lambda record: tell(_line(record))
    out = page()
    return lambda record: out.print(Text(_line(record), STYLES.get(record.priority, "")))


def _line(record: AuditRecord) -> str:
    moment = record.decided_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    number = "-" if record.sequence is None else str(record.sequence)
    event, message = (
        "".join(c if c.isprintable() else ascii(c)[1:-1] for c in each)
        for each in (record.event, record.message)
    )
    return f"{moment}  {number:>6}  {event:<26}  {message}"


# --- the proof ----------------------------------------------------------------------------------


@audit.command("verify")
@click.option("--since", type=When(), help="Only what was recorded since then.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--state-directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(Settings().state_directory),
    show_default=True,
    help="The service's; says how far the sequence must have come. Needs root.",
)
@click.option("--unit", default=journal.UNIT, hidden=True)
def verify(since: datetime | None, as_json: bool, state_directory: Path, unit: str) -> None:
    """Prove that no record is missing, given twice or out of its turn.

    Records are numbered from 1 in each boot, over restarts of the service. Exits with 250 when a
    number is missing, came late or stands for two decisions, and names each; with 251 when none
    is, but the journal keeps older records no more.
    """
    is_there = journal.require_readable(journal.unit(unit))
    end = _known_end(state_directory)
    journal.synchronize()
    whole = since is None or not (is_there and _is_kept_before(since, unit))
    verifier = Verifier(since_the_beginning=whole)
    if is_there:
        query = Query(
            matches=(journal.unit(unit),),
            since=journal.instant(since),
            only=FIELDS,
        )
        with closing(journal.records(query.argv())) as found:
            for record in found:
                verifier.take(record)
    if isinstance(end, Position):
        verifier.require(end.boot_id, end.sequence)
    verdict = verifier.result()
    if as_json:
        print_json({**msgspec.structs.asdict(verdict), "end": _described(end)})
    else:
        _report(verdict, end)
    if not verdict.sound:
        sys.exit(Exit.AUDIT_INCOMPLETE)
    sys.exit(Exit.OK if verdict.complete else Exit.AUDIT_NOT_KEPT)


def _is_kept_before(since: datetime, unit: str) -> bool:
    """Whether the journal has an older record, so that everything since then is kept."""
    query = Query(
        matches=(journal.unit(unit), *(f"SBX_EVENT={name}" for name in EVENTS)),
        until=journal.instant(since),
        newest=1,
        only=FIELDS,
    )
    with closing(journal.records(query.argv())) as found:
        return any(True for _ in found)


def _known_end(state_directory: Path) -> Position | str:
    """How far the sequence has come, by the service's own book; or why that is not known."""
    directory = state_directory / "audit"
    try:
        with OwnedFolder(directory) as folder:
            position = parse_position(folder.read("position", at_most=POSITION_BYTES_MAX))
            waiting = folder.size("spool")
    except AuditUnavailable as problem:
        return f"the end is not proven: {problem}"
    except OSError as problem:
        return f"the end is not proven: {problem.strerror} ({directory})"
    if position is None:
        return "the end is not proven: the service has recorded nothing yet"
    if waiting > position.replayed_bytes:
        return "the end is not proven: records wait in the service's spool for the journal"
    return position


def _described(end: Position | str) -> dict[str, object]:
    if isinstance(end, Position):
        return {"proven": True, "boot_id": end.boot_id, "sequence": end.sequence}
    return {"proven": False, "detail": end}


def _report(verdict: Verification, end: Position | str) -> None:
    for boot in verdict.boots:
        starts = len(boot.instances)
        tell(
            f"boot {printable(boot.boot_id)}: {boot.first} to {boot.last}, "
            f"{boot.records} records, {starts} {'start' if starts == 1 else 'starts'}"
        )
    _list("note", verdict.notes)
    if isinstance(end, str):
        tell(f"note: {end}")
    _list("finding", verdict.findings)
    if verdict.complete:
        tell(f"sound: {verdict.records} records, none is missing")
        return
    if verdict.sound:
        fail(
            Exit.AUDIT_NOT_KEPT,
            f"sound as far as it is kept: {verdict.records} records, none is missing between "
            "them; the journal keeps older ones no more",
            hint="docs/audit.md says how to keep more and how to forward the records",
        )
        return
    fail(
        Exit.AUDIT_INCOMPLETE,
        f"not sound: {len(verdict.findings) + verdict.findings_omitted} findings in "
        f"{verdict.records} records",
        hint="docs/audit.md says what each means and how it comes about",
    )


def _list(word: str, found: tuple[Finding, ...]) -> None:
    for each in found[:SHOWN_MAX]:
        tell(f"{word}: {printable(str(each))}")
    if len(found) > SHOWN_MAX:
        tell(f"{word}: … and {len(found) - SHOWN_MAX} more: --json")
