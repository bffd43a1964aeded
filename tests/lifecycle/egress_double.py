"""Proxies in memory: they note when they are begun and ended, beside the mechanism's calls."""

from dataclasses import dataclass, field

import trio

from sbxd.lifecycle.network import NetworkUse
from sbxd.mechanism.protocol import MechanismError
from sbxd.wire.descriptions import PostureItem
from tests.lifecycle.double import MechanismDouble


@dataclass
class NetworkDouble:
    """One environment's. open_for: the number of the command that has it now."""

    owner: "EgressDouble"
    use: NetworkUse
    open_for: int | None = None
    closed: bool = False
    begun: list[int] = field(default_factory=list)

    async def begin(self, command_number: int) -> None:
        self.owner.mechanism.calls.append("network begin")
        await trio.lowlevel.checkpoint()
        if self.owner.fails:
            raise MechanismError("proxy_listen", 98)
        assert self.open_for is None
        self.open_for = command_number
        self.begun.append(command_number)

    async def end(self) -> None:
        await trio.sleep(self.owner.end_seconds)
        if self.open_for is not None:
            self.owner.mechanism.calls.append("network end")
        self.open_for = None

    async def close(self) -> None:
        await self.end()
        if not self.closed:
            self.owner.mechanism.calls.append("network close")
        self.closed = True

    async def settle(self) -> None:
        await trio.lowlevel.checkpoint()
        self.owner.mechanism.calls.append("network settle")


class EgressDouble:
    """All of them."""

    def __init__(self, mechanism: MechanismDouble) -> None:
        self.mechanism = mechanism
        self.networks: list[NetworkDouble] = []
        self.fails = False
        self.end_seconds = 0.0

    def of_environment(self, use: NetworkUse) -> NetworkDouble:
        network = NetworkDouble(self, use)
        self.networks.append(network)
        return network

    def posture(self) -> tuple[PostureItem, ...]:
        return ()
