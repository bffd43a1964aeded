"""The AppArmor label that the next program of this process runs under.

Invariants: the word is written to the kernel and to nothing else: the descriptor is of the proc
file system, no link is followed on the way and no mount crossed (an image or a mount could put
another file there); and what was written is read back.
"""

import errno
import os

from sbxd.jail import syscalls

_STRICT = (
    syscalls.RESOLVE_BENEATH
    | syscalls.RESOLVE_NO_SYMLINKS
    | syscalls.RESOLVE_NO_MAGICLINKS
    | syscalls.RESOLVE_NO_XDEV
)


def set_label_on_exec(label: str) -> None:
    """Have the kernel change to this profile at the next exec. Raises OSError."""
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if syscalls.fstatfs_type(proc) != syscalls.PROC_SUPER_MAGIC:
            raise OSError(errno.EXDEV, "the file system is not proc", "fstatfs")
        path = b"%d/attr/apparmor/exec" % os.getpid()
        attribute = syscalls.openat2(proc, path, os.O_RDWR, _STRICT)
    finally:
        os.close(proc)
    try:
        os.write(attribute, f"exec {label}".encode())
        found = os.pread(attribute, 256, 0).rstrip(b"\0\n").decode()
    finally:
        os.close(attribute)
    if found != f"{label} (enforce)":
        raise OSError(errno.EPERM, f"the label on exec reads back as {found}", "pread")
