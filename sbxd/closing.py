"""Closes ends in which descriptors wait, away from every loop that must not wait.

    closers = Closers()
    closers.close(end)      # at once, in the caller, unless a descriptor waits in it

Only an end whose peer did send descriptors (`sbxd.rights.is_clear`) gets here, so nobody else's
close stands behind it. The drop of a lingering socket sleeps until a signal: a thread that has not
closed within INTERRUPT_SECONDS is interrupted by one, and again until it has. The handler of that
signal is installed by the process (`allow_interrupts`); without it the signal is ignored, and a
close takes as long as the peer has set.

Invariants: at most THREADS_MAX threads and WAITING_MAX ends, after which `has_room` is False and
the caller takes on no new end; no thread keeps the process from ending.

Source: decision 0180.
"""

import signal
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Final

from sbxd import rights

THREADS_MAX: Final = 4
WAITING_MAX: Final = 64
INTERRUPT_SECONDS: Final = 0.005
INTERRUPT: Final = signal.SIGURG  # ignored by default; nothing else here uses it


def allow_interrupts() -> None:
    """Install the handler that makes an interrupted sleep end. In the main thread; where the
    process has a handler of its own, that one serves."""
    if signal.getsignal(INTERRUPT) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(INTERRUPT, _ignore)


class Closers:
    """The ends of one process that are being closed. Safe to use from any thread."""

    def __init__(self, *, threads_max: int = THREADS_MAX, waiting_max: int = WAITING_MAX) -> None:
        self._threads_max = threads_max
        self._waiting_max = waiting_max
        self._waiting: deque[socket.socket] = deque()
        self._changed = threading.Condition()
        self._closing: set[int] = set()  # threads that are in a close
        self._threads = 0
        self._interrupter = False

    @property
    def has_room(self) -> bool:
        """Whether a further end may be taken on."""
        return self.busy < self._waiting_max

    @property
    def busy(self) -> int:
        """How many ends are not closed yet."""
        with self._changed:
            return len(self._waiting) + len(self._closing)

    def close(self, end: socket.socket, *, is_refusing: bool = False) -> None:
        """Close an end; never waits. The caller has told its loop that it is closed.

        is_refusing: no descriptor can wait in it (`rights.refuse` before it was connected,
        `rights.admit`).
        """
        if is_refusing or rights.is_clear(end):
            with suppress(OSError):
                end.close()
            return
        self.close_unseen(end)

    def close_unseen(self, end: socket.socket) -> None:
        """Close in a thread what cannot be looked into, such as a listener; never waits."""
        with self._changed:
            self._waiting.append(end)
            if self._threads < self._threads_max:
                self._threads += 1
                threading.Thread(target=self._close_all, name="closer", daemon=True).start()
            if not self._interrupter:
                self._interrupter = True
                threading.Thread(target=self._interrupt, name="closers", daemon=True).start()

    def _close_all(self) -> None:
        me = threading.get_ident()
        while True:
            with self._changed:
                if not self._waiting:
                    self._threads -= 1
                    return
                end = self._waiting.popleft()
                self._closing.add(me)
            try:
                with suppress(OSError):
                    end.close()
            finally:
                with self._changed:
                    self._closing.discard(me)
                    self._changed.notify_all()

    def _interrupt(self) -> None:
        """Until nothing is left: a thread that is in a close cannot end while it is signalled."""
        while True:
            with self._changed:
                if not self._waiting and not self._closing:
                    self._interrupter = False
                    return
                self._changed.wait(INTERRUPT_SECONDS)
                for thread in self._closing:
                    signal.pthread_kill(thread, INTERRUPT)


def _ignore(*_: object) -> None:
    """The signal only has to end a sleep."""
