"""The worker tier's command line. It runs as the worker's user, never as the daemon's or root:
the artifact store refuses a folder of another user."""

import sys
from pathlib import Path

import click

from sbxd.worker_cli.artifacts import artifacts
from sbxd.worker_cli.config import DEFAULT_CONFIG
from sbxd.worker_cli.exits import Exit
from sbxd.worker_cli.guard import guard
from sbxd.worker_cli.leases import fence, leases
from sbxd.worker_cli.mcp import mcp


@click.group()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=DEFAULT_CONFIG,
    show_default=True,
    help="The configuration of the worker tier.",
)
@click.version_option(package_name="sbxd", prog_name="sbxd-worker")
@click.pass_context
def cli(ctx: click.Context, config: Path) -> None:
    """Run the parts of a worker tier that no agent runtime runs: the artifact store's sweep, the
    lease authority, an MCP server that gives any client a sandbox, and a check of what the outbound
    guard permits."""
    ctx.obj = config


cli.add_command(artifacts)
cli.add_command(mcp)
cli.add_command(leases)
cli.add_command(fence)
cli.add_command(guard)


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
