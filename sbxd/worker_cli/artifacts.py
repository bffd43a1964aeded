"""`sbxd-worker artifacts`: what an operator or a timer does with the artifact store."""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import click
import msgspec

from sbxd.artifacts.opening import Artifacts, ArtifactSettings, open_artifacts
from sbxd.port.artifact import ArtifactUnavailable
from sbxd.worker_cli.config import ConfigUnreadable, load
from sbxd.worker_cli.exits import Exit

ResultT = TypeVar("ResultT")


@click.group()
def artifacts() -> None:
    """The artifact store of this worker tier, as the user that owns it."""


@artifacts.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a sentence.")
@click.pass_obj
def sweep(config: Path, as_json: bool) -> None:
    """Remove what has expired, what was deleted and what dead puts left.

    Safe at any time, twice at once, and when it is killed.
    """
    report = _with_artifacts(config, lambda opened: opened.sweeper.sweep())
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        click.echo(
            f"Removed {report.by_retention} expired, {report.by_request} deleted "
            f"({report.removed_bytes} bytes) and {report.abandoned} abandoned; "
            f"{report.failed} could not be removed."
        )
    if report.failed:
        sys.exit(Exit.INCOMPLETE)


@artifacts.command()
@click.pass_obj
def metrics(config: Path) -> None:
    """Bytes of each tenant and what was removed, as OpenMetrics text."""
    click.echo(_with_artifacts(config, lambda opened: opened.metrics()), nl=False)


def _with_artifacts(config: Path, work: Callable[[Artifacts], Awaitable[ResultT]]) -> ResultT:
    try:
        settings = load(config)
    except ConfigUnreadable as problem:
        raise click.UsageError(str(problem)) from None
    if settings.artifacts is None:
        raise click.UsageError(f"{config} has no table [artifacts]")
    try:
        return anyio.run(_opened, settings.artifacts, work)
    except ArtifactUnavailable as problem:
        raise click.ClickException(str(problem)) from None


async def _opened(
    settings: ArtifactSettings, work: Callable[[Artifacts], Awaitable[ResultT]]
) -> ResultT:
    async with open_artifacts(settings) as opened:
        return await work(opened)
