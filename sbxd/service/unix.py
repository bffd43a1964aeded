"""The Unix sockets of the daemon: the one place that accepts, receives from and closes them.

A peer may send descriptors along (SCM_RIGHTS), and whoever drops a lingering one sleeps. Where the
kernel has SO_PASSRIGHTS the sender is refused; elsewhere, and for who connected before the daemon
was started, each receive looks first, and an end in which a descriptor waits is closed by a thread.

Invariants: the event loop never drops a descriptor of a peer; a peer that sends one has its
connection ended. While too many ends wait for their close, nothing is accepted. What is turned away
costs a few system calls: no task, no wait.

Source: decision 0180; held for every socket by `tests/gates/test_unix_sockets.py`.
"""

import errno
import socket
from abc import abstractmethod
from contextlib import suppress
from functools import cached_property

import trio

from sbxd import rights
from sbxd.closing import Closers

ROOM_PAUSE_SECONDS = 0.05
RECEIVE_BYTES = 64 * 1024
# What accept(2) says of a connection that is gone already.
_AGAIN = (errno.ECONNABORTED, errno.EPROTO)


class DescriptorsSent(trio.BrokenResourceError):
    """The peer sent descriptors: its connection is to be ended."""


class PeerStream(trio.abc.Stream):
    """A connection that can be ended without waiting."""

    @abstractmethod
    def turn_away(self, farewell: bytes) -> None:
        """Close, having sent what the buffer takes of `farewell`; never waits."""


class PeerListener(trio.abc.Listener[PeerStream]):
    """A listener whose queue can be emptied without waiting."""

    @abstractmethod
    def accept_nowait(self) -> PeerStream | None:
        """The next connection that waits; None without one. Raises OSError when the host is short
        of something."""


class UnixStream(trio.abc.HalfCloseableStream, PeerStream):
    """A connected Unix stream socket. Made by `accept` and `connect`."""

    def __init__(self, end: socket.socket, closers: Closers, *, is_refusing: bool) -> None:
        end.setblocking(False)
        self.end = end
        self._closers = closers
        self._is_refusing = is_refusing

    @cached_property
    def _stream(self) -> trio.SocketStream:
        return trio.SocketStream(trio.socket.from_stdlib_socket(self.end))

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As any stream. Raises DescriptorsSent."""
        if self._is_refusing:
            return bytes(await self._stream.receive_some(max_bytes))
        await trio.lowlevel.checkpoint()
        while True:
            if self.end.fileno() < 0:
                raise trio.ClosedResourceError
            try:
                return rights.receive(self.end, max_bytes or RECEIVE_BYTES)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.end)
            except rights.DescriptorsSent as problem:
                raise DescriptorsSent(problem.strerror) from None
            except OSError as problem:
                raise trio.BrokenResourceError(str(problem)) from problem

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As any stream."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """As any stream."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """As any stream."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """As any stream; the kernel's part may end later, in a thread."""
        if self.end.fileno() >= 0:
            trio.lowlevel.notify_closing(self.end)
            self._closers.close(self.end, is_refusing=self._is_refusing)
        await trio.lowlevel.checkpoint()

    def turn_away(self, farewell: bytes) -> None:
        """As PeerStream. Before anything waits on the stream: a fresh socket's buffer takes the few
        bytes at once."""
        with suppress(OSError):
            self.end.send(farewell, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self._closers.close(self.end, is_refusing=self._is_refusing)


class UnixListener(PeerListener):
    """A listening Unix stream socket, which it owns. `closers`: those of its connections."""

    def __init__(self, listening: socket.socket, closers: Closers) -> None:
        listening.setblocking(False)
        self._listening = listening
        self.closers = closers
        self._is_refusing = rights.refuse(listening)

    async def accept(self) -> UnixStream:
        """The next connection. Raises OSError when the host is short of something."""
        while True:
            if self._listening.fileno() < 0:
                raise trio.ClosedResourceError
            await trio.lowlevel.wait_readable(self._listening)
            await _wait_room(self.closers)
            stream = self.accept_nowait()
            if stream is not None:
                return stream

    def accept_nowait(self) -> UnixStream | None:
        """As PeerListener. None too while too many ends wait for their close."""
        while self._listening.fileno() >= 0 and self.closers.has_room:
            try:
                end, _ = self._listening.accept()
            except BlockingIOError:
                return None
            except OSError as problem:
                if problem.errno in _AGAIN:
                    continue
                raise
            return UnixStream(end, self.closers, is_refusing=rights.admit(end))
        return None

    async def aclose(self) -> None:
        """Accept nothing more. Who still waits in it may hold descriptors, where the kernel does
        not refuse them."""
        if self._listening.fileno() >= 0:
            trio.lowlevel.notify_closing(self._listening)
            if self._is_refusing:
                self._listening.close()
            else:
                self.closers.close_unseen(self._listening)
        await trio.lowlevel.checkpoint()


async def connect(path: str, closers: Closers) -> UnixStream:
    """A connection to the socket at this path. Raises OSError."""
    await _wait_room(closers)
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        is_refusing = rights.refuse(end)  # before anybody can send
        end.setblocking(False)
        await trio.socket.from_stdlib_socket(end).connect(path)
    except BaseException:
        end.close()
        raise
    return UnixStream(end, closers, is_refusing=is_refusing)


async def _wait_room(closers: Closers) -> None:
    while True:
        if closers.has_room:
            return
        await trio.sleep(ROOM_PAUSE_SECONDS)
