"""Copying between the two connections of a tunnel, both ways, until both sides have ended.

Theory: one buffer serves all tunnels, since bytes are received and sent on within one turn of the
event loop. Only what a peer does not take is kept, at most one turn's bytes for each direction, and
nothing more is read for it until it is taken: that is the backpressure. At most TURNS_AT_ONCE
directions of all tunnels have their turn in one pass of the event loop, and the others queue for
theirs: so a pass has a bounded length, however many tunnels are busy, and everything else that the
daemon does comes between two passes.

Invariants: an end of one direction is passed on (half-close) and the other goes on; a broken
connection breaks the tunnel; idle time counts both directions together.

Deliberately absent: closing the sockets, and looking at the bytes.
"""

import socket
from collections.abc import Callable

import trio

from sbxd.egress.decisions import TunnelEnd
from sbxd.egress.sockets import send_all

TURN_BYTES = 128 * 1024
TURNS_AT_ONCE = 16


class Flow:
    """The counts of one tunnel."""

    def __init__(self) -> None:
        self.up_bytes = 0
        self.down_bytes = 0

    def count_up(self, size: int) -> None:
        """So many bytes went to the server."""
        self.up_bytes += size

    def count_down(self, size: int) -> None:
        """So many bytes went to the sandbox."""
        self.down_bytes += size


class Relay:
    """Copies for all tunnels of a daemon: one buffer, one queue of turns."""

    def __init__(self, *, turns_at_once: int = TURNS_AT_ONCE) -> None:
        self._buffer = bytearray(TURN_BYTES)
        self._view = memoryview(self._buffer)
        self._turns = turns_at_once
        self._queue = trio.lowlevel.ParkingLot()
        self.tunnels = 0

    async def run(
        self,
        client: socket.socket,
        server: socket.socket,
        flow: Flow,
        *,
        early: bytes,
        idle_seconds: float,
    ) -> TunnelEnd:
        """Copy until both sides have ended, one has broken, or nothing has moved for the idle time
        (at the latest an eighth earlier). `early` goes to the server before all else.

        Cancellation: the sockets stay open, and bytes that were under way are lost.
        """
        self.tunnels += 1
        try:
            async with trio.open_nursery() as nursery:
                tunnel = _Tunnel(self, nursery.cancel_scope, idle_seconds)
                up = _Direction(client, server, TunnelEnd.CLIENT_FAILED, TunnelEnd.SERVER_FAILED)
                down = _Direction(server, client, TunnelEnd.SERVER_FAILED, TunnelEnd.CLIENT_FAILED)
                nursery.start_soon(tunnel.copy, up, flow.count_up, early)
                await tunnel.copy(down, flow.count_down, b"")
        finally:
            self.tunnels -= 1
        if tunnel.broken is not None:
            return tunnel.broken
        return TunnelEnd.IDLE if tunnel.open_directions else TunnelEnd.FINISHED

    def receive(self, source: socket.socket) -> memoryview:
        """One turn's bytes, in the buffer that all share: to be used before the next await."""
        return self._view[: source.recv_into(self._buffer)]

    async def begin_turn(self) -> None:
        """Wait for a turn. Cancellation: there is none."""
        if self._turns:
            self._turns -= 1
        else:
            await self._queue.park()

    def end_turn(self) -> None:
        """Hand the turn to the next. Called one pass of the event loop after it began."""
        if not self._queue.unpark():
            self._turns += 1


class _Direction:
    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        source_failed: TunnelEnd,
        sink_failed: TunnelEnd,
    ) -> None:
        self.source = source
        self.sink = sink
        self.source_failed = source_failed
        self.sink_failed = sink_failed


class _Tunnel:
    """One run of a relay."""

    def __init__(self, relay: Relay, scope: trio.CancelScope, idle_seconds: float) -> None:
        self._relay = relay
        self._scope = scope
        self._idle_seconds = idle_seconds
        self.open_directions = 2
        self.broken: TunnelEnd | None = None
        self._touched_at = trio.current_time()
        scope.deadline = self._touched_at + idle_seconds

    async def copy(self, direction: _Direction, count: Callable[[int], None], early: bytes) -> None:
        source, sink = direction.source, direction.sink
        failed = direction.sink_failed
        try:
            if early:
                await send_all(sink, early)
                count(len(early))
            is_ready = False
            while True:
                failed = direction.source_failed
                if not is_ready:
                    await trio.lowlevel.wait_readable(source)
                await self._relay.begin_turn()
                try:
                    try:
                        piece = self._relay.receive(source)
                    except BlockingIOError:
                        is_ready = False
                        continue
                    failed = direction.sink_failed
                    size = len(piece)
                    if not size:
                        sink.shutdown(socket.SHUT_WR)
                        break
                    is_ready = size == TURN_BYTES
                    try:
                        sent = sink.send(piece)
                    except BlockingIOError:
                        sent = 0
                    rest = bytes(piece[sent:])
                    count(sent)
                    self._touch()
                    await trio.lowlevel.checkpoint()
                finally:
                    self._relay.end_turn()
                while rest:
                    await trio.lowlevel.wait_writable(sink)
                    sent = sink.send(rest)
                    rest = rest[sent:]
                    count(sent)
                    self._touch()
        except OSError:
            self.broken = self.broken or failed
            self._scope.cancel()
            return
        self.open_directions -= 1

    def _touch(self) -> None:
        now = trio.current_time()
        # A deadline costs more to move than bytes do.
        if now - self._touched_at > self._idle_seconds / 8:
            self._touched_at = now
            self._scope.deadline = now + self._idle_seconds
