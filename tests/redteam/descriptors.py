"""Descriptors in flight whose last drop sleeps: the attack, and how a test sees that it works."""

import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from sbxd import rights
from tests.pacing import next_look

SECONDS_MAX = 120  # generous: the machine may be loaded
LINGER_SECONDS = 600
# Where a process sleeps that waits for a lingering socket, as /proc/PID/wchan names it.
LINGERS = "wait_woken"
UNAVAILABLE = 9999  # no kernel has such an option: as if it had no SO_PASSRIGHTS


def lingering_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a full TCP connection: who drops the last reference of the first, before the
    second, sleeps for LINGER_SECONDS."""
    first = socket.socket()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        first.connect(server.getsockname())
        second, _ = server.accept()
    first.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            first.send(b"x" * 65536)
    linger = struct.pack("ii", 1, LINGER_SECONDS)
    for end in (first, second):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    return first, second


def send_lingering(end: socket.socket, data: bytes = b"x", flags: int = 0) -> bool:
    """Send such a pair and forget it. False when the kernel refused to send it.

    Whoever receives must not do so before this has returned: the last drop would be here.
    """
    first, second = lingering_pair()
    sent = False
    try:
        with suppress(PermissionError):
            socket.send_fds(end, [data], [first.fileno(), second.fileno()], flags)
            sent = True
        return sent
    finally:
        if not sent:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        first.close()
        second.close()


def connected(path: str) -> socket.socket:
    """A blocking connection to this Unix stream socket."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(SECONDS_MAX)
    end.connect(path)
    return end


def has_passrights() -> bool:
    """Whether the kernel can refuse descriptors."""
    first, second = socket.socketpair()
    with first, second:
        return rights.refuse(first)


def is_lingering(pid: int) -> bool:
    """Whether this process sleeps in a close."""
    return Path(f"/proc/{pid}/wchan").read_text() == LINGERS


async def lingers(pid: int) -> None:
    """Until this process sleeps in a close."""
    with trio.fail_after(SECONDS_MAX):
        while not is_lingering(pid):
            await next_look()


@contextmanager
def stuck_child(end: socket.socket, *, receives: bool) -> Iterator[int]:
    """A process that has the only copy of the end and receives from it, or closes it, as a loop
    without a defence would. It is killed at the end of the block."""
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go)
            os.read(wait, 1)  # until no other copy is left
            if receives:
                end.recv(65536)
            end.close()
        finally:
            os._exit(0)
    end.close()
    os.close(wait)
    os.close(go)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def interrupts_only_at_the_end() -> Iterator[None]:
    """The closers' signal is ignored within the block, so that an attack stays held open; then
    their threads are let go."""
    before = signal.signal(signal.SIGURG, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGURG, lambda *_: None)
        for thread in threading.enumerate():
            if thread.name in ("closer", "closers"):
                thread.join(SECONDS_MAX)
        signal.signal(signal.SIGURG, before)
