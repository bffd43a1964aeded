"""openat2 for a directory of this host: nothing outside of it is ever opened.

Invariants: every path is resolved by the kernel from a descriptor of the root, beneath it, through
no symbolic link, no magic link and no mount point; a kernel that has no openat2 is a refusal, and
there is no second way. Blocking; the caller keeps it off the event loop.
"""

import ctypes
import errno
import os
import platform
import stat
import struct

from sbxd.port.errors import WorkspaceCode, WorkspaceError, WorkspaceEscape

_OPENAT2 = 437
_MACHINES = ("x86_64", "aarch64")
_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08  # NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH
_RETRIES = 64
_LIBC = ctypes.CDLL(None, use_errno=True)
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
# Non-blocking: a FIFO or a lease must not hold a thread.
OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_ESCAPES = (errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG, errno.EAGAIN)
_CODES = {
    errno.ENOENT: WorkspaceCode.NOT_FOUND,
    errno.ENOTDIR: WorkspaceCode.NOT_FOUND,
    errno.EISDIR: WorkspaceCode.IS_A_DIRECTORY,
    errno.ENOSPC: WorkspaceCode.NO_SPACE,
    errno.EDQUOT: WorkspaceCode.NO_SPACE,
    errno.EFBIG: WorkspaceCode.NO_SPACE,
}
_TEXTS = {
    WorkspaceCode.NOT_FOUND: "there is no such file",
    WorkspaceCode.IS_A_DIRECTORY: "a directory",
    WorkspaceCode.NO_SPACE: "the workspace is full",
    WorkspaceCode.REFUSED: "the file system refuses it",
}


class ContainmentUnavailable(Exception):
    """This kernel cannot hold a path beneath a directory, so no directory is opened at all."""


def probe(directory: int) -> None:
    """Raises ContainmentUnavailable unless the kernel does what this module needs."""
    if platform.machine() not in _MACHINES:
        raise ContainmentUnavailable(f"openat2 is known here on {', '.join(_MACHINES)} only")
    try:
        os.close(open_beneath(directory, b".", OPEN_PATH))
    except OSError as problem:
        name = errno.errorcode.get(problem.errno or 0, "?")
        raise ContainmentUnavailable(f"openat2 does not work here ({name})") from None


def open_beneath(directory: int, path: bytes, flags: int, mode: int = 0) -> int:
    """openat2 with all the rules. Raises OSError (ELOOP or EXDEV where a rule was broken)."""
    how = struct.pack("=QQQ", flags, mode, _RESOLVE)
    number = 0
    for _ in range(_RETRIES):
        descriptor = int(_LIBC.syscall(_OPENAT2, directory, path, how, len(how)))
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number))


def refusal(problem: OSError) -> WorkspaceError | WorkspaceEscape:
    """What a failed system call means to the one who asked; without the path."""
    if problem.errno in _ESCAPES:
        return WorkspaceEscape("the path leads through a link or out of the workspace")
    code = _CODES.get(problem.errno or 0, WorkspaceCode.REFUSED)
    return WorkspaceError(code, _TEXTS[code])


def open_regular(root: int, path: bytes) -> tuple[int, os.stat_result]:
    """A regular file with one name, open for reading, and its state; the caller closes it.

    Raises: WorkspaceError (NOT_FOUND, IS_A_DIRECTORY, NOT_A_FILE, HARD_LINKED, REFUSED);
    WorkspaceEscape.
    """
    try:
        found = open_beneath(root, path, OPEN_PATH)
    except OSError as problem:
        raise refusal(problem) from None
    try:
        seen = os.fstat(found)
        if stat.S_ISDIR(seen.st_mode):
            raise WorkspaceError(WorkspaceCode.IS_A_DIRECTORY, "a directory")
        if not stat.S_ISREG(seen.st_mode):
            raise WorkspaceError(WorkspaceCode.NOT_A_FILE, "not a regular file")
        if seen.st_nlink > 1:
            # Its other name may be anywhere on the file system.
            raise WorkspaceError(WorkspaceCode.HARD_LINKED, "the file has a second name")
        return _reopen(root, path, seen)
    finally:
        os.close(found)


def _reopen(root: int, path: bytes, seen: os.stat_result) -> tuple[int, os.stat_result]:
    try:
        descriptor = open_beneath(root, path, OPEN_FILE)
    except OSError as problem:
        if problem.errno == errno.EAGAIN:
            raise WorkspaceError(WorkspaceCode.REFUSED, "the file is held by a lease") from None
        raise refusal(problem) from None
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino, status.st_nlink) == (seen.st_dev, seen.st_ino, 1):
        return descriptor, status
    os.close(descriptor)
    raise WorkspaceError(WorkspaceCode.CHANGED_DURING_READ, "the file changed while it was opened")
