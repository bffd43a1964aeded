"""The workspace's volume as the daemon holds it: one O_PATH descriptor, of which it asks numbers.

Invariants: fstat and fstatvfs are all that is ever done with the descriptor: nothing is opened,
looked up or walked through it. The numbers are the kernel's, shaped by no process of the sandbox.
The volume's root keeps its device and inode for as long as the environment lives, and the steward
walks the same.
"""

import os

from sbxd.mechanism.protocol import MechanismError, VolumeReading, WorkspaceChanged

Identity = tuple[int, int]  # device, inode


class Volume:
    """Borrows the descriptor. Its identity is that of the moment of construction."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        root = os.fstat(descriptor)
        self._identity: Identity = (root.st_dev, root.st_ino)

    def read(self) -> VolumeReading:
        """How full it is now. Raises MechanismError."""
        try:
            status = os.fstatvfs(self._descriptor)
        except OSError as problem:
            raise MechanismError("volume", problem.errno or 0) from None
        return VolumeReading(
            bytes_left=status.f_bavail * status.f_frsize,
            bytes_used=(status.f_blocks - status.f_bfree) * status.f_frsize,
            bytes_total=status.f_blocks * status.f_frsize,
            inodes_left=status.f_favail,
            inodes_total=status.f_files,
        )

    def check(self, walked: Identity) -> None:
        """That the root which the steward walks is the one that was prepared, and that this one
        still has its place. Raises WorkspaceChanged, MechanismError."""
        try:
            root = os.fstat(self._descriptor)
        except OSError as problem:
            raise MechanismError("volume", problem.errno or 0) from None
        if (root.st_dev, root.st_ino) != self._identity or root.st_nlink == 0:
            raise WorkspaceChanged("volume", 0, "the volume's root is another, or removed")
        if walked != self._identity:
            raise WorkspaceChanged("volume", 0, "the steward walks another volume")
