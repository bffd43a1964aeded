"""Unpacked images: extracted once from verified blobs of the store, shared read-only by all.

Invariants: an image is published only when it is whole; `complete` is written last, after which the
tree never changes. What failed is removed at once, what was killed when it is next asked for:
nothing half-unpacked is ever mounted. Nothing here reads what an image says: `launcher.unpacker`
has that done by a confined process.

The owner `i` of an image's file is IMAGE_BASE + i on the disk.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress

from sbxd.jail import syscalls
from sbxd.launcher.kernel import hostpaths, mounts, uids

_COMPLETE = "complete"
_ROOTFS = "rootfs"


def mount(image_digest: str) -> int:
    """A detached mount of the unpacked image, read-only, nosuid, nodev; the caller owns it.

    Raises FileNotFoundError when the image is not unpacked.
    """
    store = hostpaths.private_directory(hostpaths.unpacked_directory())
    try:
        name = hostpaths.digest_hex(image_digest)
        os.stat(f"{name}/{_COMPLETE}", dir_fd=store, follow_symlinks=False)
        flags = os.O_DIRECTORY | os.O_RDONLY
        root = syscalls.openat2(store, f"{name}/{_ROOTFS}".encode(), flags, hostpaths.STRICT)
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


def publish(image_digest: str, fill: Callable[[int], None]) -> None:
    """Have `fill` lay the image into an empty directory, whose descriptor it borrows, and publish
    it. Idempotent. Raises OSError, and what `fill` raises; then nothing is left."""
    name = hostpaths.digest_hex(image_digest)
    store = hostpaths.private_directory(hostpaths.unpacked_directory())
    try:
        if _is_complete(store, name):
            return
        partial = f"{name}.partial"
        _remove(store, partial)
        _remove(store, name)  # without its marker it is a leftover
        try:
            os.mkdir(partial, 0o700, dir_fd=store)
            _fill(store, f"{partial}/{_ROOTFS}", fill)
            syscalls.syncfs(store)  # the marker must not outlast what it vouches for
            marker = os.open(
                f"{partial}/{_COMPLETE}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=store
            )
            os.fsync(marker)
            os.close(marker)
            os.rename(partial, name, src_dir_fd=store, dst_dir_fd=store)
            os.fsync(store)
        except BaseException:
            _remove(store, partial)
            raise
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


def _fill(store: int, target: str, fill: Callable[[int], None]) -> None:
    os.mkdir(target, dir_fd=store)
    # Also when the layers say nothing of their root.
    os.chmod(target, 0o755, dir_fd=store)  # noqa: S103
    os.chown(target, uids.IMAGE_BASE, uids.IMAGE_BASE, dir_fd=store)
    root = os.open(target, os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=store)
    try:
        fill(root)
    finally:
        os.close(root)


def _is_complete(store: int, name: str) -> bool:
    try:
        os.stat(f"{name}/{_COMPLETE}", dir_fd=store, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove(store: int, name: str) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(name, dir_fd=store)
