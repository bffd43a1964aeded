"""The few things that the proxy does with a stream socket, on trio's event loop.

Invariants: every socket here is non-blocking; a socket is closed by whoever waits on it and never
while another task does. Deliberately absent: names (addresses are literal), TLS.
"""

import errno
import os
import socket
import struct
from contextlib import suppress

import trio

# The host is short of something that other connections will give back; and what accept(2) reports
# of a connection that broke before it was taken.
ACCEPT_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
ACCEPT_BROKEN = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EPERM})

_RESET = struct.pack("ii", 1, 0)


class PeerMismatch(OSError):
    """A connected socket's peer is not who was dialled."""


async def receive(sock: socket.socket, size: int) -> bytes:
    """At most `size` bytes; b"" at the end of the stream. Raises OSError."""
    while True:
        try:
            return sock.recv(size)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Send everything. Raises OSError. Cancellation: some of it may have been sent."""
    left = memoryview(data)
    while left:
        try:
            left = left[sock.send(left) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


async def dial(address: str, port: int) -> socket.socket:
    """A connection to a literal address, and to no other.

    Raises:
        ValueError: it is not a literal address.
        PeerMismatch: the kernel names another peer.
        OSError: it could not be connected.

    Cancellation: nothing is left behind.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wanted = packed(family, address)
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        try:
            sock.connect((address, port))
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)
            problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                raise OSError(problem, os.strerror(problem)) from None
        require_peer(sock.getpeername(), family=family, wanted=wanted, port=port)
        without_delay(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def packed(family: int, address: str) -> bytes:
    """A literal address as the kernel has it. Raises ValueError."""
    try:
        return socket.inet_pton(family, address)
    except OSError:
        raise ValueError(f"{address!a} is not a literal address") from None


def require_peer(peer: tuple[object, ...], *, family: int, wanted: bytes, port: int) -> None:
    """Raises PeerMismatch unless getpeername(2) names this address and port."""
    found, found_port = str(peer[0]), peer[1]
    try:
        same = packed(family, found) == wanted and found_port == port
    except ValueError:  # with a zone, for one
        same = False
    if not same:
        raise PeerMismatch(errno.EHOSTUNREACH, "connected to another peer than was dialled")


def without_delay(sock: socket.socket) -> None:
    """What is sent goes out at once: the proxy adds no waiting of its own."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def reset(sock: socket.socket) -> None:
    """Close so that the peer sees a broken connection, never a proper end."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
