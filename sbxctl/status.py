"""`sbxctl status`: the daemon on one page."""

import click

from sbxctl.exits import Exit
from sbxctl.pool import rate
from sbxctl.report import Line, Tone, print_json, show_lines
from sbxctl.session import run_verb
from sbxctl.units import human_bytes, human_duration
from sbxd.client.admin import AdminClient
from sbxd.wire.observing import Severity, StatusIs

DENIALS_SHOWN = 5


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def status(socket: str, as_json: bool) -> None:
    """Show how the daemon is: what runs, what was denied lately, and what is wrong.

    Exit code 0 when no alert stands, 249 when one does.
    """

    async def verb(admin: AdminClient) -> int:
        found = await admin.status()
        if as_json:
            print_json(found)
        else:
            show_lines(lines(found))
        return Exit.ALERTING if found.alerts else Exit.OK

    run_verb(socket, verb)


def lines(found: StatusIs) -> list[Line]:
    """The page, line by line."""
    return [
        Line(
            "sbxd",
            f"{found.version}, {found.mechanism}, {found.deployment_mode}, auth {found.auth_mode}, "
            f"up {human_duration(found.uptime_ms)}",
        ),
        _host(found),
        Line("sandboxes", _sandboxes(found)),
        Line("pool", _pool(found)),
        Line("provision", _provision(found)),
        _audit(found),
        _journal(found),
        _quarantine(found),
        *_erasing(found),
        *_authorities(found),
        _denials(found),
        Line("egress", f"{found.tunnels} tunnels open"),
        Line("event loop", f"at worst {found.lag_worst_ms} ms late within the last minute"),
        Line("store", _store(found)),
        *_alerts(found),
    ]


def _host(found: StatusIs) -> Line:
    if not found.deviations:
        return Line("host", "enforces everything", Tone.GOOD)
    names = ", ".join(each.name for each in found.deviations)
    return Line("host", f"not as it should be: {names} (sbxctl doctor)", Tone.DOUBTFUL)


def _sandboxes(found: StatusIs) -> str:
    states = ", ".join(f"{count} {state.lower()}" for state, count in sorted(found.states.items()))
    total = sum(found.states.values())
    waiting = f", {found.waiting} requests wait" if found.waiting else ""
    return (
        f"{total} of at most {found.environments_max}"
        + (f": {states}" if states else "")
        + (waiting)
    )


def _pool(found: StatusIs) -> str:
    pool = found.pool
    lately = rate(pool.recent_hits, pool.recent_misses)
    oldest = f", the oldest {human_duration(pool.ages_ms[0])}" if pool.ages_ms else ""
    return f"{pool.ready} of {pool.target} ready{oldest}; hand-outs lately: {lately}"


def _provision(found: StatusIs) -> str:
    if found.provision_p50_ms is None:
        return "none yet"
    p99 = found.provision_p99_ms
    tail = "more than a minute" if p99 is None else f"{p99} ms"
    return f"median below {found.provision_p50_ms} ms, 99 of 100 below {tail}"


def _audit(found: StatusIs) -> Line:
    if found.unrecorded or found.waiting_records:
        told = (
            f"{found.recorded} recorded, {found.waiting_records} wait for the journal, "
            f"{found.unrecorded} attempts not taken"
        )
        return Line("audit", told, Tone.DOUBTFUL)
    return Line("audit", f"{found.recorded} recorded", Tone.GOOD)


def _journal(found: StatusIs) -> Line:
    if found.journal_refusals:
        return Line("journal", f"{found.journal_refusals} records not taken", Tone.DOUBTFUL)
    return Line("journal", "takes every record", Tone.GOOD)


def _quarantine(found: StatusIs) -> Line:
    if not found.quarantined:
        return Line("quarantine", "empty", Tone.GOOD)
    return Line("quarantine", ", ".join(found.quarantined), Tone.BAD)


def _erasing(found: StatusIs) -> list[Line]:
    if not found.erasing_volumes:
        return []
    held = f"{found.erasing_volumes} workspaces of ended sandboxes"
    return [Line("erasing", f"{held}, {human_bytes(found.erasing_bytes)}")]


def _authorities(found: StatusIs) -> list[Line]:
    if not found.authorities:
        return [Line("authority", "none is configured")]
    told = []
    for each in found.authorities:
        if each.recently_missed:
            text, tone = f"did not answer, {each.recently_missed} times lately", Tone.BAD
        else:
            text, tone = "no pass went unanswered lately", Tone.GOOD
        told.append(Line("authority", f"{each.name}: {text}", tone))
    return told


def _denials(found: StatusIs) -> Line:
    minutes = f"within the last {found.recent_seconds / 60:g} minutes"
    if not found.denials:
        return Line("denials", f"none {minutes}")
    total = sum(each.count for each in found.denials)
    shown = ", ".join(
        f"{each.tenant} {each.violation} {each.count}" for each in found.denials[:DENIALS_SHOWN]
    )
    more = ", …" if len(found.denials) > DENIALS_SHOWN else ""
    return Line("denials", f"{total} {minutes}: {shown}{more}", Tone.DOUBTFUL)


def _store(found: StatusIs) -> str:
    if found.store_free_bytes is None or not found.store_size_bytes:
        return "cannot be read"
    share = 100 * found.store_free_bytes / found.store_size_bytes
    size = human_bytes(found.store_size_bytes)
    return f"{human_bytes(found.store_free_bytes)} of {size} free ({share:.0f} %)"


def _alerts(found: StatusIs) -> list[Line]:
    if not found.alerts:
        return [Line("alerts", "none", Tone.GOOD)]
    told = []
    for each in found.alerts:
        tone = Tone.BAD if each.severity is Severity.PAGE else Tone.DOUBTFUL
        told.append(Line("alert", f"{each.name}: {each.detail}", tone))
        told.append(Line("", f"→ {each.fix}"))
    return told
