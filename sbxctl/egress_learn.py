"""`sbxctl egress learn`: what refused runs would have needed, from the audit; lets nothing through.

The records are the journal's: they outlive the daemon, and it keeps none. Only what the daemon's
unit wrote counts (`_SYSTEMD_UNIT`, a field that no sender can set). What is listed already is the
daemon's to say.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime

import click
import msgspec

from sbxctl.exits import Exit
from sbxctl.journal import (
    UNIT,
    WHO_MAY,
    JournalRecord,
    JournalUnreadable,
    Query,
    instant,
    records,
    unit,
)
from sbxctl.lesson import Denial, Lesson, as_toml, lesson
from sbxctl.report import print_json, printable, tell
from sbxctl.session import fail, run_verb
from sbxctl.specification import OPERATOR_TENANT, TEST_RUNS
from sbxctl.when import When
from sbxd.client.admin import AdminClient
from sbxd.port.ids import IDENTIFIER_PATTERN

RECORDS_MAX = 100_000
SINCE = "24h"
SHOWN_MAX = 20
_RUN = re.compile(IDENTIFIER_PATTERN)


@click.command("learn")
@click.option("--run", "run_id", help="Only this run.")
@click.option("--since", type=When(), help=f"Since then, as 2h or today; {SINCE} without --run.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def learn(socket: str, run_id: str | None, since: datetime | None, as_json: bool) -> None:
    """List the smallest allowlist that refused runs would have needed, as TOML for [egress].

    Reads the journal; changes nothing and lets nothing through. Judge each name: a program
    chose it.
    """
    if run_id is not None and not _RUN.match(run_id):
        raise click.UsageError(f"--run {printable(run_id)}: no id of a run")
    if since is None and run_id is None:
        since = When().convert(SINCE, None, None)

    # Before there is a connection, whose heartbeat would wait for it.
    records = [
        record
        for record in journal(run_id=run_id, since=instant(since))
        if run_id is not None or not of_a_test(record)
    ]

    async def verb(admin: AdminClient) -> int:
        configured = (await admin.egress_show()).policy.destinations
        learned = lesson(
            denials(records),
            configured,
            not_recorded=counted(records),
        )
        if as_json:
            toml = as_toml(learned, configured)
            print_json({**msgspec.structs.asdict(learned), "toml": toml})
        else:
            tell(as_toml(learned, configured), nl=False)
            _remark(learned)
        if len(records) >= RECORDS_MAX:
            fail(Exit.OK, f"only the first {RECORDS_MAX} records were read", hint="narrow --since")
        return Exit.OK

    run_verb(socket, verb)


def _remark(learned: Lesson) -> None:
    """What else was found, on stderr."""
    if not learned.suggestions:
        tell("sbxctl: nothing was refused that a longer list would have allowed", err=True)
    for each in learned.listed[:SHOWN_MAX]:
        where = f"{each.host}:{','.join(map(str, each.ports))}"
        tell(f"sbxctl: listed already, not in the run's specification: {where}", err=True)
    for one in learned.never[:SHOWN_MAX]:
        where = f"{one.host or '?'}:{one.port or '?'}"
        what = f"never suggested: {where} ({one.reason}, {one.asked} times)"
        tell(f"sbxctl: {printable(what)}", err=True)
    if len(learned.never) > SHOWN_MAX:
        tell(f"sbxctl: … and {len(learned.never) - SHOWN_MAX} more: --json", err=True)
    if learned.not_recorded:
        tell(
            f"sbxctl: {learned.not_recorded} more refusals came too fast to be recorded one by "
            "one; what they asked for is not known",
            err=True,
        )


# --- the journal --------------------------------------------------------------------------------

REFUSALS = ("SBX_EVENT=EgressRefused", "SBX_EVENT=EgressRefusalsCounted")


def journal(*, run_id: str | None, since: str | None) -> list[JournalRecord]:
    """The records of refusals, oldest first, at most RECORDS_MAX.

    Raises JournalUnreadable: also when nothing of the daemon is to be seen, since whoever may not
    read the system's journal is shown an empty one.
    """
    matches = REFUSALS if run_id is None else (*REFUSALS, f"SBX_RUN_ID={run_id}")
    query = Query(matches=(unit(), *matches), since=since)
    found = list(records(query.argv(), at_most=RECORDS_MAX))
    if not found and not list(records(Query(matches=(unit(),), newest=1).argv())):
        raise JournalUnreadable(f"the journal shows nothing of {UNIT}: {WHO_MAY}")
    return found


def of_a_test(record: dict[str, object]) -> bool:
    """Whether it is of a run of `sbxctl egress test`, which is refused on purpose."""
    run_id = _text(record, "SBX_RUN_ID") or ""
    return _text(record, "SBX_TENANT_ID") == OPERATOR_TENANT and run_id.startswith(TEST_RUNS)


def denials(records: Iterable[dict[str, object]]) -> Iterator[Denial]:
    """The refusals that were recorded one by one."""
    for record in records:
        run_id, reason = _text(record, "SBX_RUN_ID"), _text(record, "SBX_REASON")
        port = _text(record, "SBX_PORT")
        if record.get("SBX_EVENT") == "EgressRefused" and reason is not None and run_id is not None:
            yield Denial(
                reason=reason,
                host=_text(record, "SBX_HOST"),
                port=int(port) if port and port.isascii() and port.isdigit() else None,
                run_id=run_id,
            )


def counted(records: Iterable[dict[str, object]]) -> int:
    """How many refusals were only counted."""
    totals = (
        _text(record, "SBX_TOTAL")
        for record in records
        if record.get("SBX_EVENT") == "EgressRefusalsCounted"
    )
    return sum(int(total) for total in totals if total and total.isascii() and total.isdigit())


def _text(record: dict[str, object], name: str) -> str | None:
    """A field of one value; what is not text is none of the daemon's."""
    value = record.get(name)
    return value if isinstance(value, str) else None
