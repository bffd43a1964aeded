"""The doors of a sandbox with a kernel of its own, from the daemon's side: the proxy's port on the
guest's loopback, and the bridge.

No socket of the guest's can leave its kernel, so process 1 has a relay serve a door, and the daemon
gives that relay one end of a socket pair for each connection. It offers one at a time: what it does
not ask for is not accepted. What is handed on here is the daemon's end, a stream socket.

Invariants: a door listens from the start of the command after `begin` until that command has ended,
or until `end`; of the proxy's connections an end of file is an end only when the relay has said
that it is one, and else raised as ConnectionResetError, and the other way round: a guest that is
killed in the middle of its words never looks as if it had finished; at most one socket that nobody
has taken is open for a door. Where the kernel can (6.16), no descriptors come through these
sockets.

Deliberately absent: what is said through a door, and any trust in who says it: behind it is the
guest's kernel.
"""

import errno
import os
import socket
from contextlib import suppress
from struct import Struct

import trio

from sbxd import rights
from sbxd.jail.frames import Which

SHORTAGE_PAUSE_SECONDS = 0.1
_WORD = b"\0"
_NUMBER = Struct("=I")


class _Channels:
    """The two sockets to one relay, and what was said on the second."""

    def __init__(self) -> None:
        self.offers, self.theirs_offers = _pair(socket.SOCK_SEQPACKET)
        try:
            self.ends, self.theirs_ends = _pair(socket.SOCK_SEQPACKET)
        except OSError:
            self.offers.close()
            self.theirs_offers.close()
            raise
        self.taken = 0
        self._ended: set[int] = set()

    def has_ended(self, number: int) -> bool:
        """Whether the relay has said that this connection ends. Not to be asked twice."""
        with suppress(OSError):  # nothing more, or nobody more
            while len(said := self.ends.recv(_NUMBER.size + 1)) == _NUMBER.size:
                (ended,) = _NUMBER.unpack(said)
                if ended < self.taken:
                    self._ended.add(ended)
        if number in self._ended:
            self._ended.discard(number)
            return True
        return False

    def say_end(self, number: int) -> None:
        """Raises OSError."""
        self.ends.send(_NUMBER.pack(number), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        trio.lowlevel.notify_closing(self.offers)
        self.offers.close()
        self.ends.close()


class RelayedSocket(socket.socket):
    """The daemon's end of one connection of a command's to its proxy."""

    channels: _Channels
    number: int
    _said_end = False

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """As of any socket."""
        data = super().recv(bufsize, flags)
        if not data:
            self._require_end()
        return data

    def recv_into(  # type: ignore[override]
        self, buffer: bytearray | memoryview, nbytes: int = 0, flags: int = 0
    ) -> int:
        """As of any socket."""
        size = super().recv_into(buffer, nbytes, flags)
        if not size:
            self._require_end()
        return size

    def shutdown(self, how: int, /) -> None:
        """As of any socket."""
        if how != socket.SHUT_RD:
            self.channels.say_end(self.number)
            self._said_end = True
        super().shutdown(how)

    def close(self) -> None:
        """As of any socket. Once the end was said, the guest's kernel does not see this."""
        if self._said_end:
            self._said_end = False
            with suppress(OSError):  # nobody is there any more
                self.channels.say_end(self.number)
        super().close()

    def _require_end(self) -> None:
        if not self.channels.has_ended(self.number):
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


class GuestDoor:
    """One door. `begin`, `end` and `close` never block; one task at a time may `accept`."""

    def __init__(self, which: Which) -> None:
        self.which = which
        self._is_wanted = False
        self._channels: _Channels | None = None
        self._offered: socket.socket | None = None
        self._opened = trio.Event()

    def begin(self) -> None:
        """It is to listen from the start of the next command on."""
        self._is_wanted = True

    def end(self) -> None:
        """It listens no more. Connections that were taken stay. Idempotent."""
        self._is_wanted = False
        self._drop()

    def close(self) -> None:
        """As `end`. Idempotent."""
        self.end()

    def make_channels(self) -> list[int]:
        """The guest's ends of new channels, for the start of a command; owned by the caller. None
        when the door is not to listen. Raises OSError."""
        self._drop()
        if not self._is_wanted:
            return []
        self._channels = channels = _Channels()
        self._opened.set()
        return [channels.theirs_offers.detach(), channels.theirs_ends.detach()]

    async def accept(self) -> socket.socket:
        """The next connection, non-blocking, owned by the caller. Waits for ever where there is
        none to come, as when the guest is gone: who waits ends by cancellation."""
        while True:
            await self._opened.wait()
            channels = self._channels
            assert channels is not None
            try:
                offered = self._offered or self._offer(channels)
            except OSError:  # the host is short of something
                await trio.sleep(SHORTAGE_PAUSE_SECONDS)
                continue
            try:
                await trio.lowlevel.wait_readable(channels.offers)
                word = channels.offers.recv(2)
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                word = b""
            if word == _WORD and self._offered is offered:
                self._offered = None
                channels.taken += 1
                return offered
            if self._channels is channels:  # the relay is gone, or is none
                self._drop()

    def _offer(self, channels: _Channels) -> socket.socket:
        """Raises OSError when there is no pair to be had."""
        ours, theirs = _pair(socket.SOCK_STREAM)
        if self.which is Which.PROXY:
            relayed = RelayedSocket(fileno=ours.detach())
            relayed.channels, relayed.number = channels, channels.taken
            ours = relayed
        with theirs, suppress(OSError):  # the relay is gone: the end of file says so
            socket.send_fds(channels.offers, [_WORD], [theirs.fileno()], socket.MSG_NOSIGNAL)
        self._offered = ours
        return ours

    def _drop(self) -> None:
        if self._opened.is_set():
            self._opened = trio.Event()
        channels, self._channels = self._channels, None
        offered, self._offered = self._offered, None
        if channels is not None:
            channels.close()
        if offered is not None:
            offered.close()


def _pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Our end, which does not block, and theirs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    ours.setblocking(False)
    rights.refuse(ours)
    return ours, theirs
