"""The bridge's socket: the one place in an environment that leads to the worker's side.

Invariants: it is bound before any command exists, in a /dev that is then made read-only, so no
command can remove it, replace it or change its mode; a connect needs no more than its write bit,
which is all that it has. Where the kernel can (6.16), no descriptors pass through it. Bound is
not listening: until the daemon, which alone holds the descriptor afterwards, listens on it, a
connect is refused by the kernel.

Deliberately absent: listening, accepting, and any notion of what is said.
"""

import errno
import os
import socket
from typing import Final

NAME: Final = "sbx-bridge"  # in the environment's /dev
_MODE: Final = 0o222
_SO_PASSRIGHTS: Final = 83


def bind(directory_fd: int) -> int:
    """Bind a stream socket in a directory that is writable still; the caller owns the descriptor.

    Changes the working directory to `/`.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            end.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        except OSError as problem:
            if problem.errno != errno.ENOPROTOOPT:
                raise
        os.fchdir(directory_fd)
        end.bind(NAME)
        os.chdir("/")
        os.chmod(NAME, _MODE, dir_fd=directory_fd)
        return end.detach()
    finally:
        end.close()
