"""systemd's side of a service: the sockets it passes and the states it is told. No library.

Invariants: nothing is read from the process's environment here (the caller hands it over); a
service manager that does not listen is no reason to fail. Told: READY=1, STOPPING=1, WATCHDOG=1,
STATUS=….
"""

import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress

from sbxd import rights

FIRST_PASSED_DESCRIPTOR = 3
_PASSED_MAX = 64
_TURNED_AWAY_MAX = 4096


def passed_sockets(environ: Mapping[str, str]) -> dict[str, int]:
    """The descriptors that were passed to this process, by FileDescriptorName.

    Empty when none are meant for this process. A name that was passed twice keeps its first.
    """
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    text = environ.get("LISTEN_FDS", "")
    count = min(int(text), _PASSED_MAX) if text.isascii() and text.isdigit() else 0
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    passed: dict[str, int] = {}
    for position, name in zip(range(count), names, strict=False):
        passed.setdefault(name, FIRST_PASSED_DESCRIPTOR + position)
    return passed


def turn_away(listening: Iterable[int]) -> int:
    """Close the connections that wait at these listening sockets, unread; how many there were.
    One in which a descriptor waits is left to the end of this process, which no close delays.

    The service manager starts a service for as long as somebody waits at its sockets, whatever its
    exit status was. Bounded: whoever connects faster than this is left to the next start.
    """
    closed = 0
    for descriptor in listening:
        with socket.socket(fileno=os.dup(descriptor)) as listener, suppress(OSError):
            listener.setblocking(False)
            while closed < _TURNED_AWAY_MAX:
                waiting = listener.accept()[0]
                if rights.admit(waiting) or rights.is_clear(waiting):
                    waiting.close()
                else:
                    waiting.detach()
                closed += 1
    return closed


def watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Within how many seconds the service manager wants to hear of us; None when it does not."""
    text = environ.get("WATCHDOG_USEC", "")
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        return None
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(text) / 1_000_000


class Notifier:
    """Tells the service manager what state this service is in; silent when there is none.

    address: of NOTIFY_SOCKET ("@name" is an abstract socket), or None.
    """

    def __init__(self, address: str | None) -> None:
        self._address = f"\0{address[1:]}" if address and address.startswith("@") else address

    def tell(self, *states: str) -> None:
        """Send states, such as "READY=1". Never blocks for long: one datagram, dropped when the
        manager does not take it."""
        if not self._address:
            return
        with (
            suppress(OSError),
            socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as channel,
        ):
            channel.sendto("\n".join(states).encode("utf-8"), self._address)
