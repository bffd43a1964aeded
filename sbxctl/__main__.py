"""The operator's command line. One verb per function; everything goes over the admin socket, but
`image build`, `doctor` without a daemon and `seccomp dump`, which look at this host."""

import os
import sys

import click

from sbxctl import (
    doctor,
    egress,
    environments,
    image,
    metrics,
    pool,
    quarantine,
    reap,
    reconcile,
    run,
    seccomp,
    status,
    top,
)
from sbxctl.exits import Exit

DEFAULT_SOCKET = "/run/sbxd/admin.sock"


@click.group()
@click.option("--socket", default=DEFAULT_SOCKET, show_default=True, help="The admin socket.")
@click.option("--no-color", is_flag=True, help="No colours, as with NO_COLOR in the environment.")
@click.version_option(package_name="sbxd", prog_name="sbxctl")
@click.pass_context
def cli(ctx: click.Context, socket: str, no_color: bool) -> None:
    """Operate sbxd: run, ls, exec, destroy, image, egress, status, top, metrics, doctor…"""
    ctx.obj = socket
    if no_color:
        os.environ["NO_COLOR"] = "1"  # what the library of the reports reads


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
cli.add_command(status.status)
cli.add_command(top.top)
cli.add_command(pool.pool)
cli.add_command(metrics.metrics)


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
