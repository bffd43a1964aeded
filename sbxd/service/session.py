"""One connection, from its greeting to its end.

One nursery per connection: the reader, the writer, the heartbeat and a task per request. Each
request gets exactly one terminal reply: its task's return value, an Unavailable when the task
crashed, or none when the connection ended first, in which case the request is cancelled. When the
connection has ended, its environments are released (`Environments.release_owner`).

This is the one place in sbxd with `except Exception`: to answer, to log, and to survive.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import trio

from sbxd.audit.events import Door, PeerRefusal, PeerRefused
from sbxd.lifecycle.environments import Environments, Peer
from sbxd.port.errors import UnavailableCode
from sbxd.service.dispatch import Dispatch
from sbxd.service.exchange import Exchange
from sbxd.service.outgoing import Outgoing, PeerStalled, send_now_on
from sbxd.service.peer import judge_hello
from sbxd.service.room import RECEIVE_BYTES, Room, Rooms, cost_of, no_room
from sbxd.service.unix import DescriptorsSent
from sbxd.settings import Settings
from sbxd.wire import messages as m
from sbxd.wire.connection import Pause, ServerConnection
from sbxd.wire.errors import RemoteProtocolError
from sbxd.wire.legality import Role

FAREWELL_SECONDS = 1.0
# What each refusal beyond the rate costs its connection, one after the other.
REFUSAL_PAUSE_SECONDS = 1.0
_REFUSALS = (m.Rejected, m.Unavailable, m.WorkspaceEscaped)

_TOO_LATE = m.Goodbye(code=m.GoodbyeCode.IDLE, reason="no greeting arrived in time")
_IDLE = m.Goodbye(code=m.GoodbyeCode.IDLE, reason="no sign of life from the peer")
_FULL = m.Goodbye(code=m.GoodbyeCode.CAPACITY, reason="too much is held for this uid")
_SHUTTING_DOWN = m.Goodbye(code=m.GoodbyeCode.SHUTTING_DOWN, reason="the service is shutting down")


@dataclass(frozen=True)
class SessionContext:
    """What the sessions of a daemon share.

    credential: the service's own, for auth_mode token. shutdown: set once no new request is to
    be taken; the session then ends when its last request has been answered. count: counts a
    refused peer that is not recorded by itself, without waiting. is_beyond: whether refusals of a
    uid come so fast that each is to cost it time.
    """

    settings: Settings
    dispatch: Dispatch
    environments: Environments
    credential: bytes | None
    log: logging.Logger
    shutdown: trio.Event
    server_name: str
    mechanism: str
    count: Callable[[PeerRefused], None]
    rooms: Rooms = field(default_factory=Rooms)
    is_beyond: Callable[[int], bool] = lambda _uid: False


class Session:
    """Serves one accepted stream. `run` is called once."""

    def __init__(
        self, stream: trio.abc.Stream, *, door: Door, peer: Peer, context: SessionContext
    ) -> None:
        self._stream = stream
        self._door = door
        self._peer = peer
        self._context = context
        self._connection = ServerConnection(role=Role(door.value))
        settings = context.settings.service
        self._hello_seconds = settings.hello_seconds
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._outgoing = Outgoing(
            stream,
            self._connection,
            stall_seconds=2 * settings.heartbeat_seconds,
            send_now=send_now_on(stream),
        )
        self._exchanges: dict[int, Exchange] = {}
        self._idle = trio.Event()
        self._last_received = 0.0
        self._ping_token = 0
        self._farewell: m.Goodbye | None = None
        self._refusal: PeerRefusal | None = None
        self._refusal_turn = trio.Lock()
        self._owed_pauses = 0
        self.is_greeted = False

    @property
    def owed_seconds(self) -> float:
        """For how long the connection's place is to stay taken after its end: the pauses that it
        left without waiting for them."""
        return self._owed_pauses * REFUSAL_PAUSE_SECONDS

    async def run(self) -> PeerRefusal | None:
        """Serve until the connection ends. Returns why the peer was refused, or None.

        Raises: nothing of the peer's making. A bug of ours is logged, and ends this connection
        alone.

        Cancellation: in-flight requests are cancelled; environments are released.
        """
        try:
            async with self._stream:
                with self._context.rooms.of_connection(self._door, self._peer.uid) as room:
                    await self._serve(room)
        except Exception:
            self._context.log.exception(
                "closing connection %d: the session failed", self._peer.connection_id
            )
        finally:
            self._context.environments.release_owner(self._peer.connection_id)
        return self._refusal

    async def _serve(self, room: Room | None) -> None:
        async with trio.open_nursery() as nursery:
            requests_scope = trio.CancelScope()
            written = trio.Event()
            nursery.start_soon(self._write, requests_scope, written)
            with requests_scope:
                if await self._greet(has_room=room is not None) and room is not None:
                    async with trio.open_nursery() as requests:
                        requests.start_soon(self._keep_alive, requests.cancel_scope)
                        requests.start_soon(self._drain_at_shutdown, requests.cancel_scope)
                        await self._read(requests, room)
                        requests.cancel_scope.cancel()
            self._outgoing.finish(self._farewell)
            with trio.move_on_after(FAREWELL_SECONDS):
                await written.wait()
            nursery.cancel_scope.cancel()

    # --- writing ------------------------------------------------------------------------------

    async def _write(self, requests_scope: trio.CancelScope, written: trio.Event) -> None:
        try:
            await self._outgoing.run()
        except PeerStalled as error:
            self._context.log.info("closing connection %d: %s", self._peer.connection_id, error)
        finally:
            written.set()
            requests_scope.cancel()

    # --- reading ------------------------------------------------------------------------------

    async def _greet(self, *, has_room: bool) -> bool:
        with trio.move_on_after(self._hello_seconds):
            event = await self._next_event()
            if not isinstance(event, m.Hello):
                return False
            verdict = judge_hello(
                self._door, event, self._context.settings, self._context.credential
            )
            if verdict is not None:
                self._refusal, self._farewell = verdict
                return False
            if not has_room:
                self._refusal, self._farewell = PeerRefusal.TOO_MANY_CONNECTIONS, _FULL
                return False
            if self._context.shutdown.is_set():
                self._farewell = _SHUTTING_DOWN  # whoever hears it instead of Welcome asks the next
                return False
            await self._outgoing.send(
                m.Welcome(
                    protocol_version=m.PROTOCOL_VERSION,
                    server=self._context.server_name,
                    mechanism=self._context.mechanism,
                )
            )
            self.is_greeted = True
            return True
        self._refusal, self._farewell = PeerRefusal.HELLO_TOO_LATE, _TOO_LATE
        return False

    async def _read(self, requests: trio.Nursery, room: Room) -> None:
        """Take events until the connection ends, by either side's doing."""
        while True:
            event = await self._next_event()
            if event is None:
                return
            match event:
                case m.Upload(request_id=request_id, data=data):
                    self._exchanges[request_id].take_upload(data)
                case m.Credit(request_id=request_id):
                    self._exchanges[request_id].take_credit()
                case m.BridgeFrame(request_id=request_id, data=data):
                    self._exchanges[request_id].bridge.take_frame(data)
                case m.BridgeCredit(request_id=request_id):
                    self._exchanges[request_id].bridge.take_credit()
                case m.BridgeClose(request_id=request_id):
                    self._exchanges[request_id].bridge.take_close()
                case m.Cancel(request_id=request_id):
                    self._exchanges[request_id].cancel()
                case m.Ping(token=token):
                    await self._outgoing.send(m.Pong(token=token))
                case m.Request():
                    await self._take(cast(m.AnyRequest, event), requests, room)
                case _:
                    continue

    async def _next_event(self) -> m.Message | None:
        """The peer's next message; None at its end, or when it broke the protocol."""
        try:
            while True:
                event = self._connection.next_event()
                if event is Pause.CLOSED:
                    return None
                if not isinstance(event, Pause):
                    return event
                try:
                    data = bytes(await self._stream.receive_some(RECEIVE_BYTES))
                except DescriptorsSent as problem:
                    self._refusal = PeerRefusal.PROTOCOL_VIOLATED
                    self._farewell = m.Goodbye(code=m.GoodbyeCode.PROTOCOL, reason=str(problem))
                    return None
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return None
                self._last_received = trio.current_time()
                self._connection.receive_data(data)
        except RemoteProtocolError as error:
            if self._connection.has_ended:
                return None  # it went away within a frame: nobody is left to be told
            self._refusal = PeerRefusal.PROTOCOL_VIOLATED
            self._farewell = m.Goodbye(code=m.GoodbyeCode.PROTOCOL, reason=error.detail)
            return None

    # --- requests -----------------------------------------------------------------------------

    async def _take(self, request: m.AnyRequest, requests: trio.Nursery, room: Room) -> None:
        """Start a request, or refuse it; nothing more is read until a refusal is queued, so that
        refusals do not pile up for a peer that takes none."""
        limits = self._context.settings.limits
        size = cost_of(
            request, self._connection.frame_bytes, files_changed_max=limits.files_changed_max
        )
        if not room.take(size):
            refusal = await self._context.dispatch.refuse(self._peer, request, no_room())
            if self._context.is_beyond(self._peer.uid):
                await self._pay()
            await self._outgoing.send(refusal)
            return
        exchange = Exchange(request.request_id, self._connection, self._outgoing)
        self._exchanges[request.request_id] = exchange
        requests.start_soon(self._hold, request, exchange, room, size)

    async def _hold(self, request: m.AnyRequest, exchange: Exchange, room: Room, size: int) -> None:
        try:
            await self._answer(request, exchange)
        finally:
            room.give(size)

    async def _answer(self, request: m.AnyRequest, exchange: Exchange) -> None:
        request_id = request.request_id
        reply: m.TerminalReply = m.Cancelled(request_id=request_id)
        with exchange.scope:
            try:
                if self._context.shutdown.is_set():
                    reply = m.Unavailable(
                        request_id=request_id,
                        code=UnavailableCode.SHUTTING_DOWN,
                        detail="the service is shutting down: connect again and provision anew",
                    )
                else:
                    reply = await self._context.dispatch.handle(self._peer, request, exchange)
            except Exception:
                self._context.log.exception(
                    "answering a request of connection %d as unavailable: its handler failed",
                    self._peer.connection_id,
                )
                reply = _failed(request_id)
        if isinstance(reply, _REFUSALS) and self._context.is_beyond(self._peer.uid):
            await self._pay()
        await self._outgoing.wait_space()
        try:
            self._outgoing.queue(reply)
        except Exception:
            self._context.log.exception(
                "answering a request of connection %d as unavailable: its reply was illegal",
                self._peer.connection_id,
            )
            self._outgoing.queue(_failed(request_id))
        del self._exchanges[request_id]
        if not self._exchanges:
            self._idle.set()
            self._idle = trio.Event()

    async def _pay(self) -> None:
        """Let a refusal beyond the rate wait. Not within the request's scope: a peer that cancels
        it waits all the same, and one that leaves owes it. Nobody waits at the shutdown."""
        self._owed_pauses += 1
        async with self._refusal_turn:
            with trio.move_on_after(REFUSAL_PAUSE_SECONDS):
                await self._context.shutdown.wait()
        self._owed_pauses -= 1

    # --- time ---------------------------------------------------------------------------------

    async def _keep_alive(self, scope: trio.CancelScope) -> None:
        """Ping a silent peer; end the connection of one that does not answer."""
        while True:
            silent_since = self._last_received
            await trio.sleep_until(silent_since + self._heartbeat_seconds)
            if self._last_received > silent_since:
                continue
            if not self._connection.is_ping_unanswered:
                self._ping_token += 1
                await self._outgoing.send(m.Ping(token=self._ping_token))
                await trio.sleep(self._heartbeat_seconds)
            if self._connection.is_ping_unanswered:
                self._farewell = _IDLE
                scope.cancel()
                return

    async def _drain_at_shutdown(self, scope: trio.CancelScope) -> None:
        await self._context.shutdown.wait()
        while self._exchanges:
            await self._idle.wait()
        self._farewell = _SHUTTING_DOWN
        scope.cancel()


def _failed(request_id: int) -> m.Unavailable:
    return m.Unavailable(
        request_id=request_id,
        code=UnavailableCode.SETUP_FAILED,
        detail="the service failed to answer; its log says why",
    )
