"""The operator's command line. One verb per function; everything goes over the admin socket, but
`image build`, `doctor` without a daemon and `seccomp dump`, which look at this host, and `audit`
and `logs`, which read its journal."""

import sys

import click

from sbxctl import (
    audit,
    doctor,
    egress,
    environments,
    image,
    logs,
    quarantine,
    reap,
    reconcile,
    run,
    seccomp,
)
from sbxctl.exits import Exit

DEFAULT_SOCKET = "/run/sbxd/admin.sock"


@click.group()
@click.option("--socket", default=DEFAULT_SOCKET, show_default=True, help="The admin socket.")
@click.version_option(package_name="sbxd", prog_name="sbxctl")
@click.pass_context
def cli(ctx: click.Context, socket: str) -> None:
    """Operate sbxd: run, ls, inspect, exec, destroy, image, egress, reap, quarantine, doctor…"""
    ctx.obj = socket


cli.add_command(run.run)
cli.add_command(run.execute)
cli.add_command(environments.ls)
cli.add_command(environments.inspect)
cli.add_command(environments.destroy)
cli.add_command(image.image)
cli.add_command(reap.reap)
cli.add_command(reconcile.reconcile)
cli.add_command(quarantine.quarantine)
cli.add_command(seccomp.seccomp)
cli.add_command(egress.egress)
cli.add_command(doctor.doctor)
cli.add_command(audit.audit)
cli.add_command(logs.logs)


def main() -> None:
    """Run the command line; a wrong one exits with 245."""
    try:
        cli.main(standalone_mode=False)
    except click.UsageError as error:
        error.show()
        sys.exit(Exit.USAGE)
    except click.ClickException as error:
        error.show()
        sys.exit(Exit.UNAVAILABLE)
    except click.Abort:
        sys.exit(Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
