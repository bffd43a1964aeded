"""What a path holds: a root file system, an OCI layout or an archive of images; as one plain tar.

The service decides what is in it and checks every digest. Here only the kind is told, by the
names at the top of the tar, so that an operator need not say it.
"""

import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from sbxctl.rootfs import plain_tar
from sbxd.oci.tar import BadArchive, TarReader
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.wire.messages import ImageFormat

_LAYOUT = {b"oci-layout", b"index.json"}
_SAVED = b"manifest.json"
_ROOT_FOLDERS = frozenset(
    {b"bin", b"boot", b"dev", b"etc", b"home", b"lib", b"opt", b"proc", b"root", b"run", b"sbin",
     b"srv", b"sys", b"tmp", b"usr", b"var", b"workspace"}
)  # fmt: skip


class Prepared(NamedTuple):
    """A plain tar at offset 0, and what it is."""

    tar: BinaryIO
    format: ImageFormat


@contextmanager
def prepared(source: Path, format: ImageFormat | None) -> Iterator[Prepared]:
    """The tar to upload for `source`. format: None to tell it by the names in it.

    Raises ExecutionRejected(INVALID_IMAGE) for what is no tar.
    """
    if format is not ImageFormat.ROOTFS and (source / "oci-layout").is_file():
        with tempfile.TemporaryFile() as out:
            _pack_layout(source, cast(BinaryIO, out))
            out.seek(0)
            yield Prepared(cast(BinaryIO, out), ImageFormat.ARCHIVE)
        return
    with plain_tar(source) as tar:
        yield Prepared(tar, format or _format_of(tar))


def _format_of(tar: BinaryIO) -> ImageFormat:
    def skip(size: int) -> None:
        tar.seek(size, os.SEEK_CUR)

    reader = TarReader(tar.read, skip=skip)
    seen: set[bytes] = set()
    try:
        while (entry := reader.next()) is not None:
            first, slash, _ = entry.name.removeprefix(b"./").partition(b"/")
            if first in _ROOT_FOLDERS:
                return ImageFormat.ROOTFS
            if not slash:
                seen.add(first)
    except BadArchive as problem:
        raise ExecutionRejected(
            RejectedCode.INVALID_IMAGE, f"this tar is refused: {problem}"
        ) from problem
    finally:
        tar.seek(0)
    is_archive = seen >= _LAYOUT or _SAVED in seen
    return ImageFormat.ARCHIVE if is_archive else ImageFormat.ROOTFS


def _pack_layout(directory: Path, out: BinaryIO) -> None:
    """The layout's two documents and its blobs; links and everything else stay behind."""
    blobs = directory / "blobs" / "sha256"
    names = ["oci-layout", "index.json"]
    if blobs.is_dir():
        names += sorted(f"blobs/sha256/{path.name}" for path in blobs.iterdir())
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            path = directory / name
            if path.is_symlink() or not path.is_file():
                continue
            with path.open("rb") as content:
                member = tarfile.TarInfo(name)
                member.size = os.fstat(content.fileno()).st_size
                if stat.S_ISREG(os.fstat(content.fileno()).st_mode):
                    archive.addfile(member, content)
