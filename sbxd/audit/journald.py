"""The journal as the sink of the audit, over its native datagram socket.

Invariants: an event is one datagram (or one sealed memory file when it is larger than a datagram
may be), so it is recorded whole or not at all; waiting is bounded; whatever keeps an event from
the journal is AuditUnavailable, never a drop. Nothing is buffered here: back-pressure reaches the
emitter.

The socket stays with the service manager while the journal restarts, so datagrams queue in the
kernel; when the queue is full, a send waits for at most `wait_seconds`.
"""

import errno
import fcntl
import os
import socket

import trio

from sbxd.audit.encode import encode, serialize
from sbxd.audit.events import AuditEvent
from sbxd.audit.sink import AuditUnavailable

WAIT_SECONDS = 2.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# The peer behind our connection is gone and another may listen on the same path.
_STALE = frozenset({errno.ECONNREFUSED, errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE})
_TOO_LARGE = frozenset({errno.EMSGSIZE, errno.ENOBUFS})


class JournaldSink:
    """Sends events to the journal's socket. Use it within one trio run; close it at the end."""

    def __init__(self, socket_path: str, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._path = socket_path
        self._wait_seconds = wait_seconds
        self._socket: socket.socket | None = None
        self._turn = trio.Lock()

    async def emit(self, event: AuditEvent) -> None:
        """Record one event.

        Raises:
            AuditUnavailable: no journal listens, or its queue stayed full for `wait_seconds`.

        Cancellation: nothing of the event was sent, or all of it.
        """
        raw = serialize(encode(event))
        with trio.move_on_after(self._wait_seconds):
            # The lock is FIFO: events of one task keep their order.
            async with self._turn:
                try:
                    await self._send(raw)
                except OSError as problem:
                    self.close()
                    name = errno.errorcode.get(problem.errno or 0, "an error without a number")
                    raise AuditUnavailable(f"the journal takes no event: {name}") from None
            return
        raise AuditUnavailable(f"the journal took no event for {self._wait_seconds} s")

    def close(self) -> None:
        """Release the socket while no emit runs. Idempotent; a later emit connects anew."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _send(self, raw: bytes) -> None:
        fresh = self._socket is None
        while True:
            connection = self._connected()
            try:
                _send_nowait(connection, raw)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(connection)
            except OSError as problem:
                if problem.errno not in _STALE or fresh:
                    raise
                self.close()
                fresh = True
            else:
                return

    def _connected(self) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            )
            try:
                connection.connect(self._path)
            except OSError:
                connection.close()
                raise
            self._socket = connection
        return self._socket


def _send_nowait(connection: socket.socket, raw: bytes) -> None:
    """Send one entry without blocking, as a datagram or, when it is too large, as a file."""
    try:
        connection.send(raw)
    except OSError as problem:
        if problem.errno not in _TOO_LARGE:
            raise
    else:
        return
    memory_fd = os.memfd_create("sbxd-audit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        remaining = memoryview(raw)
        while remaining:
            remaining = remaining[os.write(memory_fd, remaining) :]
        fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, _SEALS)
        socket.send_fds(connection, [b""], [memory_fd])
    finally:
        os.close(memory_fd)
