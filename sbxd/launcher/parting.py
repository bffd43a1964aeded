"""Closes a connection without waiting, whatever waits in it.

Descriptors that a peer sent and nobody took are dropped by who closes last, and the drop of a
lingering one sleeps; but not in a process that ends. So a child has a copy, the launcher closes
first, and the child ends (decision 0180).
"""

import os
import socket

from sbxd.launcher.kernel import process


def close(end: socket.socket) -> int:
    """Close the end; the pid of the child that closes it last, to be reaped by the caller. Raises
    OSError when the machine has no room for a child: it is open then."""
    wait, go = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            try:
                process.close_all_but(end.fileno(), wait)
                os.read(wait, 1)
            finally:
                os._exit(0)
        end.close()
    finally:
        os.close(wait)
        os.close(go)
    return pid
