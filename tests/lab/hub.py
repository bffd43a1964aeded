"""Joins the programs that use a lane to its agent's one stream.

Invariants: one thread, one selector; a command is known by a number that is never used twice; a
user that goes away takes its command with it; a user that does not read stops the stream instead
of filling memory.
"""

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .channel import Broken, Decoder, Frame, Kind
from .host import IN_LANE_ENVIRONMENT, LabError

_CHUNK = 65536
_BACKLOG = 8 << 20


@dataclass
class User:
    """One connected program, with at most one command."""

    connection: socket.socket
    decoder: Decoder = field(default_factory=Decoder)
    pending: bytearray = field(default_factory=bytearray)
    command: int = 0


class Hub:
    """Serves users until one says STOP, `watched` says so, or the lane ends."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.selector = selectors.DefaultSelector()
        self.decoder = Decoder()
        self.receivers: dict[int, Callable[[Frame], None]] = {}
        self.number = 0
        self.over = False
        self.greeted = False
        self.users: set[socket.socket] = set()
        self.selector.register(stream, selectors.EVENT_READ, self._from_agent)

    def watch(self, file: int) -> None:
        """End when the other end of this pipe is gone."""
        self.selector.register(file, selectors.EVENT_READ, self.stop)

    def listen(self, listener: socket.socket) -> None:
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def stop(self) -> None:
        self.over = True

    def wait_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Serve until the condition holds; LabError if it does not in time or the lane ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise LabError(f"{what}: not within {seconds:.0f} s")
            if self.over:
                raise LabError(f"{what}: the lane ended before")
            self._once(left)

    def serve(self) -> None:
        while not self.over:
            self._once(None)

    def run(self, argv: list[str], seconds: float) -> tuple[int, str]:
        """Run a command of the keeper's own to its end: its status and all that it printed."""
        printed = bytearray()
        status: list[int] = []

        def receive(frame: Frame) -> None:
            if frame.kind in (Kind.STDOUT, Kind.STDERR):
                printed.extend(frame.payload)
            elif frame.kind is Kind.EXIT:
                status.append(int(json.loads(frame.payload)["status"]))
            else:
                printed.extend(frame.payload)
                status.append(127)

        request = {
            "argv": argv,
            "directory": "/",
            "environment": IN_LANE_ENVIRONMENT,
            "terminal": False,
        }
        self._begin(json.dumps(request).encode(), receive)
        self.wait_until(lambda: bool(status), seconds, f"`{' '.join(argv)}` in the lane")
        return status[0], printed.decode(errors="replace")

    def _begin(self, request: bytes, receive: Callable[[Frame], None]) -> int:
        self.number += 1
        self.receivers[self.number] = receive
        self._to_agent(Frame(Kind.RUN, self.number, request))
        return self.number

    def _to_agent(self, frame: Frame) -> None:
        self.stream.sendall(frame.encode())

    def _once(self, timeout: float | None) -> None:
        for key, _ in self.selector.select(timeout):
            key.data()

    def _from_agent(self) -> None:
        try:
            data = self.stream.recv(_CHUNK)
            frames = list(self.decoder.feed(data))
        except (OSError, Broken):
            self.over = True
            return
        if not data:
            self.over = True
        for frame in frames:
            if frame.kind is Kind.HELLO:
                self.greeted = True
                continue
            receive = self.receivers.get(frame.command)
            if frame.kind in (Kind.EXIT, Kind.REFUSED):
                self.receivers.pop(frame.command, None)
            if receive:
                receive(frame)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        user = User(connection)
        self.users.add(connection)
        self.selector.register(
            connection, selectors.EVENT_READ, lambda: self._from_or_to_user(user)
        )

    def _from_or_to_user(self, user: User) -> None:
        if user.pending:
            self._flush(user)
        try:
            data = user.connection.recv(_CHUNK)
            frames = list(user.decoder.feed(data))
        except BlockingIOError:
            return
        except (OSError, Broken):
            data, frames = b"", []
        for frame in frames:
            self._handle(user, frame)
        if not data:
            self._drop(user)

    def _handle(self, user: User, frame: Frame) -> None:
        if frame.kind is Kind.STOP:
            self.over = True
        elif frame.kind is Kind.RUN and not user.command:
            user.command = self._begin(frame.payload, lambda reply: self._to_user(user, reply))
        elif frame.kind in (Kind.STDIN, Kind.RESIZE, Kind.KILL) and user.command:
            self._to_agent(Frame(frame.kind, user.command, frame.payload))

    def _to_user(self, user: User, frame: Frame) -> None:
        user.pending += Frame(frame.kind, 0, frame.payload).encode()
        self._flush(user)
        while len(user.pending) > _BACKLOG and user.connection in self.users:
            user.connection.settimeout(None)
            self._flush(user)
            user.connection.setblocking(False)

    def _flush(self, user: User) -> None:
        if user.connection not in self.users:
            return
        try:
            sent = user.connection.send(user.pending) if user.pending else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(user)
            return
        del user.pending[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if user.pending else 0)
        self.selector.modify(user.connection, events, lambda: self._from_or_to_user(user))

    def _drop(self, user: User) -> None:
        if user.connection not in self.users:
            return
        self.users.discard(user.connection)
        self.selector.unregister(user.connection)
        user.connection.close()
        if user.command in self.receivers:
            self.receivers[user.command] = lambda frame: None
            with contextlib.suppress(OSError):
                self._to_agent(Frame(Kind.KILL, user.command))
