"""Dialling for the proxies: the kernel is asked for the route right before and right after.

Invariants: no connection is opened to an address whose route does not lead beyond a gateway at
that moment; none is handed out whose own route, source and ports included, does not; what the
kernel does not say is a refusal; a connection that is refused afterwards is reset before a byte
went through it.
"""

import socket

from sbxd.egress.sockets import dial, reset
from sbxd.policy.addresses import parse_address
from sbxd.policy.routes import Flow, LiveHostNetwork


class Dialler:
    """`Dial` of `sbxd.egress.proxy` with the host's network as it is now."""

    def __init__(self, host_network: LiveHostNetwork) -> None:
        self._host_network = host_network

    async def dial(self, address: str, port: int) -> socket.socket:
        """A connection to a literal address beyond the host's links, and to no other.

        Raises:
            OnHostNetwork: it is the host's own or a neighbour, now or once connected.
            OSError: as `sbxd.egress.sockets.dial`; NoWay and HostNetworkUnknown among them.

        Cancellation: nothing is left behind.
        """
        destination = parse_address(address)
        self._host_network.require(Flow(destination=destination, port=port))
        connected = await dial(address, port)
        try:
            source, source_port, *_ = connected.getsockname()
            self._host_network.require(
                Flow(
                    destination=destination,
                    port=port,
                    source=parse_address(source),
                    source_port=source_port,
                )
            )
        except BaseException:
            reset(connected)
            raise
        return connected
