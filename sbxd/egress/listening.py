"""A bound socket that listens at times, and is nobody else's in between.

Theory: on Linux shutdown(2) of a listening TCP socket takes it back to bound: waiting connections
are reset, new ones refused, the address kept. A later listen(2) needs SO_REUSEADDR, since ended
connections may still hold the port (FIN_WAIT, TIME_WAIT). But two sockets with SO_REUSEADDR, none
of which listens, may be bound to one address, and the first to listen has it: a workload in the
same network could take the place of its proxy while that is silent. So the option is set for the
time of listening alone, when the kernel refuses any second bind, and taken off before it ends.

Invariants: the address never changes (a port that the kernel chose is lost by shutdown(2), so the
socket has to be bound to a port by number; `begin` proves it); `end` always leaves a socket that
does not listen. SO_REUSEPORT, which lets sockets share an address, is refused.
"""

import errno
import socket
from contextlib import suppress
from typing import Protocol

import trio

from sbxd.egress.sockets import ACCEPT_BROKEN, ACCEPT_SHORTAGES

ACCEPT_PAUSE_SECONDS = 0.1
BACKLOG = 128  # connections that the kernel keeps for later


class ListenerUnusable(Exception):
    """The socket that was handed over cannot serve: a fault of who made it, or of the kernel."""


class Door(Protocol):
    """Where a proxy's clients come from. `begin` and `end` alternate, and neither blocks."""

    def begin(self) -> None:
        """Clients may come from now on. Raises ListenerUnusable."""
        ...

    async def accept(self) -> socket.socket:
        """The next one, non-blocking. Ends by cancellation."""
        ...

    def end(self) -> None:
        """No client comes in any more; those who have, stay."""
        ...

    def close(self) -> None:
        """Give it up. Safe to call again."""
        ...


class Listening:
    """Takes over a bound TCP socket that does not listen."""

    def __init__(self, sock: socket.socket, *, backlog: int = BACKLOG) -> None:
        """Raises ListenerUnusable; the socket is then still the caller's."""
        if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
            raise ListenerUnusable("not a TCP socket")
        self._address = sock.getsockname()
        if not self._address[1]:
            raise ListenerUnusable("not bound to a port")
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ListenerUnusable("it listens already")
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
            raise ListenerUnusable("its address can be shared (SO_REUSEPORT)")
        sock.setblocking(False)
        self._set_reuse(sock, 0)
        self.sock = sock
        self._backlog = backlog

    def begin(self) -> None:
        """Listen. Raises ListenerUnusable: it does already, another has the address, or the
        address is not the same any more."""
        if self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ListenerUnusable("it listens already")
        self._set_reuse(self.sock, 1)
        try:
            self.sock.listen(self._backlog)
        except OSError as problem:
            self._set_reuse(self.sock, 0)
            raise ListenerUnusable(f"listen: {problem.strerror}") from None
        if self.sock.getsockname() != self._address:
            self.end()
            raise ListenerUnusable("the kernel gave it another address")

    async def accept(self) -> socket.socket:
        """The next connection, non-blocking. Raises OSError when the listener is none."""
        while True:
            await trio.lowlevel.checkpoint()
            try:
                client, _ = self.sock.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.sock)
            except OSError as problem:
                if problem.errno in ACCEPT_SHORTAGES:
                    await trio.sleep(ACCEPT_PAUSE_SECONDS)
                elif problem.errno not in ACCEPT_BROKEN:
                    raise
            else:
                client.setblocking(False)
                return client

    def end(self) -> None:
        """Listen no more; connections that wait are reset. The address stays bound."""
        self._set_reuse(self.sock, 0)
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError as problem:
            if problem.errno != errno.ENOTCONN:  # it does not listen
                raise

    def close(self) -> None:
        """Give the address up. Safe to call again."""
        with suppress(OSError):
            self.sock.close()

    @staticmethod
    def _set_reuse(sock: socket.socket, value: int) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, value)
