"""`sbxctl egress`: what is configured, how a destination would be judged, whether the proxy
conforms, and which destinations refused runs would have needed.

Nothing here lets anything through: the list is in the daemon's configuration, and the daemon reads
it when it starts. The daemon judges (`check`), since its resolver and its view of the host's
network are what a connection meets.
"""

import click
from rich.table import Table

from sbxctl import egress_learn, egress_test
from sbxctl.advice import ADVICE
from sbxctl.exits import Exit
from sbxctl.report import add_row, page, print_json, printable
from sbxctl.session import run_verb
from sbxctl.units import parse_destination
from sbxd.client.admin import AdminClient
from sbxd.policy.egress import EgressRefusal
from sbxd.wire.egress import EgressChecked, EgressShown

# What is judged, in order, and the reasons for which each refuses.
_STEPS: tuple[tuple[str, frozenset[EgressRefusal]], ...] = (
    ("the host is a plain name", frozenset({EgressRefusal.HOST_MALFORMED})),
    ("the port is one", frozenset({EgressRefusal.PORT_MALFORMED})),
    (
        "a destination covers it",
        frozenset(
            {
                EgressRefusal.MODE_DENY,
                EgressRefusal.HOST_NOT_LISTED,
                EgressRefusal.PORT_NOT_LISTED,
                EgressRefusal.HOST_NOT_QUALIFIED,
            }
        ),
    ),
    (
        "one lookup gives addresses",
        frozenset(
            {
                EgressRefusal.RESOLUTION_FAILED,
                EgressRefusal.RESOLUTION_TIMED_OUT,
                EgressRefusal.NO_ADDRESS,
                EgressRefusal.TOO_MANY_ADDRESSES,
            }
        ),
    ),
    (
        "every address may be dialled",
        frozenset(
            {
                EgressRefusal.ADDRESS_MALFORMED,
                EgressRefusal.ADDRESS_REFUSED,
                EgressRefusal.HOST_NETWORK,
                EgressRefusal.HOST_NETWORK_UNKNOWN,
            }
        ),
    ),
)


@click.group("egress")
def egress() -> None:
    """The egress boundary: show, check, test, learn."""


# --- show -------------------------------------------------------------------------------------


@egress.command("show")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def show(socket: str, as_json: bool) -> None:
    """Show the configured destinations, the caps and the host's own network."""

    async def verb(admin: AdminClient) -> int:
        shown = await admin.egress_show()
        if as_json:
            print_json(shown)
        else:
            _show(shown)
        return Exit.OK

    run_verb(socket, verb)


def _show(shown: EgressShown) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    add_row(table, "mode", shown.policy.mode.value)
    for destination in shown.policy.destinations:
        add_row(table, "destination", f"{destination.host}:{_ports(destination.ports)}")
    for name in shown.caps.__struct_fields__:
        value = getattr(shown.caps, name)
        add_row(table, name, str(value).lower() if isinstance(value, bool) else str(value))
    for prefix in shown.host_network:
        add_row(table, "never dialled", prefix)
    add_row(table, "allowed", str(shown.allowed))
    for reason, count in sorted(shown.refused.items()):
        add_row(table, f"refused: {reason}", str(count))
    page().print(table)


def _ports(ports: tuple[int, ...]) -> str:
    return ",".join(map(str, ports))


# --- check ------------------------------------------------------------------------------------


@egress.command("check")
@click.option("--explain", is_flag=True, help="Each step of the judgement.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("destination", metavar="HOST:PORT")
@click.pass_obj
def check(socket: str, explain: bool, as_json: bool, destination: str) -> None:
    """Say how the daemon would judge a connection to HOST:PORT now. Nothing is dialled.

    Exit code 0 when it would be allowed, 247 when it would be refused.
    """
    host, port = parse_destination(destination)

    async def verb(admin: AdminClient) -> int:
        checked = await admin.egress_check(host, port)
        if as_json:
            print_json({**_document(checked), "steps": dict(steps(checked))})
        else:
            _show_check(checked)
            if explain:
                _show_steps(checked)
        return Exit.OK if checked.reason is None else Exit.EGRESS_REFUSED

    run_verb(socket, verb)


def steps(checked: EgressChecked) -> list[tuple[str, str]]:
    """Each step of the judgement: "ok", "refused" or "not reached"."""
    shown: list[tuple[str, str]] = []
    outcome = "ok"
    for name, reasons in _STEPS:
        if outcome == "refused":
            outcome = "not reached"
        elif outcome == "ok" and checked.reason in reasons:
            outcome = "refused"
        shown.append((name, outcome))
    return shown


def _document(checked: EgressChecked) -> dict[str, object]:
    """The reply without what is the protocol's, with the operator's remedy."""
    fields = {
        name: getattr(checked, name)
        for name in checked.__struct_fields__
        if name not in ("request_id", "remedy")
    }
    return {
        "allowed": checked.reason is None,
        **fields,
        "remedy": _remedy(checked),
    }


def _remedy(checked: EgressChecked) -> str:
    return "" if checked.reason is None else ADVICE[checked.reason].remedy


def _show_check(checked: EgressChecked) -> None:
    out = page()
    where = printable(f"{checked.host}:{checked.port}")
    if checked.reason is None:
        out.print(f"{where}  [green]allowed[/]")
    else:
        out.print(f"{where}  [red]refused[/]: {printable(checked.reason)}")
    for name, value in (
        ("rule", checked.rule),
        ("addresses", ", ".join(checked.addresses)),
        ("refused address", checked.address),
        ("range", checked.address_range),
        ("why", checked.detail),
        ("remedy", _remedy(checked)),
    ):
        if value:
            out.print(f"  {name + ':':17}{printable(value)}")


def _show_steps(checked: EgressChecked) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for number, (name, outcome) in enumerate(steps(checked), start=1):
        add_row(table, f"{number}.", name, outcome)
    page().print(table)


egress.add_command(egress_test.test)
egress.add_command(egress_learn.learn)
