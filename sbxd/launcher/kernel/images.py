"""Unpacked images: verified blobs of the store, extracted once, shared read-only by all.

Invariants: every byte that is parsed (manifest, configuration, layers) is hashed on the way, packed
and unpacked, and the image is published only when each digest is right; layers are extracted by a
child that is root of nothing but a user namespace whose ids are the image block's, with the target
as its root directory and a cap on its memory; an image may take no more than a share of what is
free, and several at once leave the rest of it; `complete` is written last, after which the tree
never changes. What failed is removed at once, what was killed when it is next asked for: nothing
half-unpacked is ever mounted.

The owner `i` of an image's file is IMAGE_BASE + i on the disk.
"""

import hashlib
import os
import re
import resource
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from sbxd.jail import syscalls
from sbxd.launcher.kernel import hostpaths, mounts, process, uids
from sbxd.launcher.kernel.image_stream import LayerStream
from sbxd.launcher.kernel.image_tar import Extractor, Room, add_mount_points, room_of
from sbxd.oci import documents
from sbxd.oci.documents import DOCUMENT_BYTES_MAX, Descriptor
from sbxd.oci.media import Compression, compression_of
from sbxd.oci.tar import BadArchive, TarReader

_CHUNK_BYTES = 256 * 1024
_COMPLETE = "complete"
_ROOTFS = "rootfs"
_REPORT_BYTES_MAX = 512
_MEMORY_BYTES_MAX = 1024**3  # of the child: what a layer says of itself may ask for more
_FREE_SHARE = 0.9  # of the file system's free space that one image may take
_TAKEN = re.compile(rb"took ([0-9]{1,18}) ([0-9]{1,18})")
_FAILED = re.compile(rb"errno ([0-9]{1,4})")
_STRICT = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS


class DigestMismatch(OSError):
    """The content of a blob is not what its name says."""

    def __init__(self, what: str) -> None:
        super().__init__(74, f"the digest of the {what} is another")  # EBADMSG


def mount(image_digest: str) -> int:
    """A detached mount of the unpacked image, read-only, nosuid, nodev; the caller owns it.

    Raises FileNotFoundError when the image is not unpacked.
    """
    store = hostpaths.private_directory(hostpaths.unpacked_directory())
    try:
        name = hostpaths.digest_hex(image_digest)
        os.stat(f"{name}/{_COMPLETE}", dir_fd=store, follow_symlinks=False)
        flags = os.O_DIRECTORY | os.O_RDONLY
        root = syscalls.openat2(store, f"{name}/{_ROOTFS}".encode(), flags, _STRICT)
    finally:
        os.close(store)
    try:
        detached = mounts.clone_tree(root)
    finally:
        os.close(root)
    try:
        mounts.restrict(detached, mounts.RDONLY | mounts.NOSUID | mounts.NODEV)
    except OSError:
        os.close(detached)
        raise
    return detached


def unpack(image_digest: str) -> None:
    """Verify, extract and publish the image. Idempotent. Raises OSError, ValueError."""
    name = hostpaths.digest_hex(image_digest)
    store = hostpaths.private_directory(hostpaths.unpacked_directory())
    try:
        if _is_complete(store, name):
            return
        partial = f"{name}.partial"
        blobs = os.open(
            f"{hostpaths.images_directory()}/blobs/sha256", os.O_DIRECTORY | os.O_CLOEXEC
        )
        try:
            layers = read_layers(blobs, image_digest)
            _remove(store, partial)
            _remove(store, name)  # without its marker it is a leftover
            os.mkdir(partial, 0o700, dir_fd=store)
            _extract_all(store, f"{partial}/{_ROOTFS}", blobs, layers)
            syscalls.syncfs(store)  # the marker must not outlast what it vouches for
            marker = os.open(
                f"{partial}/{_COMPLETE}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=store
            )
            os.fsync(marker)
            os.close(marker)
            os.rename(partial, name, src_dir_fd=store, dst_dir_fd=store)
            os.fsync(store)
        except (OSError, ValueError):
            _remove(store, partial)
            raise
        finally:
            os.close(blobs)
    finally:
        os.close(store)


def drop(image_digest: str) -> None:
    """Remove the unpacked image. Idempotent."""
    name = hostpaths.digest_hex(image_digest)
    store = hostpaths.private_directory(hostpaths.unpacked_directory())
    try:
        with suppress(FileNotFoundError):
            os.unlink(f"{name}/{_COMPLETE}", dir_fd=store)
        _remove(store, name)
        _remove(store, f"{name}.partial")
    finally:
        os.close(store)


@dataclass(frozen=True)
class Layer:
    """A layer's blob and the digest that its content has when it is unpacked."""

    blob: Descriptor
    compression: Compression
    unpacked_digest: str


def read_layers(blobs: int, image_digest: str) -> tuple[Layer, ...]:
    """What the manifest and its configuration say, both verified.

    Raises DigestMismatch, InvalidImage (a ValueError).
    """
    manifest = documents.manifest(_document(blobs, image_digest, "manifest"))
    raw = _document(blobs, manifest.config.digest, "configuration")
    config = documents.config(raw, len(manifest.layers))
    found = []
    for blob, unpacked in zip(manifest.layers, config.rootfs.diff_ids, strict=True):
        compression = compression_of(blob.media_type)
        assert compression is not None  # documents.manifest has looked
        found.append(Layer(blob, compression, unpacked))
    return tuple(found)


