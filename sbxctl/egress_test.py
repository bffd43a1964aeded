"""`sbxctl egress test`: the conformance suite from inside a sandbox on this host, as a table.

The probes are `sbxd.probes.egress`, and those of the network besides. Each is one command in one
environment that has the operator's destinations; the listed destination that some of them reach is
one of the operator's own list. A probe whose control fails has proven nothing and is no pass.
"""

import json
import secrets

import click
from msgspec import Struct
from rich.table import Table

from sbxctl.exits import Exit
from sbxctl.report import page, print_json, printable
from sbxctl.session import run_verb
from sbxctl.specification import TEST_RUNS, LimitOptions, specification
from sbxctl.units import parse_destination
from sbxd.client.admin import AdminClient
from sbxd.policy.destinations import PORT_MAX, uncovered_ports
from sbxd.port.command import ExecutionCommand, ExecutionResult
from sbxd.port.egress import EgressDestination
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.ids import RunId
from sbxd.probes import network
from sbxd.probes.egress import EGRESS_PROBES
from sbxd.probes.egress_probe import EgressProbe, Need, Target, Yes, program_of
from sbxd.probes.probe import Attempt, Verdict, attempts, verdict
from sbxd.wire.egress import EgressShown

PROBE_SECONDS = 300
OUTPUT_BYTES_MAX = 1024 * 1024
FOUND_CHARACTERS_MAX = 60
# Those of an environment without egress hold with it as well.
PROBES = (*(EgressProbe(each, Need.NOTHING) for each in network.PROBES), *EGRESS_PROBES)
_MARKS = {
    Verdict.OK: "[green]ok[/]",
    Verdict.FAILED: "[red]FAILED[/]",
    Verdict.INCONCLUSIVE: "[yellow]INCONCLUSIVE[/]",
    Verdict.NOT_RUN: "not run",
}


class Row(Struct, frozen=True, kw_only=True):
    """One probe. note: why it was not run, or what kept it from answering; empty otherwise."""

    probe: str
    cases: tuple[str, ...]
    verdict: Verdict
    attempts: tuple[Attempt, ...] = ()
    note: str = ""


