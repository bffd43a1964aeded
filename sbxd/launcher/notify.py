"""systemd's side of a service: the sockets it passes, and the states it is told. No library."""

import os
import socket
from contextlib import suppress

FIRST_PASSED_DESCRIPTOR = 3


def passed_sockets(environ: dict[str, str]) -> list[int]:
    """The descriptors of LISTEN_FDS that are meant for this process."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = environ.get("LISTEN_FDS", "0")
    number = int(count) if count.isdigit() else 0
    return list(range(FIRST_PASSED_DESCRIPTOR, FIRST_PASSED_DESCRIPTOR + number))


def watchdog_seconds(environ: dict[str, str]) -> float | None:
    """How often PID 1 wants to hear of us at least; None when it does not."""
    text = environ.get("WATCHDOG_USEC", "")
    if not text.isdigit() or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(text) / 1_000_000


class Notifier:
    """Tells PID 1 what state this service is in; silent when nobody listens."""

    def __init__(self, address: str | None) -> None:
        self._address = f"\0{address[1:]}" if address and address.startswith("@") else address

    def tell(self, state: str) -> None:
        """Send one state ("READY=1"). A PID 1 that does not listen is no reason to fail."""
        if not self._address:
            return
        with (
            suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
        ):
            channel.sendto(state.encode("ascii"), self._address)
