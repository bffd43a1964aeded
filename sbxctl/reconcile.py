"""`sbxctl reconcile`: journal against kernel, now."""

import click

from sbxctl.exits import Exit
from sbxctl.report import print_json, printable, tell
from sbxctl.session import run_verb
from sbxd.client.admin import AdminClient


@click.command("reconcile")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def reconcile(socket: str, as_json: bool) -> None:
    """Destroy what nobody owns; what cannot be proven gone is quarantined, and released when it
    can.

    Exits with 246 when something is in the quarantine now.
    """

    async def verb(admin: AdminClient) -> int:
        report = await admin.reconcile()
        held = await admin.quarantine()
        if as_json:
            print_json(
                {
                    "destroyed": report.destroyed,
                    "released": report.released,
                    "quarantined": [i.name for i in held],
                }
            )
        else:
            for each in report.destroyed:
                tell(f"{printable(each)} destroyed")
            for each in report.released:
                tell(f"{printable(each)} proven gone, and out of the quarantine")
            for item in held:
                tell(
                    f"{printable(item.name)} quarantined: {printable(', '.join(item.kinds)) or '-'}"
                )
            if not report.destroyed and not report.released and not held:
                tell("nothing to repair")
        return Exit.HOST_DEGRADED if held else Exit.OK

    run_verb(socket, verb)
