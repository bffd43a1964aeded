"""Turns what an operator has (a tar, a compressed tar, a directory, nothing) into one plain tar.

`sbxctl image import` uploads the result; the service decides what is in it. Runs as the operator
and writes only to a temporary file of its own.
"""

import gzip
import lzma
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import click


@contextmanager
def plain_tar(source: Path) -> Iterator[BinaryIO]:
    """An open, uncompressed tar of the root file system at `source`, at offset 0."""
    if source.is_dir():
        with tempfile.TemporaryFile() as out:
            _pack(source, cast(BinaryIO, out))
            out.seek(0)
            yield cast(BinaryIO, out)
        return
    with source.open("rb") as raw, tempfile.TemporaryFile() as out:
        magic = raw.read(2)
        raw.seek(0)
        if magic == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=raw) as packed:
                shutil.copyfileobj(packed, out, 1024 * 1024)
        elif magic == b"\xfd7":
            with lzma.LZMAFile(raw) as unpacked:
                shutil.copyfileobj(unpacked, out, 1024 * 1024)
        else:
            yield raw
            return
        out.seek(0)
        yield cast(BinaryIO, out)


def _pack(directory: Path, out: BinaryIO) -> None:
    """Sorted and numeric, so that the same tree gives the same digest."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        names = sorted(
            os.path.join(folder, name)
            for folder, folders, files in os.walk(directory)
            for name in (*folders, *files)
        )
        for name in names:
            if stat.S_ISSOCK(os.lstat(name).st_mode):  # it has no place in an image
                continue
            member = archive.gettarinfo(name, arcname=os.path.relpath(name, directory))
            member.uname = member.gname = ""
            if member.isreg():
                with open(name, "rb") as content:
                    archive.addfile(member, content)
            else:
                archive.addfile(member)


def build_debian(out: Path, *, suite: str, packages: tuple[str, ...]) -> None:
    """Make a Debian root file system with mmdebstrap as a tar at `out`.

    Raises click.ClickException when mmdebstrap is missing or fails.
    """
    tool = shutil.which("mmdebstrap")
    if tool is None:
        raise click.ClickException(
            "mmdebstrap is not installed: run `apt-get install mmdebstrap`, "
            "or import a root file system with `sbxctl image import`"
        )
    argv = [
        tool,
        "--variant=minbase",
        f"--include={','.join(packages)}",
        "--aptopt=Apt::Install-Recommends false",
        '--customize-hook=rm -rf "$1"/var/cache/apt "$1"/var/lib/apt/lists/* "$1"/usr/share/doc/*',
        '--customize-hook=mkdir -p "$1"/workspace',
        "--quiet",
        suite,
        str(out),
    ]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1735689600"}
    if subprocess.run(argv, env=environment, check=False).returncode != 0:
        raise click.ClickException("mmdebstrap failed; its own message is above")
