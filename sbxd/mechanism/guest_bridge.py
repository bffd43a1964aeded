"""The bridge of a sandbox with a kernel of its own, from the daemon's side.

Its connections come through a relay in the guest, which passes bytes and nothing else; yet behind
the sockets is the guest's kernel, so they are received from and closed in threads, as those of
`sbxd.mechanism.bridge`.
"""

import errno

import trio

from sbxd.mechanism.bridge import RECEIVERS_MAX, Closer, SocketBridgeStream
from sbxd.mechanism.guest_doors import GuestDoor
from sbxd.mechanism.protocol import MechanismError


class GuestBridgeDoor:
    """Implements sbxd.mechanism.protocol.BridgeDoor."""

    def __init__(self, door: GuestDoor) -> None:
        self._door = door
        self._receivers = trio.CapacityLimiter(RECEIVERS_MAX)
        self._closer = Closer()
        self._closing = trio.Event()
        door.begin()

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    @property
    def is_done(self) -> bool:
        """Whether no thread of it is left."""
        return not self._closer.is_busy and self._receivers.borrowed_tokens == 0

    async def accept(self) -> SocketBridgeStream:
        """The next connection. Raises MechanismError."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_closed, nursery.cancel_scope)
            end = await self._door.accept()
            nursery.cancel_scope.cancel()
            return SocketBridgeStream(end, self._receivers, self._closer)
        raise MechanismError("accept on the bridge", errno.EBADF)

    async def _cancel_when_closed(self, scope: trio.CancelScope) -> None:
        await self._closing.wait()
        scope.cancel()

    def close(self) -> None:
        """Nobody listens any more."""
        self._closing.set()
        self._door.end()
