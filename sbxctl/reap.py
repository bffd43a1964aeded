"""`sbxctl reap`: one pass over leases and quarantine. The timer `sbxd-reap.timer` runs it."""

import click

from sbxctl.exits import Exit
from sbxctl.report import print_json, printable, tell
from sbxctl.session import run_verb
from sbxd.client.admin import AdminClient


@click.command("reap")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def reap(socket: str, as_json: bool) -> None:
    """Ask the lease authorities, and end every environment whose lease nobody holds; then try
    again what is quarantined."""

    async def verb(admin: AdminClient) -> int:
        reaped = await admin.reap()
        if as_json:
            print_json(reaped)
            return Exit.OK
        tell(
            f"{reaped.asked} environments asked about, {len(reaped.stale)} stale and ended, "
            f"{reaped.unknown} unknown"
        )
        for each in reaped.stale:
            tell(f"{printable(each)} ended")
        for each in reaped.released:
            tell(f"{printable(each)} proven gone, and out of the quarantine")
        for name in reaped.unanswered:
            tell(
                f"sbxctl: the lease authority {printable(name)} does not answer; nothing was "
                "ended on its account",
                err=True,
            )
        return Exit.OK

    run_verb(socket, verb)
