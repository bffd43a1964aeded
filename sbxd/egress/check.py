"""What the proxies would judge of a destination, for an operator who asks.

Invariants: the same function, resolver and host's network as a connection has, and the whole policy
of the operator; nothing is dialled, charged or recorded, since nothing is let through.
"""

from sbxd.egress.proxy import ProxyParts
from sbxd.policy.destinations import canonical_policy
from sbxd.policy.egress import Allowed, Refused, Resolve, evaluate


async def check(parts: ProxyParts, resolve: Resolve, host: str, port: int) -> Allowed | Refused:
    """Judge one destination as it is asked for.

    Raises:
        DestinationInvalid: the policy has not passed the startup checks.

    Cancellation: the lookup is given up.
    """
    policy = canonical_policy(parts.settings)
    return await evaluate(policy, host, port, resolve, parts.host_network)
