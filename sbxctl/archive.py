"""What a path holds: a root file system, an OCI layout or an archive of images; as one plain tar.

The service decides what is in it and checks every digest. Here only the kind is told, by the
names at the top of the tar, so that an operator need not say it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from sbxctl import tars
from sbxctl.tars import Pieces, Reading
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
    """A plain tar, by a function that reads it from its beginning (a piece may be empty); its size
    in bytes; what it is."""

    pieces: Callable[[], Pieces]
    size: int
    format: ImageFormat


@contextmanager
def prepared(source: Path, format: ImageFormat | None) -> Iterator[Prepared]:
    """The tar to upload for `source`, measured. format: None to tell it by the names in it.

    Raises ExecutionRejected(INVALID_IMAGE) for what is no tar, or one that is too large.
    """
    with ExitStack() as held:
        if source.is_dir():
            directory = tars.open_directory(source)
            held.callback(os.close, directory)
            if format is not ImageFormat.ROOTFS and (source / "oci-layout").is_file():
                found, format = tars.of_layout(directory), ImageFormat.ARCHIVE
            else:
                found = tars.of_directory(directory)
        else:
            found = tars.of_file(held.enter_context(source.open("rb")))
        reading = Reading(found.pieces())
        if format is None:
            format = _format_of(found, reading)
        size = reading.measure() if found.size is None else found.size
        yield Prepared(found.pieces, size, format)


def _format_of(source: tars.Source, reading: Reading) -> ImageFormat:
    reader = TarReader(reading.read)
    if (file := source.file) is not None:  # contents can be passed over
        file.seek(0)
        reader = TarReader(file.read, skip=lambda size: file.seek(size, os.SEEK_CUR))
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
    is_archive = seen >= _LAYOUT or _SAVED in seen
    return ImageFormat.ARCHIVE if is_archive else ImageFormat.ROOTFS
