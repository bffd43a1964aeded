"""The network of one environment, as the lifecycle sees it: opened for a command, and charged.

Theory: the operator's yes is in the environment's policy and the other is in the command. With
both, the proxy accepts before the program is released, and no connection of it is left when the
command's tree is proven dead, before anything is reported and before its environment is destroyed.
Without either nothing here is called: a connection then fails in the sandbox's own kernel, and
nobody hears of it.

Deliberately absent: the proxy itself and what it decides (`sbxd.egress`, `sbxd.policy.egress`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sbxd.mechanism.protocol import ProxyDoor
from sbxd.port.egress import EgressPolicy
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.wire.descriptions import PostureItem


@dataclass(frozen=True)
class NetworkUse:
    """Which environment may reach what, and for whom it is recorded. owner_uid: whose tenant it is.

    listener: the proxy's socket, or the door to one, of `Sandbox.proxy_listener`; borrowed, whoever
    serves a descriptor makes a copy. charge:
    called once for each connection that is asked for, before it is judged; raises BudgetExhausted,
    and then the environment is being ended.
    """

    environment_id: EnvironmentId
    owner_uid: int
    tenant_id: TenantId
    run_id: RunId
    lease_epoch: int
    policy: EgressPolicy
    listener: int | ProxyDoor
    charge: Callable[[], None]


class EnvironmentNetwork(Protocol):
    """The proxy of one environment. At most one command has it at a time."""

    async def begin(self, command_number: int) -> None:
        """Accept connections of this command from now on. Raises MechanismError: it does not.

        Cancellation: nothing is accepted any more, as after `end`.
        """
        ...

    async def end(self) -> None:
        """Refuse connections again; every tunnel is closed when this returns, and recorded unless
        the audit took nothing. Idempotent.

        Cancellation: the end goes on in the background.
        """
        ...

    async def close(self) -> None:
        """`end`, and give the socket up for good. Idempotent. Cancellation: as `end`."""
        ...

    async def settle(self) -> None:
        """After `close`: until everything is recorded, however long the audit takes nothing."""
        ...


class Egress(Protocol):
    """The daemon's proxies."""

    def of_environment(self, use: NetworkUse) -> EnvironmentNetwork:
        """The network of one environment; nothing happens yet. Raises MechanismError."""
        ...

    def posture(self) -> tuple[PostureItem, ...]:
        """What `sbxctl doctor` says of the egress boundary."""
        ...
