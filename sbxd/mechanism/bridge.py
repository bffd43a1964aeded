"""The bridge's socket of one `namespaces` environment, from the daemon's side.

The socket was bound by init, in the environment's own /dev, so it is reached from there alone; the
daemon listens on the descriptor that came with the slot. Closing the descriptor, of which no other
copy exists, is what makes the kernel refuse.
"""

import errno
import socket

import trio

from sbxd.mechanism.protocol import BridgeStreamBroken, MechanismError

CHUNK_BYTES = 64 * 1024
# What accept(2) says of a connection that is gone already.
_AGAIN = (errno.ECONNABORTED, errno.EPROTO)


class SocketBridgeStream:
    """Implements sbxd.mechanism.protocol.BridgeStream."""

    def __init__(self, end: trio.socket.SocketType) -> None:
        self._end = end

    async def receive(self) -> bytes:
        """Next bytes; b"" at the end."""
        try:
            return await self._end.recv(CHUNK_BYTES)
        except (OSError, trio.ClosedResourceError):
            return b""

    async def send(self, data: bytes) -> None:
        """All of it. Raises BridgeStreamBroken."""
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        try:
            while view:
                view = view[await self._end.send(view) :]
        except (OSError, trio.ClosedResourceError):
            raise BridgeStreamBroken from None

    def end(self) -> None:
        """The end of our direction."""
        try:
            self._end.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is gone: there is nobody to tell

    def close(self) -> None:
        """End both directions."""
        self._end.close()


class SocketBridgeDoor:
    """Implements sbxd.mechanism.protocol.BridgeDoor. Owns the descriptor, once it is made."""

    def __init__(self, descriptor: int, *, waiting_max: int) -> None:
        listener = socket.socket(fileno=descriptor)
        try:
            listener.listen(waiting_max)
        except OSError as problem:
            listener.detach()
            raise MechanismError("listen on the bridge", problem.errno or 0) from None
        self._listener = trio.socket.from_stdlib_socket(listener)

    async def accept(self) -> SocketBridgeStream:
        """The next connection. Raises MechanismError."""
        while True:
            try:
                end, _ = await self._listener.accept()
                return SocketBridgeStream(end)
            except trio.ClosedResourceError:
                raise MechanismError("accept on the bridge", errno.EBADF) from None
            except OSError as problem:
                if problem.errno not in _AGAIN:
                    raise MechanismError("accept on the bridge", problem.errno or 0) from None

    def close(self) -> None:
        """Nobody listens any more."""
        self._listener.close()
