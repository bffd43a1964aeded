"""Unix sockets of the worker's side: to the daemon, to a lease authority, and the authority's own.

Neither side takes descriptors, and whoever drops one that lingers sleeps (`sbxd.rights`). Where the
kernel can, they are refused; elsewhere a receive looks first, and an end in which one waits is
closed by a thread. A taken-over daemon, or a stranger at an authority, so stops no event loop.

Works under asyncio and trio. Source: decision 0180; held by `tests/gates/test_unix_sockets.py`.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import ByteStream, SocketAttribute, TaskGroup

from sbxd import rights
from sbxd.closing import Closers

BACKLOG = 128
RETRY_SECONDS = 0.02
LINE_SECONDS = 0.25  # a cancelled `connect` takes at most this long to end
# accept(2): the host is short of something that other connections will give back.
ACCEPT_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_AGAIN = frozenset({errno.ECONNABORTED, errno.EPROTO})

closers = Closers()  # of this process: what is stuck in them is a bound for all connections


class UnixStream(ByteStream):
    """A connected Unix stream socket, which it owns."""

    def __init__(self, end: socket.socket, *, is_refusing: bool) -> None:
        end.setblocking(False)
        self._end = end
        self._is_refusing = is_refusing
        self._users = 0
        self._is_closed = False

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The socket itself."""
        return {SocketAttribute.raw_socket: lambda: self._end}

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """As any stream. BrokenResourceError also when descriptors were sent."""
        await anyio.lowlevel.checkpoint()
        with self._used():
            while True:
                try:
                    data = self._take(max_bytes)
                except BlockingIOError:
                    await anyio.wait_readable(self._end)
                    self._require_open()
                except OSError as problem:
                    self._require_open()
                    raise anyio.BrokenResourceError from problem
                else:
                    if data:
                        return data
                    self._require_open()
                    raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        """As any stream."""
        await anyio.lowlevel.checkpoint()
        with self._used():
            view = memoryview(item)
            while view:
                try:
                    view = view[self._end.send(view, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    await anyio.wait_writable(self._end)
                    self._require_open()
                except OSError as problem:
                    self._require_open()
                    raise anyio.BrokenResourceError from problem

    async def send_eof(self) -> None:
        """As any stream."""
        await anyio.lowlevel.checkpoint()
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """As any stream. Whoever receives or sends is woken, and the last one closes."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)
            if not self._users:
                self._close()
        await anyio.lowlevel.checkpoint()

    @contextmanager
    def _used(self) -> Iterator[None]:
        self._require_open()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._is_closed and not self._users:
                self._close()

    def _take(self, size: int) -> bytes:
        if self._is_refusing:
            return self._end.recv(size)
        return rights.receive(self._end, size)

    def _require_open(self) -> None:
        if self._is_closed:
            raise anyio.ClosedResourceError

    def _close(self) -> None:
        closers.close(self._end, is_refusing=self._is_refusing)


async def connect(path: str) -> UnixStream:
    """A connection to the socket at this path. Raises OSError: EBUSY while too many earlier ones
    could not be closed."""
    await anyio.lowlevel.checkpoint()
    if not closers.has_room:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        is_refusing = rights.refuse(end)  # before anybody can send
        end.setblocking(False)
        try:
            end.connect(path)
        except BlockingIOError:  # as many wait there as the listener allows
            while not await anyio.to_thread.run_sync(_stood_in_line, end, path):
                pass
    except BaseException:
        end.close()
        raise
    return UnixStream(end, is_refusing=is_refusing)


def _stood_in_line(end: socket.socket, path: str) -> bool:
    """Connect, first come first served among those who wait; False after LINE_SECONDS. Whoever
    looks again and again instead finds each place taken by one who waits."""
    seconds, microseconds = divmod(round(LINE_SECONDS * 1e6), 10**6)
    limit = struct.pack("@ll", seconds, microseconds)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setblocking(True)
    try:
        end.connect(path)
    except BlockingIOError:
        return False
    return True


class UnixListener:
    """A listening Unix stream socket at a path. `listen` makes it."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._is_refusing = rights.refuse(listening)

    async def serve(self, handle: Callable[[UnixStream], Coroutine[Any, Any, None]]) -> None:
        """Handle each connection in a task of its own, until cancelled. Raises OSError."""
        async with anyio.create_task_group() as tasks:
            while True:
                await self._accept(tasks, handle)

    async def _accept(
        self, tasks: TaskGroup, handle: Callable[[UnixStream], Coroutine[Any, Any, None]]
    ) -> None:
        if not closers.has_room:
            await anyio.sleep(RETRY_SECONDS)
            return
        await anyio.wait_readable(self._listening)
        try:
            accepted, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as problem:
            if problem.errno in ACCEPT_SHORTAGES:
                await anyio.sleep(RETRY_SECONDS)
            elif problem.errno not in _AGAIN:
                raise
            return
        stream = UnixStream(accepted, is_refusing=rights.admit(accepted))
        tasks.start_soon(handle, stream)

    def close(self) -> None:
        """Listen no more. Nobody may be in `serve`."""
        if self._is_refusing:
            self._listening.close()
        else:
            closers.close_unseen(self._listening)


def listen(path: str, *, mode: int) -> UnixListener:
    """A listener at this path; a socket that lies there is replaced. Raises OSError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        rights.refuse(listening)
        with suppress(FileNotFoundError):
            os.unlink(path)
        listening.bind(path)
        os.chmod(path, mode)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return UnixListener(listening)
