"""The workspace volume of one environment: limited in bytes and inodes, erased as a whole.

One interface over two kinds. `quota`: a directory under a project quota (xfs or ext4 mounted with
prjquota, enforced). `loop`: an ext4 image with its space reserved. Which one is decided by what
the volumes directory can enforce, never by guessing; there is no third kind without limits.

Invariants: a volume is handed out as a detached mount and attached nowhere by this module; its
on-disk ids are 0, 10001, 20002; space is never promised twice; no process of the initial user
namespace writes to a volume once it has been handed out (erasing is removal, without following
anything). Entries of the volumes directory start with the environment's id: `<id>` is a quota
directory, `<id>.img` a loop image.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sbxd.launcher.kernel import free_space, hostpaths, loop_image, mounts, project_quota
from sbxd.launcher.requests import VOLUME_QUOTA, VolumeSize

QUOTA = VOLUME_QUOTA
LOOP = "loop"


@dataclass(frozen=True)
class VolumeHandle:
    """kind: QUOTA or LOOP. mount_fd: the detached mount, owned by the caller."""

    kind: str
    mount_fd: int


def create(environment_id: str, size: VolumeSize) -> VolumeHandle:
    """Make the volume. After a failure nothing of it is left.

    A loop volume holds at least `size`, and not more than the rounding of ext4's groups above it.

    Raises OSError: ENOSPC when the space is not there or is promised to others, EEXIST when the
    environment has a volume, EIO when a tool fails.
    """
    name = hostpaths.volume_name(environment_id)
    with _directory() as directory:
        if project_quota.is_enforced(directory):
            with free_space.exclusive(directory):
                made = VolumeHandle(QUOTA, project_quota.create(directory, name, size))
        else:
            made = VolumeHandle(LOOP, loop_image.create(directory, name, size))
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


def erase(environment_id: str) -> None:
    """Remove the volume of an environment that is proven dead. Idempotent. Raises OSError.

    A loop image's space is free once the kernel has dropped its last mount.
    """
    name = hostpaths.volume_name(environment_id)
    with _directory() as directory:
        loop_image.erase(directory, name)
        project_quota.erase(directory, name)


@contextmanager
def _directory() -> Iterator[int]:
    descriptor = hostpaths.private_directory(hostpaths.volumes_directory())
    try:
        yield descriptor
    finally:
        os.close(descriptor)
