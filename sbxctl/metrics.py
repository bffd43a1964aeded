"""`sbxctl metrics`: every metric of the daemon, as text or as a file for node_exporter."""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import click

from sbxctl.exits import Exit
from sbxctl.report import tell
from sbxctl.service_state import has_ended
from sbxctl.session import fail, run_verb
from sbxd.client.admin import AdminClient
from sbxd.wire.observing import MetricsForm

FILE_MODE = 0o644
# What a file says of a daemon that does not answer: old numbers would be worse than none.
DOWN = """\
# TYPE sbxd_up gauge
# HELP sbxd_up 1 when the daemon answered.
sbxd_up 0
"""


@click.command("metrics")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option(
    "--format",
    "form",
    type=click.Choice([MetricsForm.OPENMETRICS.value, MetricsForm.PROMETHEUS.value]),
    default=MetricsForm.OPENMETRICS.value,
    show_default=True,
    help="OpenMetrics 1.0, or the text format 0.0.4 of Prometheus.",
)
@click.option(
    "--textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the text format to this file instead, for node_exporter. It is replaced whole; "
    "when the daemon does not answer it says `sbxd_up 0` and nothing else.",
)
@click.option(
    "--no-start",
    is_flag=True,
    help="With --textfile: do not ask a daemon that was stopped, or refused to start, since the "
    "file was written: the question would start it.",
)
@click.pass_obj
def metrics(socket: str, as_json: bool, form: str, textfile: Path | None, no_start: bool) -> None:
    """Show every metric of the daemon."""
    if as_json and textfile is not None:
        raise click.UsageError("--textfile has a format of its own: leave --json out")
    wanted = MetricsForm.JSON if as_json else MetricsForm(form)

    async def verb(admin: AdminClient) -> int:
        tell(await admin.metrics(wanted), nl=False)
        return Exit.OK

    if no_start and textfile is None:
        raise click.UsageError("--no-start is for --textfile, which tells when it was asked last")
    if no_start and textfile is not None and has_ended(Path(socket), textfile):
        _down(textfile)
        sys.exit(
            fail(
                Exit.UNAVAILABLE,
                "the service has ended, and this does not start it",
                hint="systemctl start sbxd; where that fails, `sbxctl doctor` says why",
            )
        )
    if textfile is None:
        run_verb(socket, verb)
    run_verb(socket, lambda admin: _written(admin, textfile), when_down=lambda: _down(textfile))


async def _written(admin: AdminClient, textfile: Path) -> int:
    return _replace(textfile, await admin.metrics(MetricsForm.PROMETHEUS))


def _down(textfile: Path) -> None:
    _replace(textfile, DOWN)


def _replace(target: Path, text: str) -> int:
    """Put a file of this content in the target's place; a reader sees the old one or the new."""
    try:
        # Not *.prom, which node_exporter would read half written.
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".new", dir=target.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                os.fchmod(fd, FILE_MODE)
                file.write(text)
            os.replace(name, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        return fail(
            Exit.UNAVAILABLE,
            f"{target} cannot be written: {error.strerror}",
            hint="name a file in a folder that you may write to",
        )
    return Exit.OK
