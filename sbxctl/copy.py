"""`sbxctl cp`: one file into the workspace of a live environment, or out of it."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import click
import trio
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from sbxctl.exits import Exit
from sbxctl.naming import NAME_PATTERN, find
from sbxctl.report import console, print_json
from sbxctl.session import run_verb
from sbxctl.transfer import Moved, Transfer, get_file, put_file
from sbxd.client.admin import AdminClient

_INSIDE = re.compile(rf"({NAME_PATTERN}):(.*)", re.ASCII | re.DOTALL)


@click.command("cp")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("source")
@click.argument("destination")
@click.pass_obj
def cp(socket: str, as_json: bool, source: str, destination: str) -> None:
    """Copy one file into a live environment's workspace, or out of it.

    One of SOURCE and DESTINATION is ENVIRONMENT_ID:PATH, with PATH relative to the workspace; the
    other is a file here. A destination that ends with / or is a directory keeps the file's name.
    The destination is replaced whole or not at all, and no link in a workspace is followed. A
    name here that looks like ENVIRONMENT_ID:PATH is written ./NAME.
    """
    inside, outside = _INSIDE.fullmatch(source), _INSIDE.fullmatch(destination)
    if (inside is None) == (outside is None):
        raise click.UsageError("exactly one of SOURCE and DESTINATION is ENVIRONMENT_ID:PATH")

    async def verb(admin: AdminClient) -> int:
        if inside is not None:
            found = await find(admin, inside[1])
            transfer = Transfer(host=_here(destination, inside[2]), workspace=inside[2])
            with _progress(transfer.workspace, None) as moved:
                digest = await get_file(admin.workspace(found.handle), transfer, moved=moved)
            told = {"size_bytes": digest.size_bytes, "sha256": digest.sha256}
        else:
            assert outside is not None
            found = await find(admin, outside[1])
            transfer = Transfer(host=Path(source), workspace=_there(outside[2], Path(source).name))
            with _progress(transfer.host.name, (await trio.Path(source).stat()).st_size) as moved:
                size = await put_file(admin.workspace(found.handle), transfer, moved=moved)
            told = {"size_bytes": size}
        if as_json:
            print_json({"host": str(transfer.host), "workspace": transfer.workspace, **told})
        return Exit.OK

    if outside is not None and not Path(source).is_file():
        raise click.UsageError(f"{source} is no file")
    run_verb(socket, verb)


def _there(path: str, name: str) -> str:
    return f"{path}{name}" if not path or path.endswith("/") else path


def _here(path: str, workspace: str) -> Path:
    target = Path(path)
    is_folder = path.endswith("/") or target.is_dir()
    return target / PurePosixPath(workspace).name if is_folder else target


@contextmanager
def _progress(name: str, size: int | None) -> Iterator[Moved]:
    """A bar on stderr where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TransferSpeedColumn(),
        console=console(),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        shown = "".join(c if c.isprintable() and c not in "[]" else "?" for c in name)
        task = bar.add_task(shown, total=size)
        yield lambda moved: bar.advance(task, moved)
