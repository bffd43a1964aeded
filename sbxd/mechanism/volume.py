"""The workspace's volume as the daemon holds it: one O_PATH descriptor, of which it asks numbers.

Invariants: fstat and fstatvfs are all that can be done with the descriptor: it is of a directory
around the workspace that root alone may enter, or of a file without a name. The numbers are the
kernel's, shaped by no process of the sandbox. The workspace's root keeps its device and inode for
as long as the environment lives, and the steward walks the same.
"""

import os

from sbxd.mechanism.protocol import MechanismError, VolumeReading, WorkspaceChanged

Identity = tuple[int, int]  # device, inode


class Volume:
    """Borrows the descriptor. identity: of the workspace's root, by the launcher's word."""

    def __init__(self, descriptor: int, identity: Identity) -> None:
        self._descriptor = descriptor
        self._identity = identity
        self._found = self._look()

    def _look(self) -> tuple[int, int, int]:
        """What changes when the descriptor is another, or the workspace leaves its place."""
        found = os.fstat(self._descriptor)
        return found.st_dev, found.st_ino, found.st_nlink

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
            found = self._look()
        except OSError as problem:
            raise MechanismError("volume", problem.errno or 0) from None
        if found != self._found:
            raise WorkspaceChanged("volume", 0, "the volume's root is another, or removed")
        if walked != self._identity:
            raise WorkspaceChanged("volume", 0, "the steward walks another volume")
