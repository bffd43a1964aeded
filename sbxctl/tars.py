"""What an operator has (a tar, a packed tar, a directory), as one plain tar that is never stored.

The service wants to know how long an upload is before it begins. So a source is read twice: once
to be measured, once to be sent; nothing of it is kept meanwhile, whatever a small file unpacks to
and however large the holes of a directory's files are.

Invariants: below a directory nothing is opened but by descriptor and through no link, and what is
sent is the file that was measured; no more than UNPACKED_BYTES_MAX are ever unpacked.
"""

import gzip
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sbxd.oci.tar import DEPTH_MAX
from sbxd.port.errors import ExecutionRejected, RejectedCode

UNPACKED_BYTES_MAX = 64 * 1024**3  # what one image may take, unpacked
_XZ_MEMORY_MAX = 256 * 1024**2
_CHUNK_BYTES = 64 * 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7"

Pieces = Iterator[bytes]


class Source(NamedTuple):
    """A plain tar. `pieces` reads it from its beginning, each time it is called; a piece may be
    empty. size: in bytes, None where only reading it tells. file: of a tar that is a file as it
    is."""

    pieces: Callable[[], Pieces]
    size: int | None
    file: BinaryIO | None = None


class Reading:
    """Pieces as a stream that counts. Raises ExecutionRejected when they are too many."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self.size = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes, b"" at the end."""
        while not self._rest:
            if (piece := next(self._pieces, None)) is None:
                return b""
            self._rest = memoryview(piece)
        piece, self._rest = bytes(self._rest[:size]), self._rest[size:]
        self.size += len(piece)
        if self.size > UNPACKED_BYTES_MAX:
            raise refused(f"it unpacks to more than {UNPACKED_BYTES_MAX // 1024**3} GiB")
        return piece

    def measure(self) -> int:
        """Read to the end; the size of the whole."""
        while self.read(_CHUNK_BYTES):
            pass
        return self.size


def refused(why: str) -> ExecutionRejected:
    """What is no image that can be sent."""
    return ExecutionRejected(RejectedCode.INVALID_IMAGE, f"this tar is refused: {why}")


def of_file(file: BinaryIO) -> Source:
    """The tar in an open file, packed with gzip or xz or not at all. The file is borrowed."""
    magic = file.read(2)
    if magic == _GZIP:
        return Source(lambda: _gunzip(file), None)
    if magic == _XZ:
        return Source(lambda: _unxz(file), None)
    return Source(lambda: _plain(file), os.fstat(file.fileno()).st_size, file)


def _plain(file: BinaryIO) -> Pieces:
    file.seek(0)
    while piece := file.read(_CHUNK_BYTES):
        yield piece


def _gunzip(file: BinaryIO) -> Pieces:
    file.seek(0)
    with gzip.GzipFile(fileobj=file) as packed:
        try:
            while piece := packed.read(_CHUNK_BYTES):
                yield piece
        except (zlib.error, gzip.BadGzipFile, EOFError):
            raise refused("it is not what gzip writes, or is cut short") from None


def _unxz(file: BinaryIO) -> Pieces:
    file.seek(0)
    try:
        stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_MAX)
        packed = b""
        while packed := packed or file.read(_CHUNK_BYTES):
            if stream.eof:  # another stream may follow, after padding
                packed = packed.lstrip(b"\0")
                if packed:
                    stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_MAX)
                continue
            piece = stream.decompress(packed, _CHUNK_BYTES)
            packed = stream.unused_data if stream.eof else b""
            yield piece
            while not (stream.eof or stream.needs_input):
                yield stream.decompress(b"", _CHUNK_BYTES)
                packed = stream.unused_data if stream.eof else b""
        if not stream.eof:
            raise refused("it is cut short")
    except lzma.LZMAError:
        raise refused("it is not what xz writes, or needs too much memory") from None


class _Member(NamedTuple):
    """One entry of a directory's tar. path: of a file whose content follows, else empty."""

    header: bytes
    path: str
    size: int
    identity: tuple[int, int]


def of_directory(directory: int) -> Source:
    """The tree below an open directory, sorted and numeric, so that the same tree gives the same
    digest. The descriptor is borrowed. Sockets have no place in an image."""
    found: dict[str, os.stat_result] = {}
    links: dict[str, str] = {}
    _walk(directory, "", 1, found, links)
    members, names = [], dict[tuple[int, int], str]()
    for path in sorted(found):
        status = found[path]
        member = _described(path, status)
        if member is None:
            continue
        identity = (status.st_dev, status.st_ino)
        if member.isreg() and status.st_nlink > 1 and identity in names:
            member.type, member.linkname, member.size = tarfile.LNKTYPE, names[identity], 0
        elif member.isreg():
            names[identity] = path
        elif member.issym():
            member.linkname = links[path]
        members.append(_member(member, path, identity))
    return _archive(directory, members)


