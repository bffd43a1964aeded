"""The launcher's one loop: a client, its requests, the helpers, the dead.

Invariants: one client at a time; nothing here waits for anything but poll; every request gets
exactly one reply while its client is there; the end of the client (or SIGTERM) kills every
environment at once and destroys each before the next client is accepted.
"""

import os
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from sbxd import rights
from sbxd.launcher import channel, parting
from sbxd.launcher.channel import ChannelViolation, close_all
from sbxd.launcher.filters import Filters
from sbxd.launcher.kernel.process import WARNING, say
from sbxd.launcher.kernel.runsc import NOT_INSTALLED, Runsc, Unusable
from sbxd.launcher.notify import Notifier
from sbxd.launcher.pool import Pool
from sbxd.launcher.requests import LauncherReply
from sbxd.launcher.steps import describe
from sbxd.launcher.verbs import Verbs

OUTGOING_MAX = 4096
PARTING_MAX = 8  # connections whose last close is not over; then no client is accepted
_REQUESTS_PER_TURN = 64
_UCRED = struct.Struct("iII")


class Launcher:
    """See the module. `allowed_uids`: who may be the client (SO_PEERCRED)."""

    def __init__(
        self,
        listener: socket.socket,
        filters: Filters,
        *,
        allowed_uids: frozenset[int],
        notifier: Notifier,
        watchdog_seconds: float | None,
        width: int,
        runsc: Runsc | Unusable = NOT_INSTALLED,
    ) -> None:
        self._listener = listener
        rights.refuse(listener)
        self._allowed_uids = allowed_uids
        self._notifier = notifier
        self._watchdog = watchdog_seconds / 2 if watchdog_seconds else None
        self._client: socket.socket | None = None
        self._is_refusing = False  # whether no descriptor can wait in the client's connection
        self._ended: list[socket.socket] = []  # connections for which there was no room for a child
        self._parting: set[int] = set()
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._pool = Pool(width)
        self._verbs = Verbs(self._pool, filters, self._reply, runsc)
        self._stop_requested = False
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    # --- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until SIGTERM; returns when every environment is destroyed or failed to be."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGTERM, self._request_stop)
        signal.signal(signal.SIGINT, self._request_stop)
        self._listener.setblocking(False)
        self._notifier.tell("READY=1")
        told = time.monotonic()
        while not (self._stopping and self._is_idle()):
            self._turn(self._timeout(told))
            if self._watchdog is not None and time.monotonic() >= told + self._watchdog:
                self._notifier.tell("WATCHDOG=1")
                told = time.monotonic()

    def _turn(self, timeout_seconds: float | None) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        handlers: dict[int, Callable[[int], None]] = {self._wake_read: self._woken}
        for helper in self._pool.channels():
            poll.register(helper, select.POLLIN)
            handlers[helper] = partial(self._helper_ready, helper)
        if self._client is not None:
            events = select.POLLOUT if self._outgoing else select.POLLIN
            poll.register(self._client, events)
            handlers[self._client.fileno()] = self._client_ready
        elif self._is_idle() and not self._stopping and self._may_accept():
            poll.register(self._listener, select.POLLIN)
            handlers[self._listener.fileno()] = self._accept
        milliseconds = None if timeout_seconds is None else int(timeout_seconds * 1000) + 1
        for descriptor, events in poll.poll(milliseconds):
            handlers[descriptor](events)
        if self._stop_requested and not self._stopping:
            self._stop()
        self._pool.expire()
        self._reap()
        self._part()

    def _timeout(self, told: float) -> float | None:
        moments = [self._pool.next_deadline()]
        if self._watchdog is not None:
            moments.append(told + self._watchdog)
        wanted = [moment for moment in moments if moment is not None]
        if not wanted or min(wanted) == float("inf"):
            return None
        return max(min(wanted) - time.monotonic(), 0.0)

    def _is_idle(self) -> bool:
        """Whether nothing of the last client is under way."""
        return self._client is None and self._verbs.is_idle() and not self._pool.is_busy()

    def _helper_ready(self, channel_fd: int, _: int) -> None:
        self._pool.readable(channel_fd)

    def _woken(self, _: int) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _request_stop(self, *_: object) -> None:
        """A signal handler may run in the middle of anything: the loop does the work."""
        self._stop_requested = True

    def _stop(self) -> None:
        self._stopping = True
        self._notifier.tell("STOPPING=1")
        self._lose_client("stopping")

    # --- the client ---------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            client, _address = self._listener.accept()
        except OSError:
            return
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _pid, uid, _gid = _UCRED.unpack(raw)
        self._is_refusing = rights.admit(client)
        if uid not in self._allowed_uids:
            say(WARNING, f"refusing a client with uid {uid}")
            self._close(client)
            return
        client.setblocking(False)
        self._client = client

    def _client_ready(self, events: int) -> None:
        if events & (select.POLLHUP | select.POLLERR):
            self._lose_client("end of file")
            return
        if events & select.POLLOUT:
            self._flush()
            return
        for _ in range(_REQUESTS_PER_TURN):
            if self._client is None or self._outgoing:
                return
            try:
                request = channel.receive_request(self._client)
            except BlockingIOError:
                return
            except (ChannelViolation, OSError) as problem:
                self._lose_client(f"protocol: {problem}")
                return
            if request is None:
                self._lose_client("end of file")
                return
            self._verbs.dispatch(request)

    def _lose_client(self, why: str) -> None:
        """Kill everything at once; then destroy it, one by one, in helpers."""
        if self._client is not None:
            say(WARNING, f"the client's channel ended ({why}): ending all environments")
            self._close(self._client)
            self._client = None
        while self._outgoing:
            close_all(self._outgoing.popleft()[1])
        self._verbs.end_all()

    def _may_accept(self) -> bool:
        return not self._ended and len(self._parting) < PARTING_MAX

    def _close(self, end: socket.socket) -> None:
        """Close a connection, now or when there is room for a child; never waits."""
        if self._is_refusing:
            end.close()
        else:
            self._ended.append(end)
            self._part()

    def _part(self) -> None:
        while self._ended:
            try:
                self._parting.add(parting.close(self._ended[0]))
            except OSError:
                return
            self._ended.pop(0)

    def _reply(self, reply: LauncherReply, descriptors: list[int]) -> None:
        """Send or queue; takes over the descriptors."""
        if self._client is None:
            close_all(descriptors)
            return
        self._outgoing.append((channel.encode(reply), descriptors))
        self._flush()

    def _flush(self) -> None:
        while self._outgoing and self._client is not None:
            raw, descriptors = self._outgoing[0]
            try:
                channel.send(self._client, raw, descriptors)
            except BlockingIOError:
                if len(self._outgoing) > OUTGOING_MAX:
                    self._lose_client("it does not read")
                return
            except OSError as problem:
                self._lose_client(describe(problem))
                return
            self._outgoing.popleft()
            close_all(descriptors)

    # --- the dead -----------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            self._pool.ended(ended.si_pid)
            pid, status = os.waitpid(ended.si_pid, 0)
            if pid in self._parting:
                self._parting.discard(pid)
                continue
            self._verbs.reaped(pid, status)


def _ignore(*_: object) -> None:
    """SIGCHLD only has to wake the loop."""
