"""`sbxctl ls`, `inspect` and `destroy`."""

import click

from sbxctl.exits import Exit
from sbxctl.naming import find
from sbxctl.report import print_json, printable, show_environment, show_environments, tell
from sbxctl.session import run_verb
from sbxctl.units import EnvironmentName
from sbxd.client.admin import AdminClient
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import ExecutionRejected, RejectedCode


@click.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def ls(socket: str, as_json: bool) -> None:
    """List the live environments, oldest first."""

    async def verb(admin: AdminClient) -> int:
        found = await admin.list()
        if as_json:
            print_json(found)
        else:
            show_environments(found)
        return Exit.OK

    run_verb(socket, verb)


@click.command("inspect")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("environment_id", type=EnvironmentName())
@click.pass_obj
def inspect(socket: str, as_json: bool, environment_id: str) -> None:
    """Show one live environment: whose it is, its limits, what it is running."""

    async def verb(admin: AdminClient) -> int:
        info = await find(admin, environment_id)
        if as_json:
            print_json(info)
        else:
            show_environment(info)
        return Exit.OK

    run_verb(socket, verb)


@click.command("destroy")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("environment_ids", nargs=-1, required=True, type=EnvironmentName())
@click.pass_obj
def destroy(socket: str, as_json: bool, environment_ids: tuple[str, ...]) -> None:
    """End environments and erase their workspaces. One that is gone already is no error."""

    async def verb(admin: AdminClient) -> int:
        outcome: dict[str, str] = {}
        found: dict[str, EnvironmentHandle | None] = {}
        for each in environment_ids:  # all of them are found before the first is ended
            try:
                found[each] = (await find(admin, each)).handle
            except ExecutionRejected as error:
                if error.code is not RejectedCode.ENVIRONMENT_GONE:
                    raise
                found[each] = None
        for each, handle in found.items():
            if handle is None:
                outcome[each] = "gone"
                continue
            await admin.environments.destroy(handle)
            outcome[handle.environment_id] = "destroyed"
        if as_json:
            print_json(outcome)
        else:
            for each, what in outcome.items():
                tell(f"{printable(each)} {what}")
        return Exit.OK

    run_verb(socket, verb)
