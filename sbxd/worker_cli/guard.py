"""`sbxd-worker guard`: whether a worker's outbound guard would dial a destination.

Invariants: the guard is the one that a worker gets by `operator_guard` with the same file; nothing
is dialled.
"""

import re
from pathlib import Path

import click

from sbxd.client.guard import EgressDenied
from sbxd.client.operator_guard import OperatorPolicyUnreadable, operator_guard
from sbxd.worker_cli.exits import Exit

_TARGET = re.compile(r"([^:]{1,253}):([1-9][0-9]{0,4})", re.ASCII)


@click.command()
@click.argument("target", metavar="HOST:PORT")
@click.pass_context
def guard(ctx: click.Context, target: str) -> None:
    """Say whether a worker of this host may reach HOST:PORT.

    The answer follows the table [egress] of the worker tier's configuration, the addresses of the
    name and the routes of this host as they are now. Exits with 0 when it may, with 247 when it may
    not. Nothing is dialled.
    """
    config: Path = ctx.obj
    found = _TARGET.fullmatch(target)
    if found is None:
        raise click.UsageError(f"{target!a} is not HOST:PORT: a name, and a port from 1 to 65535")
    try:
        allowed = operator_guard(config).check_blocking(found[1], int(found[2]))
    except OperatorPolicyUnreadable as problem:
        raise click.UsageError(str(problem)) from None
    except EgressDenied as denied:
        click.echo(f"refused: {denied}")
        ctx.exit(Exit.EGRESS_REFUSED)
    click.echo(f"allowed by {allowed.rule}: {', '.join(allowed.addresses)}")