def _is_complete(store: int, name: str) -> bool:
    try:
        os.stat(f"{name}/{_COMPLETE}", dir_fd=store, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove(store: int, name: str) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(name, dir_fd=store)


def _open_blob(blobs: int, digest: str) -> int:
    """A regular file of the store; never a link, and no FIFO that would block us."""
    name = hostpaths.digest_hex(digest).encode()
    blob = syscalls.openat2(blobs, name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, _STRICT)
    if not stat.S_ISREG(os.fstat(blob).st_mode):
        os.close(blob)
        raise ValueError("a blob is not a regular file")
    return blob


def _document(blobs: int, digest: str, what: str) -> bytes:
    blob = _open_blob(blobs, digest)
    try:
        raw = b""
        while len(raw) <= DOCUMENT_BYTES_MAX:
            chunk = os.read(blob, _CHUNK_BYTES)
            if not chunk:
                break
            raw += chunk
    finally:
        os.close(blob)
    if len(raw) > DOCUMENT_BYTES_MAX:
        raise ValueError(f"the {what} is too large")
    if hashlib.sha256(raw).hexdigest() != hostpaths.digest_hex(digest):
        raise DigestMismatch(what)
    return raw


def _extract_all(store: int, target: str, blobs: int, layers: tuple[Layer, ...]) -> None:
    os.mkdir(target, dir_fd=store)
    # Also when the layers say nothing of their root.
    os.chmod(target, 0o755, dir_fd=store)  # noqa: S103
    os.chown(target, uids.IMAGE_BASE, uids.IMAGE_BASE, dir_fd=store)
    root = os.open(target, os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=store)
    text = mounts.map_text([(0, uids.IMAGE_BASE, uids.IMAGE_BLOCK_SIZE)])
    namespace = mounts.user_namespace(text)
    room = room_of(root, _FREE_SHARE)
    try:
        for number, layer in enumerate(layers, start=1):
            place = _Place(root, namespace, number == 1, number == len(layers))
            try:
                room = _extract(place, blobs, layer, room)
            except BadArchive as problem:
                raise ValueError(f"layer {number} is refused: {problem}") from None
    finally:
        os.close(namespace)
        os.close(root)


@dataclass(frozen=True)
class _Place:
    """Where a layer goes: the root directory, who extracts, and which of the layers it is."""

    root: int
    namespace: int
    is_first: bool
    is_last: bool


def _extract(place: _Place, blobs: int, layer: Layer, room: Room) -> Room:
    """Feed one layer to a confined child and hash what it was fed; the room that is left."""
    blob = _open_blob(blobs, layer.blob.digest)
    if os.fstat(blob).st_size != layer.blob.size:
        os.close(blob)
        raise DigestMismatch("layer")
    here, there = os.pipe2(os.O_CLOEXEC)
    told, tells = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(parent, place, here, tells, layer, room)
    os.close(here)
    os.close(tells)
    digest = hashlib.sha256()
    fed = True
    try:
        while chunk := os.read(blob, _CHUNK_BYTES):
            digest.update(chunk)
            view = memoryview(chunk)
            while fed and view:
                try:
                    view = view[os.write(there, view) :]
                except BrokenPipeError:  # the child gave up; its status says why
                    fed = False
    finally:
        os.close(there)
        os.close(blob)
        _, status = os.waitpid(pid, 0)
        report = os.read(told, _REPORT_BYTES_MAX)
        os.close(told)
    if digest.hexdigest() != hostpaths.digest_hex(layer.blob.digest):
        raise DigestMismatch("layer")
    return _outcome(status, report, room)


def _outcome(status: int, report: bytes, room: Room) -> Room:
    """What the child says is a hint for people and for the caps, and trusted no further."""
    if status == 0:
        taken = _TAKEN.fullmatch(report)
        if taken is None:
            raise BadArchive("it could not be extracted")
        return Room(room.entries - int(taken[1]), room.size_bytes - int(taken[2]), *room[2:])
    failed = _FAILED.fullmatch(report)
    if failed is not None:
        raise OSError(int(failed[1]), os.strerror(int(failed[1])))
    text = "".join(c if " " <= c <= "~" else "?" for c in report.decode("ascii", "replace"))
    raise BadArchive(text or "it could not be extracted: it is damaged or needs too much memory")


def _child(
    parent: int, place: _Place, source: int, tells: int, layer: Layer, room: Room
) -> NoReturn:
    try:
        # Above all the other end of the pipe: an end of file that is held open here never comes.
        process.close_all_but(place.root, place.namespace, source, tells)
        os.umask(0o022)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES_MAX, _MEMORY_BYTES_MAX))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.setgroups([])
        raw = os.fdopen(source, "rb", buffering=_CHUNK_BYTES)
        stream = LayerStream(raw, layer.compression, room.size_bytes)
        syscalls.setns(place.namespace, syscalls.CLONE_NEWUSER)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        process.die_with_parent(parent)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        os.fchdir(place.root)
        os.chroot(".")
        extractor = Extractor(place.root, room, lowest=place.is_first)
        extractor.extract(TarReader(stream.read))
        if stream.finish() != layer.unpacked_digest:
            raise BadArchive("unpacked it is not what the configuration says")
        if place.is_last:
            add_mount_points()
        os.write(tells, f"took {extractor.entries} {extractor.size_bytes}".encode())
        os._exit(0)
    except BadArchive as problem:
        os.write(tells, str(problem).encode("ascii", "replace")[:_REPORT_BYTES_MAX])
        os._exit(1)
    except OSError as problem:
        os.write(tells, f"errno {problem.errno or 0}".encode())
        os._exit(1)
    except BaseException as problem:
        os.write(2, f"image: {type(problem).__name__}\n".encode())
        os._exit(1)
