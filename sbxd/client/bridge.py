"""The worker's end of one command's bridge: a handler that answers frames, one at a time.

    hooks = Hooks(bridge=handler)      # async def handler(frame: bytes) -> bytes
    result = await environment.with_hooks(hooks).execute(handle, command)

What becomes of it: when the handler raises, or holds a call for longer than
`approval_hold_seconds`, the command is cancelled and `execute` raises that; what a script is to be
told, the handler returns. When the command ends, or `execute` is cancelled, a handler that runs is
cancelled. When the connection is lost, `execute` raises UNREACHABLE and the daemon kills the
command. While the handler takes its time the command's clocks go on: a hold extends nothing.

Invariants: replies are sent in the order of the frames, within the daemon's credit; credit for a
frame goes back when it has been answered, so what waits here is bounded by the credit.
"""

from collections import deque
from collections.abc import Awaitable, Callable

import anyio

from sbxd.client.channel import Call
from sbxd.wire import messages as m
from sbxd.wire.bridge import cost_bytes

# S1's hold: how long a call may wait for somebody's approval.
APPROVAL_HOLD_SECONDS = 300.0

BridgeHandler = Callable[[bytes], Awaitable[bytes]]


class BridgeHoldExceeded(Exception):
    """The handler did not answer within `approval_hold_seconds`: the run is to be suspended.
    `RunScope.execute` does so, and raises HoldExceeded."""


class ServedBridge:
    """Serves the bridge of one call."""

    def __init__(self, call: Call, handler: BridgeHandler, *, approval_hold_seconds: float) -> None:
        self._call = call
        self._handler = handler
        self._hold_seconds = approval_hold_seconds
        self._frames: deque[bytes] = deque()
        self._ended = False
        self._changed = anyio.Event()

    def take(self, message: m.BridgeOpened | m.BridgeFrame | m.BridgeClosed) -> None:
        """What the daemon says of the bridge."""
        if isinstance(message, m.BridgeFrame):
            self._frames.append(message.data)
        elif isinstance(message, m.BridgeClosed):
            self._ended = True
        self._changed.set()
        self._changed = anyio.Event()

    async def beside(self, work: Callable[[], Awaitable[None]]) -> None:
        """Serve while `work` is done; then a handler that runs is cancelled.

        Raises: what `work` or the handler raises, as it is; BridgeHoldExceeded; ValueError for a
        reply that is empty or longer than BRIDGE_FRAME_BYTES_MAX.
        """
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._serve)
                await work()
                group.cancel_scope.cancel()
        except BaseExceptionGroup as failures:
            _, own = failures.split(anyio.get_cancelled_exc_class())
            raise (own or failures).exceptions[0] from None

    async def _serve(self) -> None:
        while True:
            while not self._frames:
                if self._ended:
                    self._call.end_bridge()
                    return
                await self._changed.wait()
            frame, reply = self._frames.popleft(), b""
            with anyio.move_on_after(self._hold_seconds) as hold:
                reply = await self._handler(frame)
            if hold.cancelled_caught:
                raise BridgeHoldExceeded(f"no answer within {self._hold_seconds} seconds")
            if not 0 < len(reply) <= m.BRIDGE_FRAME_BYTES_MAX:
                raise ValueError(
                    f"a reply of {len(reply)} bytes is not between 1 and {m.BRIDGE_FRAME_BYTES_MAX}"
                )
            self._call.return_bridge_credit(cost_bytes(frame))
            await self._call.send_bridge(reply)