@click.command("test")
@click.option("--image", help="An alias of the configuration, or a sha256 digest; with python3.")
@click.option(
    "--destination",
    metavar="HOST:PORT",
    help="The listed destination to reach; without it the first of the list that is no wildcard.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def test(socket: str, image: str | None, destination: str | None, as_json: bool) -> None:
    """Try the egress boundary from inside a sandbox, and compare with what is to come of it.

    A listed destination gets tunnels_max connections and two greetings of TLS. Exit code 0 when
    nothing failed, 248 when a probe failed or proved nothing.
    """
    asked = None if destination is None else _destination(destination)

    async def verb(admin: AdminClient) -> int:
        shown = await admin.egress_show()
        rows = await conformance(admin, target_of(shown, asked), image=image)
        if as_json:
            print_json({"rows": rows})
        else:
            _show(rows)
        wrong = (Verdict.FAILED, Verdict.INCONCLUSIVE)
        failed = any(each.verdict in wrong for each in rows)
        return Exit.EGRESS_NOT_CONFORMING if failed else Exit.OK

    run_verb(socket, verb)


def _destination(value: str) -> EgressDestination:
    host, port = parse_destination(value)
    return EgressDestination(host=host.lower(), ports=(port,))


def target_of(shown: EgressShown, asked: EgressDestination | None = None) -> Target:
    """What of the policy the programs are told.

    Raises click.UsageError: the destination that is asked for is not listed.
    """
    listed = shown.policy.destinations
    if asked is not None and uncovered_ports(asked, listed):
        raise click.UsageError(f"--destination {printable(asked.host)}: not listed with this port")
    named = [each for each in listed if not each.host.startswith("*.")]
    named.sort(key=lambda each: 443 not in each.ports)
    chosen = asked or (named[0] if named else None)
    host = port = unlisted_port = None
    if chosen is not None:
        host = chosen.host
        port = 443 if 443 in chosen.ports else chosen.ports[0]
        others = (each for each in range(1, PORT_MAX + 1) if _is_unlisted(host, each, listed))
        unlisted_port = next(others, None)
    return Target(
        has_proxy=bool(listed),
        host=host,
        port=port,
        unlisted_port=unlisted_port,
        head_seconds=shown.caps.head_seconds,
        tunnels_max=shown.caps.tunnels_max,
    )


def _is_unlisted(host: str, port: int, listed: tuple[EgressDestination, ...]) -> bool:
    return bool(uncovered_ports(EgressDestination(host=host, ports=(port,)), listed))


async def conformance(admin: AdminClient, target: Target, *, image: str | None) -> list[Row]:
    """Every probe in one environment, which is destroyed afterwards."""
    described = await admin.describe()
    wanted = specification(
        described,
        image=image,
        limits=LimitOptions(None, None, None, None, None).over(described.default_limits),
        environment={},
        network=target.has_proxy,
        run_id=RunId(f"{TEST_RUNS}{secrets.token_hex(8)}"),
    )
    handle = await admin.environments.provision(wanted)
    try:
        return [await _row(admin, handle, each, target) for each in PROBES]
    finally:
        await admin.environments.destroy(handle)


async def _row(
    admin: AdminClient, handle: EnvironmentHandle, each: EgressProbe, target: Target
) -> Row:
    probe = each.probe
    if not target.has(each.need):
        note = f"needs {each.need}"
        return Row(probe=probe.id, cases=probe.cases, verdict=Verdict.NOT_RUN, note=note)
    command = ExecutionCommand(
        argv=("python3", "-c", program_of(each, target)),
        working_directory=".",
        timeout_seconds=PROBE_SECONDS,
        stdin=None,
        maximum_output_bytes=OUTPUT_BYTES_MAX,
        network_enabled=each.yes is Yes.BOTH and target.has_proxy,
    )
    return row(each, await admin.environments.execute(handle, command))


def row(each: EgressProbe, result: ExecutionResult) -> Row:
    """What a command that ran a probe comes to; one that did not end by itself proves nothing."""
    probe = each.probe
    if result.exit_code != 0:
        said = result.stderr.decode("utf-8", "replace").splitlines() or ["?"]
        why = result.killed_by or said[-1]
        note = f"the program did not end by itself: {why}"[:FOUND_CHARACTERS_MAX]
        return Row(probe=probe.id, cases=probe.cases, verdict=Verdict.INCONCLUSIVE, note=note)
    try:
        answer = json.loads(result.stdout)
    except ValueError:
        answer = None
    judged = attempts(probe, answer)
    return Row(probe=probe.id, cases=probe.cases, verdict=verdict(judged), attempts=judged)


# --- the table --------------------------------------------------------------------------------


def _show(rows: list[Row]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("PROBE", "ATTEMPT", "EXPECTED", "FOUND", ""):
        table.add_column(heading, no_wrap=True)
    for each in rows:
        wrong = [one for one in each.attempts if not one.is_right]
        total = f"{len(each.attempts)} attempts" if each.attempts else printable(each.note)
        table.add_row(each.probe, total, "", "", _MARKS[each.verdict])
        for one in wrong:
            name = f"control: {one.name}" if one.is_control else one.name
            found = "nothing" if one.found is None else one.found[:FOUND_CHARACTERS_MAX]
            expected = " or ".join(one.expected) or "nothing"
            table.add_row("", printable(name), expected, printable(found), "[red]not so[/]")
    page().print(table)
    counts = {each: sum(row.verdict is each for row in rows) for each in Verdict}
    page().print(
        f"{counts[Verdict.OK]} ok, {counts[Verdict.FAILED]} failed, "
        f"{counts[Verdict.INCONCLUSIVE]} inconclusive, {counts[Verdict.NOT_RUN]} not run"
    )
