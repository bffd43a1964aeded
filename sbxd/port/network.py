"""What a sandbox's own network holds, as data: nothing but a loopback, or the proxy's port on it.

There is deliberately no shape with a route: whatever leaves a sandbox leaves through the proxy.
"""

from enum import StrEnum

# Where a command finds the proxy: on the sandbox's own loopback, on a port that no command can
# take, since the proxy's socket has been bound to it before the first one.
PROXY_ADDRESS = "127.0.0.1"
PROXY_PORT = 3128


class NetworkShape(StrEnum):
    """NONE: a loopback that nothing listens on. PROXY_PORT: the proxy's socket is bound there,
    and listens only while a command runs that may use it."""

    NONE = "none"
    PROXY_PORT = "proxy_port"
