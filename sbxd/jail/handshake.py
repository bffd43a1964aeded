"""Messages between the helper and the processes that it makes, while they are being made.

Invariants: one SOCK_SEQPACKET pair per process; every wait has a deadline; a partner that is gone
is an error at once and never a wait. What a construction process says is believed only as far as
it names its own failure: the helper knows pids from the kernel.
"""

import errno
import os
import select
import socket

from sbxd.jail.steps import JailError

DEADLINE_SECONDS = 10
_MESSAGE_BYTES_MAX = 1024
_DONE = b"done"


class Gate:
    """One end of a pair. The holder closes it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple["Gate", "Gate"]:
        """Two ends, both close-on-exec."""
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(first), cls(second)

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        """Close this end; the partner sees the end of file."""
        self._end.close()

    def send(self, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send one message. Raises OSError when the partner is gone."""
        if descriptors:
            socket.send_fds(self._end, [message], descriptors, socket.MSG_NOSIGNAL)
        else:  # not by sendmsg, which the steward's filter does not allow
            self._end.send(message, socket.MSG_NOSIGNAL)

    def receive(self, descriptors: int = 0) -> tuple[bytes, list[int]]:
        """One message and its descriptors (owned by the caller).

        Raises OSError: ETIMEDOUT after DEADLINE_SECONDS, EPIPE when the partner is gone.
        """
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(DEADLINE_SECONDS * 1000):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return self.receive_when_it_comes(_MESSAGE_BYTES_MAX, descriptors)

    def receive_when_it_comes(self, size: int, descriptors: int) -> tuple[bytes, list[int]]:
        """As `receive`, for as long as the partner lives, up to `size` bytes."""
        try:
            message, received, _, _ = socket.recv_fds(self._end, size, descriptors)
        except ConnectionResetError:  # it died before it read what we sent
            message, received = b"", []
        if not message:
            raise OSError(errno.EPIPE, "the process at the other end is gone")
        return message, received

    def send_done(self, descriptors: tuple[int, ...] = ()) -> None:
        """Say that construction is complete, and hand over what was made."""
        self.send(_DONE, descriptors)

    def send_failure(self, problem: JailError, descriptors: tuple[int, ...] = ()) -> None:
        """Say which step failed; silent when nobody listens any more."""
        text = f"{problem.step}\0{problem.errno}\0{problem.detail}"
        try:
            self.send(text.encode(errors="replace")[:_MESSAGE_BYTES_MAX], descriptors)
        except OSError:
            return

    def receive_done(self, process: str, descriptors: int = 0) -> list[int]:
        """Wait for `send_done`; the caller owns exactly so many descriptors.

        Raises JailError with the partner's step, or `await_<process>`.
        """
        try:
            message, received = self.receive(descriptors)
        except OSError as problem:
            raise JailError(f"await_{process}", problem.errno or 0, str(problem)) from problem
        raise_failure(message, process)
        if len(received) != descriptors:
            raise JailError(f"await_{process}", errno.EPROTO, "a descriptor is missing")
        return received


def raise_failure(message: bytes, process: str) -> None:
    """Raise the JailError that a message of this process carries, unless it is the good one."""
    if message == _DONE:
        return
    parts = message.decode(errors="replace").split("\0", 2)
    if len(parts) != 3 or not parts[1].isdecimal():
        raise JailError(f"await_{process}", errno.EPROTO, "not a message of this handshake")
    raise JailError(f"{process}.{parts[0]}", int(parts[1]), parts[2])


def await_end(pidfd: int) -> None:
    """Reap the child of this pidfd. Raises TimeoutError after DEADLINE_SECONDS."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(DEADLINE_SECONDS * 1000):
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
