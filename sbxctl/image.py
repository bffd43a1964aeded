"""`sbxctl image`: build, import, ls, rm. An image is named by its digest; tags are refused."""

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import click
import trio

from sbxctl.exits import Exit
from sbxctl.report import print_json, show_images
from sbxctl.rootfs import build_debian, plain_tar
from sbxctl.session import run_verb
from sbxd.client.admin import AdminClient
from sbxd.wire.descriptions import ImageInfo

_CHUNK = 256 * 1024
DEFAULT_PACKAGES = ("python3", "ca-certificates")


@click.group("image")
def image() -> None:
    """Build, import, list and remove images."""


async def _upload(admin: AdminClient, tar: BinaryIO, digest: str | None, label: str) -> ImageInfo:
    size = os.fstat(tar.fileno()).st_size

    async def chunks() -> AsyncIterator[bytes]:
        while chunk := await trio.to_thread.run_sync(tar.read, _CHUNK):
            yield chunk

    return await admin.image_import(chunks(), size, expected_digest=digest, label=label)


def _imported(found: ImageInfo, *, as_json: bool) -> int:
    if as_json:
        print_json(found)
    else:
        click.echo(found.digest)
        click.echo(
            "to give it a name, add it to /etc/sbxd/config.toml and restart sbxd:\n"
            f'  [images.aliases]\n  NAME = "{found.digest}"',
            err=True,
        )
    return Exit.OK


@image.command("import")
@click.option("--digest", metavar="sha256:…", help="Refuse the image when its digest is another.")
@click.option("--label", default="", help="A note for people, shown by `image ls`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.pass_obj
def import_(socket: str, digest: str | None, label: str, as_json: bool, path: Path) -> None:
    """Import a root file system: a tar (plain, gzip or xz) or a directory.

    Prints the digest that a worker names it by.
    """

    async def verb(admin: AdminClient) -> int:
        with plain_tar(path) as tar:
            found = await _upload(admin, tar, digest, label or path.name)
        return _imported(found, as_json=as_json)

    run_verb(socket, verb)


@image.command("build")
@click.option("--suite", default="trixie", show_default=True, help="The Debian release.")
@click.option("--package", "packages", multiple=True, help="A package; default: Python 3.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the tar there; no import.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def build(
    socket: str, suite: str, packages: tuple[str, ...], output: Path | None, as_json: bool
) -> None:
    """Make a Debian image with Python by mmdebstrap, and import it."""
    chosen = packages or DEFAULT_PACKAGES
    if output is not None:
        build_debian(output, suite=suite, packages=chosen)
        return

    async def verb(admin: AdminClient) -> int:
        with tempfile.TemporaryDirectory() as folder:
            tar_path = Path(folder) / "image.tar"
            build_debian(tar_path, suite=suite, packages=chosen)
            with plain_tar(tar_path) as tar:
                found = await _upload(admin, tar, None, f"debian {suite}: {' '.join(chosen)}")
        return _imported(found, as_json=as_json)

    run_verb(socket, verb)


@image.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def ls(socket: str, as_json: bool) -> None:
    """List the images of the store."""

    async def verb(admin: AdminClient) -> int:
        found = await admin.image_list()
        if as_json:
            print_json(found)
        else:
            show_images(found)
        return Exit.OK

    run_verb(socket, verb)


@image.command("rm")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("digests", nargs=-1, required=True)
@click.pass_obj
def rm(socket: str, as_json: bool, digests: tuple[str, ...]) -> None:
    """Remove images that no environment and no alias uses."""

    async def verb(admin: AdminClient) -> int:
        for digest in digests:
            await admin.image_remove(digest)
        if as_json:
            print_json({"removed": digests})
        return Exit.OK

    run_verb(socket, verb)
