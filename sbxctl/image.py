"""`sbxctl image`: build, import, pull, ls, rm, prune. An image is named by its digest; tags are
refused."""

import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
import trio

from sbxctl.archive import Prepared, prepared
from sbxctl.exits import Exit
from sbxctl.pull import pull
from sbxctl.report import print_json, printable, show_images, tell
from sbxctl.rootfs import build_debian
from sbxctl.session import run_verb
from sbxctl.units import ImageDigest, human_bytes
from sbxd.client.admin import AdminClient
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.wire.descriptions import ImageInfo
from sbxd.wire.messages import ImageFormat

_BLOCK = 512
_LABEL_MAX = 512
DEFAULT_PACKAGES = ("python3", "ca-certificates")


@click.group("image")
def image() -> None:
    """Build, import, pull, list and remove images."""


async def _upload(
    admin: AdminClient,
    tar: Prepared,
    *,
    reference: str | None = None,
    digest: str | None = None,
    label: str,
) -> ImageInfo:
    size = tar.size
    if size < _BLOCK:
        raise ExecutionRejected(RejectedCode.INVALID_IMAGE, "this is no tar: it is too short")
    with click.progressbar(
        length=size, label=f"uploading {human_bytes(size)}", file=sys.stderr
    ) as bar:

        async def chunks() -> AsyncIterator[bytes]:
            pieces = tar.pieces()
            while (chunk := await trio.to_thread.run_sync(next, pieces, None)) is not None:
                if chunk:
                    yield chunk
                    bar.update(len(chunk))
            bar.label = "checking and unpacking"
            bar.render_progress()

        return await admin.image_import(
            chunks(),
            size,
            format=tar.format,
            reference=reference,
            expected_digest=digest,
            label=label[:_LABEL_MAX],
        )


def _imported(found: ImageInfo, *, as_json: bool) -> int:
    if as_json:
        print_json(found)
    else:
        tell(printable(found.digest))
        tell(
            "to give it a name, add it to /etc/sbxd/config.toml and restart sbxd:\n"
            f'  [images.aliases]\n  NAME = "{printable(found.digest)}"',
            err=True,
        )
    return Exit.OK


@image.command("import")
@click.option("--digest", metavar="sha256:…", help="Refuse the image when its digest is another.")
@click.option("--label", default="", help="A note for people, shown by `image ls`.")
@click.option("--reference", help="Which image of an archive, by its name there or its digest.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["auto", "rootfs", "archive"]),
    default="auto",
    show_default=True,
    help="What PATH holds; auto tells it by the names in it.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.pass_obj
def import_(
    socket: str,
    digest: str | None,
    label: str,
    reference: str | None,
    kind: str,
    as_json: bool,
    path: Path,
) -> None:
    """Import an image.

    PATH is an OCI layout (a directory or a tar of one), what `docker save` writes, or a root file
    system (a tar or a directory). A tar may be packed with gzip or xz. Prints the digest that a
    worker names the image by.
    """
    format = None if kind == "auto" else ImageFormat(kind.upper())

    async def verb(admin: AdminClient) -> int:
        with ExitStack() as held:
            # In a thread: it may pack or unpack gigabytes, and the daemon wants signs of life.
            found = await trio.to_thread.run_sync(held.enter_context, prepared(path, format))
            imported = await _upload(
                admin,
                found,
                reference=reference,
                digest=digest,
                label=label or reference or path.name,
            )
        return _imported(imported, as_json=as_json)

    run_verb(socket, verb)


@image.command("pull")
@click.option("--digest", metavar="sha256:…", help="Refuse the image when its digest is another.")
@click.option("--label", default="", help="A note for people; the reference is kept beside it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("reference")
@click.pass_obj
def pull_(socket: str, digest: str | None, label: str, as_json: bool, reference: str) -> None:
    """Fetch an image from a registry with skopeo, and import it.

    REFERENCE is like docker.io/library/debian:13, or one of skopeo's own (oci:DIR:NAME,
    docker-archive:FILE, …). It runs as you, with your credentials; a tag is resolved to a digest,
    which is printed and recorded.
    """
    with tempfile.TemporaryDirectory(prefix="sbxctl-pull-") as folder:
        pulled = pull(reference, Path(folder))
        note = f"{label} ({pulled.origin})" if label else pulled.origin

        async def verb(admin: AdminClient) -> int:
            with prepared(pulled.path, ImageFormat.ARCHIVE) as tar:
                found = await _upload(admin, tar, digest=digest, label=note)
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
    """Make a Debian image with Python by mmdebstrap, and import it.

    It takes some minutes and says on stderr what it is at.
    """
    chosen = packages or DEFAULT_PACKAGES
    tell(f"building Debian {suite} with {' '.join(chosen)}: this takes some minutes", err=True)
    if output is not None:
        build_debian(output, suite=suite, packages=chosen)
        tell(f"{output} is written ({human_bytes(output.stat().st_size)})", err=True)
        return

    async def verb(admin: AdminClient) -> int:
        with tempfile.TemporaryDirectory() as folder:
            tar_path = Path(folder) / "image.tar"
            await trio.to_thread.run_sync(
                partial(build_debian, tar_path, suite=suite, packages=chosen)
            )
            tell(f"importing {human_bytes(tar_path.stat().st_size)}", err=True)
            with prepared(tar_path, ImageFormat.ROOTFS) as tar:
                found = await _upload(admin, tar, label=f"debian {suite}: {' '.join(chosen)}")
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
@click.argument("digests", nargs=-1, required=True, type=ImageDigest())
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


async def _agreed(images: Sequence[ImageInfo]) -> bool:
    """Show the images that would go, and ask. The question goes to stderr."""
    show_images(images)
    question = f"Remove {'this image' if len(images) == 1 else f'these {len(images)} images'}?"
    return await trio.to_thread.run_sync(partial(click.confirm, question, err=True))


@image.command("prune")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_obj
def prune(socket: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove every image that nothing holds.

    Shows what would go and asks first; where nobody can be asked, --yes is needed.

    Images with an alias, images that an environment or a prepared sandbox uses, and the default
    image are kept. `image ls` shows what holds each.
    """

    if not (dry_run or yes) and not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: add --yes, or --dry-run to look first")

    async def verb(admin: AdminClient) -> int:
        before = await admin.image_list()
        unheld = [each for each in before if not each.held_by]
        if unheld and not (dry_run or yes) and not await _agreed(unheld):
            return Exit.OK
        removed: list[str] = []
        for each in unheld:
            if not dry_run:
                try:
                    await admin.image_remove(each.digest)
                except ExecutionRejected as error:
                    # Somebody was faster, to use it or to remove it.
                    if error.code not in (RejectedCode.IMAGE_IN_USE, RejectedCode.UNKNOWN_IMAGE):
                        raise
                    continue
            removed.append(each.digest)
        after = [e for e in before if e.digest not in removed]
        freed = sum(e.size_bytes for e in before) - sum(e.size_bytes for e in after)
        if as_json:
            kept = {each.digest: each.held_by for each in after}
            print_json({"removed": removed, "kept": kept, "dry_run": dry_run})
        else:
            for digest in removed:
                tell(printable(digest))
            verdict = "would go" if dry_run else "removed"
            images = "image" if len(removed) == 1 else "images"
            tell(
                f"{len(removed)} {images} {verdict} ({human_bytes(freed)} packed), "
                f"{len(after)} kept",
                err=True,
            )
        return Exit.OK

    run_verb(socket, verb)
