"""The door: accepts connections, asks the kernel who is there, and starts sessions.

Invariants: the peer is judged before a byte is read from it; a refused connection costs no task
and no wait, and is closed at once; connections are counted per socket in total and per uid, and a
uid has at most as many as are free, so that workers cannot shut out operators, nor one worker's uid
the others. What a uid connects beyond its rate is counted alone. Deliberately absent: making
sockets (the daemon's, or socket activation's), frames.

Source: decision 0216.
"""

import errno
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from sbxd.audit.events import Door, PeerRefusal, PeerRefused
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.lifecycle.environments import Peer, PeerRole
from sbxd.policy.arrivals import Arrivals
from sbxd.service.peer import (
    NOT_AUTHORIZED,
    PeerCredentials,
    judge_peer,
    read_peer_credentials,
)
from sbxd.service.session import Session, SessionContext
from sbxd.service.unix import PeerListener, PeerStream, UnixStream
from sbxd.wire.connection import ServerConnection
from sbxd.wire.legality import Role
from sbxd.wire.messages import Goodbye, GoodbyeCode

# accept(2): the host is short of something that other connections will give back.
ACCEPT_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
ACCEPT_PAUSE_SECONDS = 0.1
# Connections that are accepted before anything else has a turn, and the pause where one of them was
# turned away: whoever connects without end gets a quarter of the service's time at most.
BATCH_MAX = 32
TURNED_AWAY_PAUSE_SECONDS = 0.02
# Refusals that wait to be recorded; further ones are counted.
REFUSED_WAITING_MAX = 64


def _frame(farewell: Goodbye) -> bytes:
    return ServerConnection(role=Role.WORKER).send(farewell)


_STRANGER = _frame(NOT_AUTHORIZED)
_FULL = _frame(Goodbye(code=GoodbyeCode.CAPACITY, reason="too many connections"))
_TOO_FAST = _frame(
    Goodbye(code=GoodbyeCode.CAPACITY, reason="this uid connects too often: keep connections open")
)

PeerReader = Callable[[PeerStream], PeerCredentials]


@dataclass(frozen=True)
class DoorListener:
    """A listening socket and what it is for. Closed by `Service.serve`."""

    door: Door
    listener: PeerListener


def peer_of_socket(stream: PeerStream) -> PeerCredentials:
    """The peer of a UnixStream. Raises OSError for any other stream."""
    if not isinstance(stream, UnixStream):
        raise OSError(errno.ENOTSOCK, "not a socket")
    return read_peer_credentials(stream.end)


