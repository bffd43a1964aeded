"""The lease authority of a worker tier: a process of its own (`sbxd-worker leases`), or embedded.

    authority = LeaseAuthority(Admitted(holder_uids=frozenset({1000}), asker_uids=frozenset({990})))
    async with anyio.create_task_group() as tasks:
        await tasks.start(authority.serve, "/run/worker/leases.sock")

Runs under asyncio and trio. The book is memory: after a restart holders register again (the
registrar does), and until then the daemon is told UNKNOWN, which it takes for STALE only when it
lasts.

Invariants: whom the kernel reports as no configured uid is closed before a byte is read; one
connection can hold neither another back nor more than one frame of memory; a connection that does
not greet, or does not take its answer, is closed.
"""

import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import anyio
from anyio.abc import ByteStream, SocketAttribute, TaskStatus

from sbxd.client import unix
from sbxd.policy.leases import LeaseBook, LeaseRefusal
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.wire import leases as w
from sbxd.wire.connection import Pause
from sbxd.wire.errors import RemoteProtocolError
from sbxd.wire.legality import Sender
from sbxd.wire.messages import Message

GRACE_SECONDS = 30.0
HELLO_SECONDS = 5.0
SEND_SECONDS = 5.0
CONNECTIONS_MAX = 1024
RECEIVE_BYTES = 16 * 1024
# Whoever may connect is judged by its uid, as the kernel reports it.
SOCKET_MODE = 0o666
_UCRED = struct.Struct("=iII")


@dataclass(frozen=True)
class Admitted:
    """Who may speak, by uid. Root may in either role. holder_uids: workers and their supervisors.
    asker_uids: the daemon's."""

    holder_uids: frozenset[int]
    asker_uids: frozenset[int]

    def allows(self, uid: int, role: w.LeaseRole) -> bool:
        """Whether a peer of this uid may take this role."""
        allowed = self.holder_uids if role is w.LeaseRole.HOLDER else self.asker_uids
        return uid == 0 or uid in allowed


class LeaseAuthority:
    """Answers holders and askers. `serve` is its task."""

    def __init__(
        self,
        admitted: Admitted,
        *,
        grace_seconds: float = GRACE_SECONDS,
        connections_max: int = CONNECTIONS_MAX,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        """clock: seconds that never jump. grace_seconds: how long a lease outlives its holder's
        connection."""
        self._admitted = admitted
        self._grace_seconds = grace_seconds
        self._connections_max = connections_max
        self._clock = clock
        self._connections = 0
        self._last_number = 0
        self.book = LeaseBook(grace_seconds=grace_seconds)

    async def serve(
        self, path: str, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen until cancelled; the socket is removed then.

        Raises: ExecutionUnavailable(UNREACHABLE) when another authority listens there, or the
        socket cannot be made.
        """
        await _refuse_taken(path)
        try:
            listener = unix.listen(path, mode=SOCKET_MODE)
        except OSError as problem:
            raise ExecutionUnavailable(
                UnavailableCode.UNREACHABLE, f"the socket cannot be made: {problem.strerror}"
            ) from None
        try:
            task_status.started()
            await listener.serve(self._connected)
        finally:
            listener.close()
            with suppress(OSError):
                os.unlink(path)

    async def _connected(self, stream: ByteStream) -> None:
        async with stream:
            peer = stream.extra(SocketAttribute.raw_socket)  # noqa: S610  (no Django here)
            _pid, uid, _gid = _UCRED.unpack(
                peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
            if not any(self._admitted.allows(uid, role) for role in w.LeaseRole):
                return
            self._last_number += 1
            number = self._last_number
            self._connections += 1
            try:
                await _Session(self, stream, uid, number).run()
            except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # the peer is gone
            finally:
                self._connections -= 1
                self.book.lose(number, self._clock())

    @property
    def is_full(self) -> bool:
        """Whether one connection more than the bound is open."""
        return self._connections > self._connections_max

    def judge_hello(self, uid: int, hello: w.LeaseHello) -> Message:
        """LeaseWelcome or LeaseFarewell."""
        if not self._admitted.allows(uid, hello.role):
            return w.LeaseFarewell(code=w.LeaseFarewellCode.NOT_AUTHORIZED)
        if hello.protocol_version != w.LEASE_PROTOCOL_VERSION:
            return w.LeaseFarewell(code=w.LeaseFarewellCode.VERSION)
        if self.is_full:
            return w.LeaseFarewell(code=w.LeaseFarewellCode.CAPACITY)
        return w.LeaseWelcome(
            protocol_version=w.LEASE_PROTOCOL_VERSION, grace_seconds=self._grace_seconds
        )

    def answer(self, number: int, request: Message) -> Message:
        """The reply to one request of connection `number`."""
        now = self._clock()
        try:
            match request:
                case w.Register():
                    self.book.register(number, request.nonce, request.run, request.lease_epoch, now)
                case w.Bind():
                    self.book.bind(request.nonce, request.environment_id)
                case w.Release():
                    self.book.release(request.nonce)
                case w.Fence():
                    self.book.fence(request.run, request.lease_epoch)
                case w.Query():
                    self.book.prune(now)
                    return w.Standings(
                        standings=tuple(
                            self.book.standing(each, now) for each in request.environment_ids
                        )
                    )
                case _:
                    return w.LeaseFarewell(code=w.LeaseFarewellCode.PROTOCOL)
        except LeaseRefusal as refusal:
            return w.Refused(code=refusal.code)
        return w.Granted()


class _Session:
    """One connection, from its hello to its end."""

    def __init__(
        self, authority: LeaseAuthority, stream: ByteStream, uid: int, number: int
    ) -> None:
        self._authority = authority
        self._stream = stream
        self._uid = uid
        self._number = number
        self._wire = w.LeaseConnection(Sender.SERVER)

    async def run(self) -> None:
        """Until the peer goes, breaks the protocol or is too slow."""
        try:
            with anyio.move_on_after(HELLO_SECONDS):
                hello = await self._receive()
                if not isinstance(hello, w.LeaseHello):
                    return
                await self._send(self._authority.judge_hello(self._uid, hello))
            while self._wire.state is w.LeaseState.READY:
                request = await self._receive()
                if request is None or not await self._send(
                    self._authority.answer(self._number, request)
                ):
                    return
        except RemoteProtocolError:
            if self._wire.state is not w.LeaseState.CLOSING:
                await self._send(w.LeaseFarewell(code=w.LeaseFarewellCode.PROTOCOL))

    async def _receive(self) -> Message | None:
        """The next message; None at the end of the stream."""
        while True:
            event = self._wire.next_event()
            if event is Pause.CLOSED:
                return None
            if isinstance(event, Message):
                return event
            try:
                self._wire.receive_data(await self._stream.receive(RECEIVE_BYTES))
            except anyio.EndOfStream:
                self._wire.receive_data(b"")

    async def _send(self, message: Message) -> bool:
        """False when the peer did not take it in time."""
        with anyio.move_on_after(SEND_SECONDS):
            await self._stream.send(self._wire.send(message))
            return True
        return False


async def _refuse_taken(path: str) -> None:
    """A socket that somebody listens on, and what is no socket, are never replaced."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return
    if is_socket:
        try:
            stream = await unix.connect(path)
        except ConnectionRefusedError:
            return
        except OSError:
            is_socket = False
        else:
            await stream.aclose()
    raise ExecutionUnavailable(
        UnavailableCode.UNREACHABLE,
        "another authority listens on that socket" if is_socket else "that place is taken",
    )
