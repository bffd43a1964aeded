"""The proxy's socket of one sandbox, as this side got it: checked, held, given up once.

Invariant: what is handed on is a TCP socket that is bound to the proxy's port of a loopback, does
not listen and shares its address with nobody; anything else is refused before a tenant comes.
"""

import errno
import os
import socket

from sbxd.mechanism.protocol import MechanismError
from sbxd.port.network import PROXY_ADDRESS, PROXY_PORT

_OFF = (socket.SO_ACCEPTCONN, socket.SO_REUSEADDR, socket.SO_REUSEPORT)


class ProxyPort:
    """Owns the descriptor. descriptor: None when there is none, and once it is closed."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor

    def check(self) -> None:
        """Raises MechanismError for a socket that is not what the invariant says."""
        if self.descriptor is None:
            return
        try:
            with socket.socket(fileno=os.dup(self.descriptor)) as end:
                end.setblocking(False)
                found = (end.family, end.type, end.getsockname())
                options = [end.getsockopt(socket.SOL_SOCKET, option) for option in _OFF]
        except OSError as problem:
            raise MechanismError("proxy_listener", problem.errno or 0) from None
        wanted = (socket.AF_INET, socket.SOCK_STREAM, (PROXY_ADDRESS, PROXY_PORT))
        if found != wanted or any(options):
            raise MechanismError("proxy_listener", errno.EPROTO, "not the proxy's bound socket")

    def close(self) -> None:
        """Give it up: the port is free, and nothing listens there any more. Idempotent."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)
