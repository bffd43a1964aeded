"""The daemon's end of the launcher's channel: tickets, descriptors, deaths, loss.

Invariants: requests may be outstanding concurrently; a reply that nobody waits for any more has
its descriptors closed; when the channel ends (or says what is no reply), every waiter gets
LauncherLost and `wait_lost` returns. The descriptors of an Answer are its receiver's.
"""

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Protocol

import trio

from sbxd.launcher import channel
from sbxd.launcher.channel import ChannelViolation
from sbxd.launcher.requests import (
    MESSAGE_BYTES_MAX,
    Died,
    Failed,
    LauncherReply,
    LauncherRequest,
)
from sbxd.mechanism.protocol import MechanismError


class LauncherLost(MechanismError):
    """The launcher's channel has ended: every environment is being ended by it."""

    def __init__(self) -> None:
        super().__init__("launcher", 0, "the launcher's channel has ended")


class LauncherRefused(MechanismError):
    """The launcher answered Failed. `retriable` is its word."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.step, failed.errno, failed.detail)
        self.retriable = failed.retriable


class Answer:
    """A reply and its descriptors. As a context manager it closes what was not taken."""

    def __init__(self, reply: LauncherReply, descriptors: list[int]) -> None:
        self.reply = reply
        self.descriptors = descriptors

    def take(self) -> list[int]:
        """The descriptors, from now on the caller's."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def __enter__(self) -> "Answer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        channel.close_all(self.take())


class _Waiter:
    def __init__(self) -> None:
        self.happened = trio.Event()
        self.answer: Answer | None = None


RequestOf = Callable[[int], LauncherRequest]  # from a ticket


class Watcher(Protocol):
    """Who wants to know of one environment's ends. Called synchronously."""

    def on_death(self, died: Died) -> None:
        """The launcher reaped init or the steward."""
        ...

    def on_launcher_lost(self) -> None:
        """The launcher's channel has ended."""
        ...


class LauncherClient:
    """One channel. Made by `connect`; its reader task belongs to `connect`'s nursery."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock
        self._sending = trio.Lock()
        self._waiters: dict[int, _Waiter] = {}
        self._watchers: dict[str, Watcher] = {}
        self._ticket = 0
        self._lost = trio.Event()

    def watch(self, environment_id: str, watcher: Watcher) -> None:
        """Tell the watcher of deaths in this environment, and of the launcher's loss."""
        self._watchers[environment_id] = watcher
        if self._lost.is_set():
            watcher.on_launcher_lost()

    def unwatch(self, environment_id: str) -> None:
        """Undo `watch`. Idempotent."""
        self._watchers.pop(environment_id, None)

    async def request(self, make: RequestOf) -> Answer:
        """Send one request and wait for its reply.

        Raises LauncherRefused for Failed, LauncherLost. Cancellation: the request may still be
        carried out; descriptors of its reply are closed.
        """
        self._ticket += 1
        ticket = self._ticket
        raw = channel.encode(make(ticket))
        waiter = self._waiters[ticket] = _Waiter()
        try:
            await self._send(raw)
            if not self._lost.is_set():
                await waiter.happened.wait()
        except BaseException:
            if waiter.answer is not None:
                channel.close_all(waiter.answer.take())
            raise
        finally:
            self._waiters.pop(ticket, None)
        if waiter.answer is None:
            raise LauncherLost
        if isinstance(waiter.answer.reply, Failed):
            channel.close_all(waiter.answer.take())
            raise LauncherRefused(waiter.answer.reply)
        return waiter.answer

    async def wait_lost(self) -> None:
        """Until the channel has ended."""
        await self._lost.wait()

    @property
    def is_lost(self) -> bool:
        """Whether the channel has ended."""
        return self._lost.is_set()

    async def _send(self, raw: bytes) -> None:
        async with self._sending:
            if self._lost.is_set():
                raise LauncherLost
            try:
                await self._socket.send(raw, socket.MSG_NOSIGNAL)
            except OSError:
                self._lose()
                raise LauncherLost from None

    async def read(self) -> None:
        """Receive until the channel ends. Runs once, in a task of its own."""
        try:
            while await self._receive():
                pass
        finally:
            self._lose()

    async def _receive(self) -> bool:
        try:
            raw, control, flags, _ = await self._socket.recvmsg(
                MESSAGE_BYTES_MAX, channel.ancillary_space(), socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return False
        descriptors = channel.descriptors_of(control)
        if not raw or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            channel.close_all(descriptors)
            return False
        try:
            reply = channel.decode_reply(raw)
        except ChannelViolation:
            channel.close_all(descriptors)
            return False
        self._deliver(reply, descriptors)
        return True

    def _deliver(self, reply: LauncherReply, descriptors: list[int]) -> None:
        if isinstance(reply, Died):
            channel.close_all(descriptors)
            watcher = self._watchers.get(reply.environment_id)
            if watcher is not None:
                watcher.on_death(reply)
            return
        waiter = self._waiters.get(reply.ticket)
        if waiter is None or waiter.answer is not None:
            channel.close_all(descriptors)
            return
        waiter.answer = Answer(reply, descriptors)
        waiter.happened.set()

    def _lose(self) -> None:
        if self._lost.is_set():
            return
        self._lost.set()
        for waiter in self._waiters.values():
            waiter.happened.set()
        for watcher in list(self._watchers.values()):
            watcher.on_launcher_lost()


@asynccontextmanager
async def connect(path: str) -> AsyncIterator[LauncherClient]:
    """A client on the launcher's socket for the length of the block.

    Raises OSError when nothing listens. Leaving the block closes the channel, which ends every
    environment.
    """
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sock:
        await sock.connect(os.fsencode(path))
        async with serving(sock) as client:
            yield client


@asynccontextmanager
async def serving(sock: trio.socket.SocketType) -> AsyncIterator[LauncherClient]:
    """A client on a connected socket for the length of the block."""
    client = LauncherClient(sock)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.read)
        yield client
        nursery.cancel_scope.cancel()
