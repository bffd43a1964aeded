"""The worker's end of a bridge, over the frames of one request.

Invariants: a frame is sent only within the client's credit and only after there is space to queue
it; credit for the client's frames goes back when the lifecycle has taken the frame after them, so
what waits here is bounded by the credit. Implements `sbxd.lifecycle.environments.BridgeWorker`.
"""

from collections import deque

import trio

from sbxd.service.outgoing import Outgoing
from sbxd.wire.bridge import BridgeState, cost_bytes
from sbxd.wire.connection import ServerConnection
from sbxd.wire.messages import (
    BRIDGE_CREDIT_BYTES,
    BridgeClosed,
    BridgeCredit,
    BridgeEnd,
    BridgeFrame,
    BridgeOpened,
)

CREDIT_BATCH_BYTES = BRIDGE_CREDIT_BYTES // 4


class BridgeExchange:
    """Of an Execute that asked for the bridge."""

    def __init__(self, request_id: int, connection: ServerConnection, outgoing: Outgoing) -> None:
        self._request_id = request_id
        self._connection = connection
        self._outgoing = outgoing
        self._frames: deque[bytes] = deque()
        self._closed = False
        self._arrived = trio.Event()
        self._credited = trio.Event()
        self._unreturned_bytes = 0

    # --- for the session's reader -------------------------------------------------------------

    def take_frame(self, data: bytes) -> None:
        """A frame of the client's has arrived."""
        self._frames.append(data)
        self._wake()

    def take_close(self) -> None:
        """The client sends no more frames."""
        self._closed = True
        self._wake()

    def take_credit(self) -> None:
        """The client has returned credit."""
        self._credited.set()
        self._credited = trio.Event()

    # --- for the lifecycle --------------------------------------------------------------------

    async def opened(self) -> None:
        """A program has presented the token."""
        await self._outgoing.send(BridgeOpened(request_id=self._request_id))

    async def send(self, data: bytes) -> None:
        """One frame of the program's. Blocks without credit."""
        while True:
            await self._outgoing.wait_space()
            if cost_bytes(data) <= self._connection.bridge_credit_bytes(self._request_id):
                self._outgoing.queue(BridgeFrame(request_id=self._request_id, data=data))
                return
            await self._credited.wait()

    async def receive(self) -> bytes | None:
        """The client's next frame; None once it sends no more."""
        await self._return_credit()
        while not self._frames:
            if self._closed:
                return None
            await self._arrived.wait()
        data = self._frames.popleft()
        self._unreturned_bytes += cost_bytes(data)
        return data

    async def closed(self, reason: BridgeEnd) -> None:
        """The program sends no more frames."""
        await self._outgoing.send(BridgeClosed(request_id=self._request_id, reason=reason))

    async def _return_credit(self) -> None:
        if self._unreturned_bytes < CREDIT_BATCH_BYTES:
            return
        await self._outgoing.wait_space()
        state = self._connection.bridge_state(self._request_id)
        if state is BridgeState.OPEN or state is BridgeState.SERVER_DONE:
            size_bytes, self._unreturned_bytes = self._unreturned_bytes, 0
            self._outgoing.queue(BridgeCredit(request_id=self._request_id, size_bytes=size_bytes))

    def _wake(self) -> None:
        self._arrived.set()
        self._arrived = trio.Event()
