"""The workspace volume of one environment: limited in bytes and inodes, detached as a whole.

One interface over two kinds. `quota`: a directory under a project quota (xfs or ext4 mounted with
prjquota, enforced). `loop`: an ext4 image with its space reserved. Which one is decided by what
the volumes directory can enforce, never by guessing; there is no third kind without limits.

Invariants: a volume is handed out as a detached mount and attached nowhere by this module; its
on-disk ids are 0, 10001, 20002; space is never promised twice; no process of the initial user
namespace writes to a volume once it has been handed out (erasing is removal, without following
anything). Entries of the volumes directory start with the environment's id: `<id>` is a quota
directory with the workspace in it, `<id>.img` a loop image. `erasing` holds the quota directories
of the dead, whose projects go on counting until `sbxd.launcher.kernel.erasure` has removed them.
"""

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from sbxd.launcher.kernel import erasure, free_space, hostpaths, loop_image, mounts, project_quota
from sbxd.launcher.requests import VOLUME_QUOTA, VolumeSize

QUOTA = VOLUME_QUOTA
LOOP = "loop"


# What holds no more than this is erased where it is detached, which is quicker than to queue. Names
# are counted, not inodes: one file can have any number of them.
AT_ONCE_ENTRIES = 64
AT_ONCE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class VolumeHandle:
    """kind: QUOTA or LOOP. mount_fd: the detached mount of the workspace. numbers_fd: O_PATH, for
    fstat and fstatvfs; nothing of the workspace is reached through it without root's rights.
    identity: the device and inode of the workspace's root. The caller owns the descriptors."""

    kind: str
    mount_fd: int
    numbers_fd: int
    identity: tuple[int, int]


def create(environment_id: str, size: VolumeSize) -> VolumeHandle:
    """Make the volume. What a failure leaves, `detach` removes.

    A loop volume holds at least `size`, and not more than the rounding of ext4's groups above it.

    Raises OSError: ENOSPC when the space is not there or is promised to others, EEXIST when the
    environment has a volume, EIO when a tool fails.
    """
    name = hostpaths.volume_name(environment_id)
    with _directory() as directory:
        kind = QUOTA if project_quota.is_enforced(directory) else LOOP
        if kind == QUOTA:
            with free_space.exclusive(directory):
                mount, numbers = project_quota.create(directory, name, size)
        else:
            mount, numbers = loop_image.create(directory, name, size)
    root = os.fstat(mount)
    made = VolumeHandle(kind, mount, numbers, (root.st_dev, root.st_ino))
    # A copy of the host's mount would else go on receiving what the host mounts there.
    mounts.restrict(made.mount_fd, mounts.NOSUID | mounts.NODEV)
    return made


def resize(environment_id: str, size: VolumeSize) -> None:
    """Change the limits of a QUOTA volume.

    Raises OSError: ENOSPC when they are above what is left, EOPNOTSUPP for a loop volume,
    ENOENT when there is none.
    """
    name = hostpaths.volume_name(environment_id)
    with _directory() as directory:
        if loop_image.exists(directory, name):
            raise OSError(errno.EOPNOTSUPP, "a loop volume has the size that it was made with")
        with free_space.exclusive(directory):
            project_quota.resize(directory, name, size)


def detach(environment_id: str, party: int = 0) -> bool:
    """Take the volume of an environment that is proven dead away; whether something is left to be
    erased. Its time does not grow with what the volume holds. Idempotent. Raises OSError.

    party: whom it is erased for; parties take turns. A loop image's space is free once the kernel
    has dropped its last mount.
    """
    name = hostpaths.volume_name(environment_id)
    with _directory() as directory, _erasing() as erasing:
        loop_image.erase(directory, name)
        # The end of the name is for an id that is used twice.
        target = f"{party:08x}-{name}-{os.urandom(4).hex()}"
        held = project_quota.detach(directory, name, erasing, target)
        if held is None:
            return False
        if held.bytes_used <= AT_ONCE_BYTES:
            with (
                suppress(OSError),  # no failure to erase is one to end: it is left to the eraser
                closing(erasure.remove(erasing, os.fsencode(target))) as steps,
            ):
                for _ in itertools.islice(steps, AT_ONCE_ENTRIES):
                    pass
        return target in os.listdir(erasing)


def held_by_erasing() -> tuple[int, int]:
    """How many volumes are to be erased, and how many bytes they use. Raises OSError."""
    with _erasing() as erasing:
        return project_quota.held(erasing)


@contextmanager
def _erasing() -> Iterator[int]:
    descriptor = hostpaths.private_directory(hostpaths.erasing_directory())
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _directory() -> Iterator[int]:
    descriptor = hostpaths.private_directory(hostpaths.volumes_directory())
    try:
        yield descriptor
    finally:
        os.close(descriptor)
