"""The door: accepts connections, asks the kernel who is there, and starts sessions.

Invariants: the peer is judged before a byte is read from it; a refused connection costs no task
and is closed at once; connections are counted per socket in total and per uid, so that workers
cannot shut out operators, nor one worker's uid the others. Deliberately absent: making sockets
(the daemon's, or socket activation's), frames.
"""

import errno
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from sbxd.audit.events import Door, PeerRefusal, PeerRefused
from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.lifecycle.environments import Peer, PeerRole
from sbxd.service.peer import (
    NOT_AUTHORIZED,
    PeerCredentials,
    judge_peer,
    read_peer_credentials,
)
from sbxd.service.session import REFUSAL_PAUSE_SECONDS, Session, SessionContext
from sbxd.service.unix import UnixStream
from sbxd.wire.connection import ServerConnection
from sbxd.wire.legality import Role
from sbxd.wire.messages import Goodbye, GoodbyeCode

# accept(2): the host is short of something that other connections will give back.
ACCEPT_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
ACCEPT_PAUSE_SECONDS = 0.1
REFUSAL_SECONDS = 0.1

_FULL = Goodbye(code=GoodbyeCode.CAPACITY, reason="too many connections")

PeerReader = Callable[[trio.abc.Stream], PeerCredentials]


@dataclass(frozen=True)
class DoorListener:
    """A listening socket and what it is for. Closed by `Service.serve`."""

    door: Door
    listener: trio.abc.Listener[trio.abc.Stream]


def peer_of_socket(stream: trio.abc.Stream) -> PeerCredentials:
    """The peer of a UnixStream. Raises OSError for any other stream."""
    if not isinstance(stream, UnixStream):
        raise OSError(errno.ENOTSOCK, "not a socket")
    return read_peer_credentials(stream.socket)


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
        self._connections_of: Counter[tuple[Door, int]] = Counter()

    @property
    def connections(self) -> int:
        """How many connections are being served."""
        return self._connections.total()

    async def serve(
        self,
        listeners: Sequence[DoorListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept and serve until `shut_down` and the last session's end.

        Cancellation: every session is cancelled; the listeners are closed.
        """
        async with trio.open_nursery() as sessions, trio.open_nursery() as accepting:
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
                    stream = await each.listener.accept()
                except OSError as error:
                    if error.errno not in ACCEPT_SHORTAGES:
                        raise
                    self._log.error(
                        "pausing: a connection could not be accepted: %s", error.strerror
                    )
                    await trio.sleep(ACCEPT_PAUSE_SECONDS)
                    continue
                await self._admit(stream, each.door, sessions)

    async def _admit(self, stream: trio.abc.Stream, door: Door, sessions: trio.Nursery) -> None:
        try:
            credentials = self._read_peer(stream)
        except OSError:
            await trio.aclose_forcefully(stream)
            return
        limits = self._context.settings.service
        refusal = judge_peer(door, credentials, self._context.settings)
        farewell = NOT_AUTHORIZED
        if refusal is None and (
            self._connections[door] >= limits.connections_max
            or self._connections_of[door, credentials.uid] >= limits.connections_per_peer_max
        ):
            refusal, farewell = PeerRefusal.TOO_MANY_CONNECTIONS, _FULL
        if refusal is not None:
            await _refuse(stream, farewell)
            await self._record(door, refusal, credentials)
            return
        self._connections[door] += 1
        self._connections_of[door, credentials.uid] += 1
        sessions.start_soon(self._serve_one, stream, door, credentials)

    async def _serve_one(
        self, stream: trio.abc.Stream, door: Door, credentials: PeerCredentials
    ) -> None:
        peer = Peer(
            uid=credentials.uid,
            connection_id=next(self._connection_ids),
            role=PeerRole(door.value),
        )
        session = Session(stream, door=door, peer=peer, context=self._context)
        try:
            refusal = await session.run()
            if refusal is not None:
                await self._record(door, refusal, credentials)
            await self._hold_place(session, credentials, is_refused=refusal is not None)
        finally:
            self._connections[door] -= 1
            self._connections_of[door, credentials.uid] -= 1
            if not self._connections_of[door, credentials.uid]:
                del self._connections_of[door, credentials.uid]

    async def _hold_place(
        self, session: Session, credentials: PeerCredentials, *, is_refused: bool
    ) -> None:
        """Keep an ended connection's place taken for what it owes, so that a peer that connects
        anew gets no more refusals than one that waits for them."""
        seconds = session.owed_seconds
        if is_refused and self._context.is_beyond(credentials.uid):
            seconds += REFUSAL_PAUSE_SECONDS
        if seconds:
            with trio.move_on_after(seconds):
                await self._context.shutdown.wait()

    async def _record(self, door: Door, refusal: PeerRefusal, credentials: PeerCredentials) -> None:
        event = PeerRefused(
            door=door,
            reason=refusal,
            peer_uid=credentials.uid,
            peer_gid=credentials.gid,
            peer_pid=credentials.pid,
        )
        try:
            await self._audit.emit(event)
        except AuditUnavailable:
            self._log.error("ignoring: a refused peer could not be recorded: %s", event)


async def _refuse(stream: trio.abc.Stream, farewell: Goodbye) -> None:
    """Say why and close. A fresh socket's buffer takes the few bytes at once."""
    frame = ServerConnection(role=Role.WORKER).send(farewell)
    with trio.move_on_after(REFUSAL_SECONDS):
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.send_all(frame)
    await trio.aclose_forcefully(stream)
