"""Programs of some hundred bytes, made here: static, from a sealed memfd, so that they need nothing
of any file system and start without a copy of the launcher's memory.

Invariant: what is executed is a constant of this package, for each machine that the jail knows.
"""

import errno
import fcntl
import os
import platform
import struct
from collections.abc import Mapping
from typing import Final

_MFD_EXEC: Final = 0x10
_LOAD_ADDRESS: Final = 0x40_0000
_HEADERS: Final = 64 + 56
# By the name of the machine: its number in an ELF header, and its code.
Code = Mapping[str, tuple[int, bytes]]


def image(machine: str, code: Code) -> bytes:
    """A static ELF program that runs this code. Raises KeyError."""
    number, text = code[machine]
    size = _HEADERS + len(text)
    entry = _LOAD_ADDRESS + _HEADERS
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<HHIQQQIHHHHHH", 2, number, 1, entry, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _LOAD_ADDRESS, _LOAD_ADDRESS, size, size, 0x1_0000)
    return ident + header + segment + text


def sealed(name: str, code: Code) -> int:
    """The program for this machine in a sealed memfd; the caller owns the descriptor."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_EXEC)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # before Linux 6.3 every memfd may be executed
            raise
        descriptor = os.memfd_create(name, flags)
    os.write(descriptor, image(platform.machine(), code))
    os.fchmod(descriptor, 0o555)
    fcntl.fcntl(
        descriptor,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
    )
    return descriptor