def of_layout(directory: int) -> Source:
    """The two documents and the blobs of an OCI layout in an open directory; links and everything
    else stay behind."""
    names = ["oci-layout", "index.json"]
    with suppress(FileNotFoundError):
        try:
            blobs = _beneath(directory, "blobs/sha256", _FOLDER)
        except NotADirectoryError:
            raise refused("blobs/sha256 of the layout is a link, or no directory") from None
        names += sorted(f"blobs/sha256/{name}" for name in os.listdir(blobs))
        os.close(blobs)
    members = []
    for name in names:
        with suppress(OSError):  # a link, or gone
            file = _beneath(directory, name, _FILE)
            status = os.fstat(file)
            os.close(file)
            if stat.S_ISREG(status.st_mode):
                member = tarfile.TarInfo(name)
                member.size = status.st_size
                members.append(_member(member, name, (status.st_dev, status.st_ino)))
    return _archive(directory, members)


def _walk(
    folder: int, prefix: str, depth: int, found: dict[str, os.stat_result], links: dict[str, str]
) -> None:
    if depth > DEPTH_MAX:
        raise refused("a directory is nested too deeply")
    for name in os.listdir(folder):
        path = f"{prefix}{name}"
        status = os.lstat(name, dir_fd=folder)
        if stat.S_ISDIR(status.st_mode):
            child = os.open(name, _FOLDER, dir_fd=folder)
            try:
                status = os.fstat(child)
                _walk(child, f"{path}/", depth + 1, found, links)
            finally:
                os.close(child)
        elif stat.S_ISLNK(status.st_mode):
            links[path] = os.readlink(name, dir_fd=folder)
        found[path] = status


def _described(path: str, status: os.stat_result) -> tarfile.TarInfo | None:
    member = tarfile.TarInfo(path)
    match stat.S_IFMT(status.st_mode):
        case stat.S_IFREG:
            member.size = status.st_size
        case stat.S_IFDIR:
            member.type = tarfile.DIRTYPE
        case stat.S_IFLNK:
            member.type = tarfile.SYMTYPE
        case stat.S_IFIFO:
            member.type = tarfile.FIFOTYPE
        case stat.S_IFCHR | stat.S_IFBLK as kind:
            member.type = tarfile.CHRTYPE if kind == stat.S_IFCHR else tarfile.BLKTYPE
            member.devmajor, member.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
        case _:
            return None
    member.mode, member.uid, member.gid = status.st_mode, status.st_uid, status.st_gid
    member.mtime = status.st_mtime
    return member


def _member(member: tarfile.TarInfo, path: str, identity: tuple[int, int]) -> _Member:
    header = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return _Member(header, path if member.isreg() else "", member.size, identity)


def _archive(directory: int, members: Sequence[_Member]) -> Source:
    size = sum(len(each.header) + each.size + -each.size % tarfile.BLOCKSIZE for each in members)
    end = 2 * tarfile.BLOCKSIZE
    end += -(size + end) % tarfile.RECORDSIZE

    def pieces() -> Pieces:
        for each in members:
            yield each.header
            if each.path:
                yield from _content(directory, each)
                yield bytes(-each.size % tarfile.BLOCKSIZE)
        yield bytes(end)

    return Source(pieces, size + end)


def _content(directory: int, member: _Member) -> Pieces:
    """Of the file that was measured. Raises ExecutionRejected when another is there now."""
    changed = refused("one of its files was changed while it was read: try again")
    try:
        file = _beneath(directory, member.path, _FILE)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as problem:
        raise changed from problem
    except OSError as problem:
        if stat.S_ISLNK(_kind(directory, member.path)):
            raise changed from problem
        raise
    try:
        status = os.fstat(file)
        now = (stat.S_ISREG(status.st_mode), status.st_size, (status.st_dev, status.st_ino))
        if now != (True, member.size, member.identity):
            raise changed
        left = member.size
        while left > 0:
            if not (piece := os.read(file, min(left, _CHUNK_BYTES))):
                raise changed
            left -= len(piece)
            yield piece
    finally:
        os.close(file)


def _kind(directory: int, path: str) -> int:
    with suppress(OSError):
        return os.lstat(path, dir_fd=directory).st_mode
    return 0


def _beneath(directory: int, path: str, flags: int) -> int:
    """Open each part of the path from the one before it, through no link."""
    *folders, name = path.split("/")
    at = os.dup(directory)
    try:
        for each in folders:
            inner = os.open(each, _FOLDER | os.O_PATH, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags, dir_fd=at)
    finally:
        os.close(at)


def open_directory(path: Path) -> int:
    """The directory that the operator named; a link there is theirs to follow."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
