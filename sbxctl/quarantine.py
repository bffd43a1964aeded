"""`sbxctl quarantine ls` and `sbxctl quarantine clear`."""

import click

from sbxctl.exits import Exit
from sbxctl.report import print_json, printable, tell
from sbxctl.session import fail, run_verb
from sbxd.client.admin import AdminClient
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.wire.repair import ClearingWord


@click.group("quarantine")
def quarantine() -> None:
    """What could not be proven stopped: show it, and release it."""


@quarantine.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def ls(socket: str, as_json: bool) -> None:
    """List it, with what the kernel holds of each now."""

    async def verb(admin: AdminClient) -> int:
        items = await admin.quarantine()
        if as_json:
            print_json(items)
        elif not items:
            tell("nothing is quarantined")
        else:
            for item in items:
                kinds = printable(", ".join(item.kinds)) or "nothing is left"
                tell(f"{printable(item.name)}  {kinds}")
        return Exit.OK

    run_verb(socket, verb)


@quarantine.command("clear")
@click.option(
    "--without-proof",
    is_flag=True,
    help="Release it although not everything can be proven gone. Its uids stay taken.",
)
@click.argument("name")
@click.pass_obj
def clear(socket: str, without_proof: bool, name: str) -> None:
    """Show what is there, try once more to remove it, and release NAME when it is proven gone."""
    word = ClearingWord.OPERATOR_WORD if without_proof else ClearingWord.ONLY_WITH_PROOF

    async def verb(admin: AdminClient) -> int:
        kinds = next((i.kinds for i in await admin.quarantine() if i.name == name), None)
        if kinds is None:
            return fail(
                Exit.REJECTED,
                "nothing of that name is quarantined",
                hint="`sbxctl quarantine ls` lists what is",
            )
        held = printable(", ".join(kinds)) or "nothing that can be seen"
        tell(f"{printable(name)} holds: {held}")
        try:
            proof = await admin.clear_quarantine(name, word)
        except ExecutionUnavailable as error:
            if error.code is not UnavailableCode.SETUP_FAILED:
                raise
            return fail(
                Exit.HOST_DEGRADED,
                error.detail,
                hint="remove what holds it; `--without-proof` releases it on your word",
            )
        tell(f"{printable(name)} cleared: {printable(proof)}")
        return Exit.OK

    run_verb(socket, verb)