class Service:
    """All connections of a daemon."""

    def __init__(
        self,
        context: SessionContext,
        audit: AuditSink,
        log: logging.Logger,
        *,
        read_peer: PeerReader = peer_of_socket,
    ) -> None:
        """read_peer: how the peer of a stream is known."""
        self._context = context
        self._audit = audit
        self._log = log
        self._read_peer = read_peer
        self._connection_ids = itertools.count(1)
        self._connections: Counter[Door] = Counter()
        # Besides its connections, those that have ended and owe time.
        self._places_of: Counter[tuple[Door, int]] = Counter()
        self._arrivals = {door: Arrivals() for door in Door}
        self._strangers = {door: Arrivals() for door in Door}
        self._refused, self._to_record = trio.open_memory_channel[PeerRefused](REFUSED_WAITING_MAX)

    @property
    def connections(self) -> int:
        """How many places are taken: by connections that are served, or have ended and owe time."""
        return self._places_of.total()

    async def serve(
        self,
        listeners: Sequence[DoorListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept and serve until `shut_down` and the last session's end.

        Cancellation: every session is cancelled; the listeners are closed.
        """
        async with trio.open_nursery() as sessions:
            sessions.start_soon(self._record_refused)
            with self._refused:
                async with trio.open_nursery() as accepting:
                    for each in listeners:
                        accepting.start_soon(self._accept, each, sessions)
                    task_status.started()
                    await self._context.shutdown.wait()
                    accepting.cancel_scope.cancel()

    def shut_down(self) -> None:
        """Accept nothing more; each session ends when its open requests have been answered.
        Whoever calls this bounds the wait for `serve` to return."""
        self._context.shutdown.set()

    async def _accept(self, each: DoorListener, sessions: trio.Nursery) -> None:
        async with each.listener:
            while True:
                try:
                    all_served = self._admit(await each.listener.accept(), each.door, sessions)
                    for _ in range(BATCH_MAX - 1):
                        stream = each.listener.accept_nowait()
                        if stream is None:
                            break
                        all_served &= self._admit(stream, each.door, sessions)
                except OSError as error:
                    if error.errno not in ACCEPT_SHORTAGES:
                        raise
                    self._log.error(
                        "pausing: a connection could not be accepted: %s", error.strerror
                    )
                    await trio.sleep(ACCEPT_PAUSE_SECONDS)
                    continue
                if not all_served:
                    await trio.sleep(TURNED_AWAY_PAUSE_SECONDS)

    def _admit(self, stream: PeerStream, door: Door, sessions: trio.Nursery) -> bool:
        """Start a session, or turn the connection away; whether it is served."""
        try:
            credentials = self._read_peer(stream)
        except OSError:
            stream.turn_away(b"")
            return False
        uid, now = credentials.uid, trio.current_time()
        refusal, farewell = judge_peer(door, credentials, self._context.settings), _STRANGER
        arrivals = (self._arrivals if refusal is None else self._strangers)[door]
        is_within = arrivals.take(uid, now)
        if refusal is None and not is_within:
            refusal, farewell = PeerRefusal.CONNECTING_TOO_FAST, _TOO_FAST
        if refusal is None and not self._has_place(door, uid):
            refusal, farewell = PeerRefusal.TOO_MANY_CONNECTIONS, _FULL
        if refusal is None:
            self._connections[door] += 1
            self._places_of[door, uid] += 1
            sessions.start_soon(self._serve_one, stream, door, credentials)
            return True
        stream.turn_away(farewell)
        event = _refused(door, refusal, credentials)
        if is_within:
            arrivals.broke(uid, now)
            try:
                self._refused.send_nowait(event)
            except trio.WouldBlock:
                self._context.count(event)
        else:
            self._context.count(event)
        return False

    def _has_place(self, door: Door, uid: int) -> bool:
        """Whether the uid may have one more: at most as many as would be free without it, so that
        however many uids take all they can, the next one still finds some."""
        limits = self._context.settings.service
        free = limits.connections_max - self._connections[door]
        return self._places_of[door, uid] < min(limits.connections_per_peer_max, free)

    async def _record_refused(self) -> None:
        """Record who was turned away, one after the other. Cancellation: the others are counted."""
        try:
            async for event in self._to_record:
                await self._record(event)
        finally:
            while self._to_record.statistics().current_buffer_used:
                self._context.count(self._to_record.receive_nowait())

    async def _serve_one(
        self, stream: PeerStream, door: Door, credentials: PeerCredentials
    ) -> None:
        peer = Peer(
            uid=credentials.uid,
            connection_id=next(self._connection_ids),
            role=PeerRole(door.value),
        )
        session = Session(stream, door=door, peer=peer, context=self._context)
        try:
            try:
                refusal = await session.run()
            finally:
                self._connections[door] -= 1
            if refusal is not None or not session.is_greeted:
                self._arrivals[door].broke(peer.uid, trio.current_time())
            if refusal is not None:
                await self._record(_refused(door, refusal, credentials))
            await self._hold_place(session)
        finally:
            self._places_of[door, peer.uid] -= 1
            if not self._places_of[door, peer.uid]:
                del self._places_of[door, peer.uid]

    async def _hold_place(self, session: Session) -> None:
        """Keep an ended connection's place of its uid taken for what it owes, so that a peer that
        connects anew gets no more refusals than one that waits for them."""
        if session.owed_seconds:
            with trio.move_on_after(session.owed_seconds):
                await self._context.shutdown.wait()

    async def _record(self, event: PeerRefused) -> None:
        try:
            await self._audit.emit(event)
        except AuditUnavailable:
            self._log.error("ignoring: a refused peer could not be recorded: %s", event)


def _refused(door: Door, refusal: PeerRefusal, credentials: PeerCredentials) -> PeerRefused:
    return PeerRefused(
        door=door,
        reason=refusal,
        peer_uid=credentials.uid,
        peer_gid=credentials.gid,
        peer_pid=credentials.pid,
    )
