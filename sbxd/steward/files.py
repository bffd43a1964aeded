"""Open what a path of the workspace names, and nothing else whatever the path turns into.

Invariants: every path is resolved by openat2 from a descriptor of the workspace's root, beneath
it, through no symbolic link, no magic link and no mount point; a file is opened for reading only
after an O_PATH descriptor has shown a regular file, without blocking, and is compared with that
descriptor afterwards; nothing here opens a FIFO, a socket or a device, or maps a file.
"""

import ctypes
import errno
import os
import platform
import stat
import struct

from sbxd.steward.frames import STAMP_BYTES, Status

_OPENAT2 = 437  # the same number on every machine that the jail knows
_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08  # NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH
_RESOLVE_UP = 0x01 | 0x02 | 0x04
_RETRIES = 64
_STAMP = struct.Struct("=QQQqq")
_LIBC = ctypes.PyDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
)

# Without O_NOFOLLOW, which would turn the refusal of a link (ELOOP) into something else.
OPEN_PATH = os.O_PATH | os.O_CLOEXEC
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

if platform.machine() not in ("x86_64", "aarch64"):
    raise ImportError(f"the steward knows x86_64 and aarch64, not {platform.machine()}")

_STATUS = {
    errno.ENOENT: Status.NOT_FOUND,
    errno.ENOTDIR: Status.NOT_FOUND,
    errno.ELOOP: Status.ESCAPE,
    errno.EXDEV: Status.ESCAPE,
    errno.ENAMETOOLONG: Status.ESCAPE,
    errno.EAGAIN: Status.ESCAPE,  # the tree kept changing under the resolution
    errno.EISDIR: Status.IS_A_DIRECTORY,
    errno.ENOSPC: Status.NO_SPACE,
    errno.EDQUOT: Status.NO_SPACE,
    errno.EFBIG: Status.NO_SPACE,
}


class Refusal(Exception):
    """The request ends with this status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


def refusal(problem: OSError) -> Refusal:
    """What a failed system call means to the one who asked."""
    return Refusal(_STATUS.get(problem.errno or 0, Status.REFUSED))


def open_beneath(directory: int, path: bytes, flags: int, mode: int = 0) -> int:
    """openat2 with all the rules. Raises OSError (ELOOP or EXDEV where a rule was broken)."""
    return _openat2(directory, path, flags, mode, _RESOLVE)


def open_parent(directory: int) -> int:
    """The directory above. The caller proves that it is the one that it came from."""
    return _openat2(directory, b"..", OPEN_DIRECTORY, 0, _RESOLVE_UP)


def _openat2(directory: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags, mode, resolve)
    number = 0
    for _ in range(_RETRIES):
        descriptor = int(_LIBC.syscall(_OPENAT2, directory, path, how, len(how)))
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number))


def open_regular(root: int, path: bytes) -> tuple[int, os.stat_result]:
    """A regular file, open for reading, and its state; the caller closes it.

    Raises Refusal: NOT_FOUND, IS_A_DIRECTORY, NOT_A_FILE, ESCAPE, REFUSED.
    """
    try:
        found = open_beneath(root, path, OPEN_PATH)
        try:
            seen = os.fstat(found)
            if stat.S_ISDIR(seen.st_mode):
                raise Refusal(Status.IS_A_DIRECTORY)
            if not stat.S_ISREG(seen.st_mode):
                raise Refusal(Status.NOT_A_FILE)
            return _reopen(root, path, seen)
        finally:
            os.close(found)
    except OSError as problem:
        raise refusal(problem) from None


def _reopen(root: int, path: bytes, seen: os.stat_result) -> tuple[int, os.stat_result]:
    try:
        descriptor = open_beneath(root, path, OPEN_FILE)
    except OSError as problem:
        if problem.errno in (errno.EAGAIN, errno.ENXIO, errno.EACCES, errno.EPERM):
            raise Refusal(Status.REFUSED) from None  # a lease, or no longer a regular file
        raise
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) == (seen.st_dev, seen.st_ino):
        return descriptor, status
    os.close(descriptor)
    raise Refusal(Status.CHANGED_DURING_READ)


def open_directory(root: int, path: bytes) -> int:
    """A directory, open for listing; the caller closes it.

    Raises Refusal: NOT_FOUND, NOT_A_DIRECTORY, ESCAPE, REFUSED.
    """
    try:
        found = open_beneath(root, path, OPEN_PATH)
        try:
            if not stat.S_ISDIR(os.fstat(found).st_mode):
                raise Refusal(Status.NOT_A_DIRECTORY)
        finally:
            os.close(found)
        return open_beneath(root, path, OPEN_DIRECTORY)
    except OSError as problem:
        raise refusal(problem) from None


def open_container(root: int, path: bytes) -> tuple[int, bytes]:
    """The directory that holds the last component, and that component; the caller closes it.

    Raises Refusal: NOT_FOUND, ESCAPE, REFUSED.
    """
    above, _, name = path.rpartition(b"/")
    try:
        return open_beneath(root, above or b".", OPEN_DIRECTORY), name
    except OSError as problem:
        raise refusal(problem) from None


def stamp(status: os.stat_result) -> bytes:
    """Identity and state of a file, for comparison."""
    raw = _STAMP.pack(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )
    assert len(raw) == STAMP_BYTES
    return raw


def usage(root: int) -> tuple[int, int]:
    """Bytes and inodes in use, as the volume's own limits count them."""
    status = os.fstatvfs(root)
    return (
        (status.f_blocks - status.f_bfree) * status.f_frsize,
        status.f_files - status.f_ffree,
    )


def volume_bytes(root: int) -> int:
    """How much the volume can hold (a quota is shown as a size)."""
    status = os.fstatvfs(root)
    return status.f_blocks * status.f_frsize
