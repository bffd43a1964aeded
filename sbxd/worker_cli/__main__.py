"""The worker tier's command line: one verb per module. Nothing here speaks to the kernel or to the
admin socket; the operator's command line is `sbxctl`."""

import click

from sbxd.worker_cli import leases


@click.group()
@click.version_option(package_name="sbxd", prog_name="sbxd-worker")
def cli() -> None:
    """Serve and operate what belongs to the worker's side."""


cli.add_command(leases.leases)
cli.add_command(leases.fence)


def main() -> None:
    """Run the command line."""
    cli()


if __name__ == "__main__":
    main()
