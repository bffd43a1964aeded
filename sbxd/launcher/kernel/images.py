"""Unpacked images: verified blobs of the store, extracted once, shared read-only by all.

Invariants: every byte that is parsed (manifest, configuration, layers) is hashed on the way and
the image is published only when each digest is right; layers are extracted by a child that is
root of nothing but a user namespace whose ids are the image block's, with the target as its root
directory; `complete` is written last, after which the tree never changes.

The owner `i` of an image's file is IMAGE_BASE + i on the disk.
"""

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from typing import Annotated, NoReturn

import msgspec
from msgspec import Meta

from sbxd.jail import syscalls
from sbxd.launcher.kernel import hostpaths, mounts, process, uids

DOCUMENT_BYTES_MAX = 4 * 1024 * 1024
LAYERS_MAX = 128
_CHUNK_BYTES = 256 * 1024
_COMPLETE = "complete"
_ROOTFS = "rootfs"
TAR = "application/vnd.oci.image.layer.v1.tar"
TAR_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
_STRICT = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS


class Descriptor(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """An OCI content descriptor, as far as it is used here."""

    media_type: str
    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    size: Annotated[int, Meta(ge=0, le=2**50)]


class Manifest(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """An OCI image manifest, as far as it is used here."""

    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], Meta(min_length=1, max_length=LAYERS_MAX)]


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
        blobs = os.open(
            f"{hostpaths.images_directory()}/blobs/sha256", os.O_DIRECTORY | os.O_CLOEXEC
        )
        try:
            manifest = read_manifest(blobs, image_digest)
            partial = f"{name}.partial"
            _remove(store, partial)
            _remove(store, name)  # without its marker it is a leftover
            os.mkdir(partial, 0o700, dir_fd=store)
            _extract_all(store, f"{partial}/{_ROOTFS}", blobs, manifest)
        finally:
            os.close(blobs)
        marker = os.open(
            f"{partial}/{_COMPLETE}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=store
        )
        os.fsync(marker)
        os.close(marker)
        os.rename(partial, name, src_dir_fd=store, dst_dir_fd=store)
        os.fsync(store)
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


def read_manifest(blobs: int, image_digest: str) -> Manifest:
    """The manifest, and a configuration that is there and right. Raises DigestMismatch."""
    raw = _document(blobs, image_digest, "manifest")
    manifest = msgspec.json.decode(raw, type=Manifest)
    for layer in manifest.layers:
        if layer.media_type not in (TAR, TAR_GZIP):
            raise ValueError("a layer is neither a tar nor a gzipped tar")
    _document(blobs, manifest.config.digest, "configuration")
    return manifest


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


def _extract_all(store: int, target: str, blobs: int, manifest: Manifest) -> None:
    os.mkdir(target, dir_fd=store)
    # Also when the layers say nothing of their root.
    os.chmod(target, 0o755, dir_fd=store)  # noqa: S103
    os.chown(target, uids.IMAGE_BASE, uids.IMAGE_BASE, dir_fd=store)
    root = os.open(target, os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=store)
    text = mounts.map_text([(0, uids.IMAGE_BASE, uids.IMAGE_BLOCK_SIZE)])
    namespace = mounts.user_namespace(text)
    try:
        for layer in manifest.layers:
            _extract(root, namespace, blobs, layer)
    finally:
        os.close(namespace)
        os.close(root)


def _extract(root: int, namespace: int, blobs: int, layer: Descriptor) -> None:
    """Feed one layer to a confined child and hash what it was fed."""
    blob = _open_blob(blobs, layer.digest)
    here, there = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(parent, root, namespace, here, layer.media_type)
    os.close(here)
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
    if digest.hexdigest() != hostpaths.digest_hex(layer.digest):
        raise DigestMismatch("layer")
    if status != 0:
        raise ValueError("a layer could not be extracted: it is damaged, unsafe or too large")


def _child(parent: int, root: int, namespace: int, source: int, media_type: str) -> NoReturn:
    try:
        from sbxd.launcher.kernel import image_tar

        # Above all the other end of the pipe: an end of file that is held open here never comes.
        process.close_all_but(root, namespace, source)
        os.umask(0o022)
        os.setgroups([])
        syscalls.setns(namespace, syscalls.CLONE_NEWUSER)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        process.die_with_parent(parent)
        os.fchdir(root)
        os.chroot(".")
        image_tar.extract(source, image_tar.Compression(media_type))
        image_tar.add_mount_points()
        os._exit(0)
    except BaseException as problem:
        os.write(2, f"image: {type(problem).__name__}: {problem}\n".encode())
        os._exit(1)
