"""What volumes may take of the state directory's file system, counted by one helper at a time.

Invariants: a margin is never taken, so that the creation journal, the audit's spool and the image
store, which lie on the same file system, go on being written while volumes fill it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

MARGIN_BYTES = 64 * 1024 * 1024
MARGIN_INODES = 1024


def free(directory: int) -> tuple[int, int]:
    """Bytes and inodes beyond the margin; negative when the margin is touched."""
    status = os.fstatvfs(directory)
    return status.f_bavail * status.f_frsize - MARGIN_BYTES, status.f_favail - MARGIN_INODES


@contextmanager
def exclusive(directory: int) -> Iterator[None]:
    """One helper at a time counts what is free and takes of it."""
    fcntl.flock(directory, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(directory, fcntl.LOCK_UN)
