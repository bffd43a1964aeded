"""What a command may do with files, by Landlock: a further wall behind the mounts.

Invariants: everything below the root may be read and executed, and written only where the mounts
are writable too; devices cannot be made; of signals and abstract sockets a command reaches only
those of its own domain, which is its process tree. The ruleset is made once, by init, whose root
is the image already; a command takes it on itself.

Deliberately absent: rules on TCP (there is one loopback, and an interface that nothing leaves by),
and Landlock's version 1, under which a rename between two directories fails always.
"""

import os
from typing import Final

from sbxd.jail import mounts, syscalls

VERSION_MIN: Final = 2

_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_MAKE_CHAR: Final = 1 << 6
_MAKE_BLOCK: Final = 1 << 11
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
_SCOPE_ABSTRACT_UNIX_SOCKET: Final = 1 << 0
_SCOPE_SIGNAL: Final = 1 << 1
# the first version that knows each right from the 13th on
_SINCE: Final = ((2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEV))

_READABLE: Final = _EXECUTE | _READ_FILE | _READ_DIR
_WRITABLE: Final = ((1 << 15) - 1) & ~(_MAKE_CHAR | _MAKE_BLOCK)
_DEVICE: Final = _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
# below the root
RULES: Final[tuple[tuple[str, int], ...]] = (
    (".", _READABLE),
    ("workspace", _WRITABLE),
    ("tmp", _WRITABLE),
    ("dev/shm", _WRITABLE),
    ("proc", _WRITE_FILE | _TRUNCATE),  # what of it may be written is the owner's alone
    *((f"dev/{name}", _DEVICE) for name in mounts.DEVICES),
)


def handled(version: int) -> int:
    """The rights on files that a kernel of this version can withhold, and we know of."""
    known = (1 << 13) - 1
    for since, right in _SINCE:
        known |= right if version >= since else 0
    return known


def scoped(version: int) -> int:
    """What is confined to the own domain: nothing before version 6."""
    return _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL if version >= 6 else 0


def make_ruleset(version: int) -> int:
    """The ruleset of a command, for this root; the caller owns the descriptor."""
    files = handled(version)
    ruleset = syscalls.landlock_create_ruleset(files, 0, scoped(version))
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path, rights in RULES:
            place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
            try:
                syscalls.landlock_add_path(ruleset, place, rights & files)
            finally:
                os.close(place)
    except OSError:
        os.close(ruleset)
        raise
    finally:
        os.close(root)
    return ruleset
