"""Descriptors in flight (SCM_RIGHTS) on sockets that take none.

Whoever receives the bytes that a descriptor came with, without taking it, drops it; so does who
closes a socket in which it waits. The last drop of a TCP socket with SO_LINGER sleeps for as long
as its sender has set. So: an end refuses descriptors where the kernel can (SO_PASSRIGHTS, Linux
6.16; a connection inherits it from its listener at `connect`); elsewhere an end is looked into
(MSG_PEEK, which drops nothing) before it is received from, and before it is closed.

Invariant: nothing here sleeps, and nothing here drops a descriptor. What to do with an end in which
one waits is up to the caller: `sbxd.closing`, or a child that ends.

Source: decision 0180.
"""

import errno
import socket
from contextlib import suppress
from typing import Final

SO_PASSRIGHTS: Final = 83  # socket(7); of every architecture that is supported
LOOK_BYTES: Final = 64 * 1024


class DescriptorsSent(OSError):
    """A descriptor waits in this end: neither receive from it nor close it where nothing may
    wait."""

    def __init__(self) -> None:
        super().__init__(errno.EPROTO, "the peer sent descriptors, which are not taken here")


def refuse(end: socket.socket) -> bool:
    """Take no descriptors from now on. False where the kernel cannot; what waits already stays.

    Out-of-band data is read in line, so that `look` sees what a receive would drop.
    """
    if end.type == socket.SOCK_STREAM:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
    try:
        end.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
    except OSError as problem:
        if problem.errno != errno.ENOPROTOOPT:
            raise
        return False
    return True


def admit(accepted: socket.socket) -> bool:
    """Refuse descriptors on a connection that was accepted. Whether it has done so since its
    `connect`: then none can wait in it, and it needs no look."""
    try:
        is_born_refusing = not accepted.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
    except OSError:
        is_born_refusing = False
    refuse(accepted)
    return is_born_refusing


def look(end: socket.socket, size: int) -> int:
    """How many of the next `size` bytes may be received without dropping a descriptor; 0 at the
    end of file. Raises DescriptorsSent, BlockingIOError, OSError."""
    raw, _control, flags, _address = end.recvmsg(size, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    if flags & socket.MSG_CTRUNC:
        raise DescriptorsSent
    return len(raw)


def receive(end: socket.socket, size: int) -> bytes:
    """At most `size` bytes of a stream; b"" at the end. Raises as `look`."""
    return end.recv(look(end, size))


def is_clear(end: socket.socket) -> bool:
    """Shut a stream down and empty it. Whether it may now be closed: False when a descriptor may
    wait in it. Nothing can be added once it is shut down, so this ends."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    while True:
        try:
            if not receive(end, LOOK_BYTES):
                return True
        except DescriptorsSent:
            return False
        except ConnectionResetError:
            continue  # said once; what waits is behind it
        except OSError as problem:
            return problem.errno in (errno.ENOTCONN, errno.EINVAL)  # nobody was ever connected
