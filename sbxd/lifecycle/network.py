"""The network of one command, as the lifecycle sees it: it begins, it ends, and it is charged.

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

from sbxd.port.egress import EgressPolicy
from sbxd.port.ids import EnvironmentId, RunId, TenantId


@dataclass(frozen=True)
class NetworkUse:
    """Which command may reach what, and for whom it is recorded.

    listener: the descriptor of the proxy's socket; borrowed, whoever serves makes a copy. charge:
    called once for each connection that is asked for, before it is judged; raises BudgetExhausted,
    and then the environment is being ended.
    """

    environment_id: EnvironmentId
    tenant_id: TenantId
    run_id: RunId
    lease_epoch: int
    command_number: int
    policy: EgressPolicy
    listener: int
    charge: Callable[[], None]


class CommandNetwork(Protocol):
    """The proxy's service for one command. `begin` once, then `end` any number of times."""

    async def begin(self) -> None:
        """Accept from now on. Raises MechanismError; then nothing is left.

        Cancellation: nothing is left.
        """
        ...

    async def end(self) -> None:
        """Refuse connections again; every tunnel is closed and recorded when this returns.

        Idempotent, also before `begin`. Cancellation: the end goes on in the background.
        """
        ...


class Egress(Protocol):
    """The daemon's proxies."""

    def of_command(self, use: NetworkUse) -> CommandNetwork:
        """The network of one command; nothing happens yet."""
        ...
