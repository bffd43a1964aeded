"""Extract one layer into the root directory of this process (a confined child; see `images`).

The chroot and the user namespace are the boundary; the rules here refuse what no honest layer
holds and keep the result harmless to look at: names with ".." or from the root, owners outside
the block, sizes and counts above the caps. Skipped silently: device nodes and FIFOs (the sandbox
has its own /dev). Dropped: set-uid and set-gid bits, extended attributes.
"""

import errno
import gzip
import os
import stat
import tarfile
from contextlib import suppress
from enum import StrEnum
from typing import IO

ENTRIES_MAX = 2_000_000
BYTES_MAX = 64 * 1024**3
OWNER_MAX = 65_535
MOUNT_POINTS = ("proc", "dev", "tmp", "workspace")
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_CHUNK_BYTES = 256 * 1024


class Compression(StrEnum):
    """By the layer's media type."""

    NONE = "application/vnd.oci.image.layer.v1.tar"
    GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"


class UnsafeLayer(ValueError):
    """The layer holds what no honest layer holds."""


def safe_name(name: str) -> str:
    """The entry's path relative to the root, "" for the root itself. Raises UnsafeLayer."""
    if name.startswith("/") or "\0" in name:
        raise UnsafeLayer("a name of the layer is absolute or holds NUL")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UnsafeLayer("a name of the layer holds ..")
    return "/".join(parts)


def safe_mode(mode: int) -> int:
    """Permission bits and the sticky bit; never set-uid or set-gid."""
    return mode & 0o1777


def extract(source: int, compression: Compression) -> None:
    """Read the layer from this descriptor to its end. Raises UnsafeLayer, OSError, TarError."""
    with os.fdopen(source, "rb", buffering=_CHUNK_BYTES) as raw:
        stream: IO[bytes] = raw
        if compression is Compression.GZIP:
            stream = gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[assignment]
        _extract_tar(stream)
        while raw.read(_CHUNK_BYTES):  # the parent hashes all that the blob holds
            pass


def add_mount_points() -> None:
    """What the sandbox mounts over must be directories and no links."""
    for name in MOUNT_POINTS:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755)
        if not stat.S_ISDIR(os.lstat(name).st_mode):
            raise UnsafeLayer(f"/{name} of the image is not a directory")


def _extract_tar(stream: IO[bytes]) -> None:
    entries = 0
    left = BYTES_MAX
    directories: list[tuple[str, int]] = []
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK_BYTES) as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # no list of everything seen
            entries += 1
            left -= max(member.size, 0)
            if entries > ENTRIES_MAX or left < 0:
                raise UnsafeLayer("the layer is too large")
            _entry(tar, member, directories)
    for path, mode in reversed(directories):
        os.chmod(path, mode)


def _entry(
    tar: tarfile.TarFile, member: tarfile.TarInfo, directories: list[tuple[str, int]]
) -> None:
    path = safe_name(member.name)
    if max(member.uid, member.gid) > OWNER_MAX or min(member.uid, member.gid) < 0:
        raise UnsafeLayer("an owner of the layer is outside the image's block")
    if not path:
        if member.isdir():
            directories.append((".", safe_mode(member.mode) | 0o700))
        return
    parent, _, name = path.rpartition("/")
    if parent:
        os.makedirs(parent, 0o755, exist_ok=True)
    if name == _OPAQUE:
        _empty(parent or ".")
        return
    if name.startswith(_WHITEOUT):
        _remove(f"{parent or '.'}/{name[len(_WHITEOUT) :]}")
        return
    if member.isdir():
        _make_directory(path)
        directories.append((path, safe_mode(member.mode)))
    elif member.isreg():
        _remove(path)
        _write_file(tar, member, path)
    elif member.issym():
        _remove(path)
        os.symlink(member.linkname, path)
    elif member.islnk():
        _remove(path)
        os.link(safe_name(member.linkname), path, follow_symlinks=False)
        return
    else:
        return
    os.chown(path, member.uid, member.gid, follow_symlinks=False)


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            _remove(path)
            os.mkdir(path, 0o700)


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    content = tar.extractfile(member)
    if content is None:
        raise UnsafeLayer("a file of the layer has no content")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        while chunk := content.read(_CHUNK_BYTES):
            view = memoryview(chunk)
            while view:
                view = view[os.write(file, view) :]
        os.fchown(file, member.uid, member.gid)
        os.fchmod(file, safe_mode(member.mode))
        os.utime(file, (member.mtime, member.mtime))
    finally:
        os.close(file)


def _empty(directory: str) -> None:
    with suppress(FileNotFoundError):
        for name in os.listdir(directory):
            _remove(f"{directory}/{name}")


def _remove(path: str) -> None:
    """Remove whatever is there, links as links."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as problem:
        if problem.errno not in (errno.EISDIR, errno.EPERM):
            raise
        _empty(path)
        os.rmdir(path)
