"""The journal's native datagram socket: one record is one datagram, taken whole or not at all.

Invariants: waiting is bounded; a record that is larger than a datagram may be goes as one sealed
memory file. Nothing is numbered or kept here but what the journal has not read yet: when the
socket behind a connection is closed the kernel throws that away, so it is handed back
(`take_unread`). Who reads it again may find a record twice, and never one too few.

The socket stays with the service manager while the journal restarts, so datagrams queue in the
kernel; when the queue is full, a send waits for at most `wait_seconds`.
"""

import errno
import fcntl
import os
import socket
import termios
from collections import deque

import trio

from sbxd.audit.sink import AuditUnavailable

WAIT_SECONDS = 2.0
# More of ours than this never wait in the kernel: a socket's send buffer holds some 160.
UNREAD_MAX = 1024
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# The peer behind our connection is gone and another may listen on the same path.
_STALE = frozenset({errno.ECONNREFUSED, errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE})
_TOO_LARGE = frozenset({errno.EMSGSIZE, errno.ENOBUFS})


class JournalReplaced(Exception):
    """The socket that we were connected to is gone, with what nobody had read from it. The record
    was not sent; another send connects anew."""


class JournalSocket:
    """Sends records. Use it within one trio run; close it at the end."""

    def __init__(self, path: str, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self.wait_seconds = wait_seconds
        self._path = path
        self._socket: socket.socket | None = None
        self._unread: deque[bytes] = deque(maxlen=UNREAD_MAX)
        self._unread_bytes = 0
        self._moved_at: float | None = None  # None: the journal has read everything

    async def send(self, record: bytes) -> None:
        """Send one record, waiting for room.

        Raises:
            AuditUnavailable: no journal listens, or its queue stayed full for `wait_seconds`.
            JournalReplaced.

        Cancellation: nothing of it was sent, or all of it.
        """
        with trio.move_on_after(self.wait_seconds):
            while not self.send_nowait(record):
                assert self._socket is not None
                await trio.lowlevel.wait_writable(self._socket)
            return
        raise AuditUnavailable(f"the journal took no record for {self.wait_seconds} s")

    def send_nowait(self, record: bytes) -> bool:
        """Send one record if there is room; whether there was.

        Raises:
            AuditUnavailable: no journal listens, or the kernel refuses.
            JournalReplaced.
        """
        fresh = self._socket is None
        try:
            connection = self._connected()
            _send_nowait(connection, record)
        except BlockingIOError:
            return False
        except OSError as problem:
            if problem.errno in _STALE and not fresh:
                self._disconnect()
                raise JournalReplaced from None
            self._disconnect()
            name = errno.errorcode.get(problem.errno or 0, "an error without a number")
            raise AuditUnavailable(f"the journal takes no record: {name}") from None
        self._note(len(record))
        if self._moved_at is None:
            self._unread.clear()
        else:
            self._unread.append(record)
        return True

    async def wait_room(self) -> bool:
        """Until the queue has room, for at most `wait_seconds`; whether it has. Not while a send
        waits. At once False while nothing is connected."""
        if self._socket is None:
            return False
        with trio.move_on_after(self.wait_seconds):
            await trio.lowlevel.wait_writable(self._socket)
            return True
        return False

    def take_unread(self) -> list[bytes]:
        """What a journal that was replaced may not have read, oldest first, and for the last
        time."""
        taken = list(self._unread)
        self._unread.clear()
        self._moved_at = None
        self._unread_bytes = 0
        return taken

    def unread_bytes(self) -> int:
        """How much of what was sent the journal has not read, in the kernel's memory."""
        return self._note(0)

    def stalled_seconds(self) -> float:
        """For how long the journal has read nothing of what waits for it; 0.0 when nothing
        does."""
        self._note(0)
        return 0.0 if self._moved_at is None else trio.current_time() - self._moved_at

    def close(self) -> None:
        """Release the socket while no send runs. Idempotent; a later send connects anew."""
        self._disconnect()

    def _note(self, sent_bytes: int) -> int:
        """Look at what waits. It moved unless it grew by all that was sent since the last look."""
        before, now = self._unread_bytes, self._queued()
        self._unread_bytes = now
        if now == 0:
            self._moved_at = None
        elif self._moved_at is None or now < before + sent_bytes or (sent_bytes and now <= before):
            self._moved_at = trio.current_time()
        return now

    def _queued(self) -> int:
        if self._socket is None:
            return 0
        raw = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(raw, "little")

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

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
