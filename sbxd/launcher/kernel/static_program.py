"""Static programs in sealed memfds: they need nothing of any file system, and start without a copy
of the launcher's memory.

Invariant: what is executed is a constant of this package for each machine that the jail knows, or
the program that the package brings compiled.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Mapping
from typing import Final

from sbxd.launcher.kernel import hostpaths

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


def command() -> int:
    """guest/init.c, compiled, in a sealed memfd that commands may execute and not read: a process
    of a program that it cannot read is not dumpable. The caller owns the descriptor.

    Raises OSError: it is not compiled.
    """
    with open(hostpaths.guest_init(), "rb") as file:
        return sealed("sbx-command", file.read(), mode=0o111)


def sealed(name: str, content: bytes, *, mode: int = 0o555) -> int:
    """A program in a sealed memfd; the caller owns the descriptor. Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_EXEC)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # before Linux 6.3 every memfd may be executed
            raise
        descriptor = os.memfd_create(name, flags)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.fchmod(descriptor, mode)
    fcntl.fcntl(
        descriptor,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
    )
    return descriptor
