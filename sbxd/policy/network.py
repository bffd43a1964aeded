"""When a sandbox has the proxy's port, and when a command may use it: the two yeses.

Invariants: pure. One yes is the operator's, by the destinations that an admitted specification
carries; the other is the command's `network_enabled`, which a caller sets once its own policy, or
a person, said so. Neither widens the other: a yes without destinations reaches nothing.
"""

from sbxd.policy.destinations import configured_destinations
from sbxd.port.command import ExecutionCommand
from sbxd.port.egress import DENY_ALL, EgressMode, EgressPolicy
from sbxd.port.network import NetworkShape


def network_shape(policy: EgressPolicy) -> NetworkShape:
    """What an environment with this policy is built with: a port only where there is something
    that may be reached through it."""
    if policy.mode is EgressMode.ALLOWLIST and policy.destinations:
        return NetworkShape.PROXY_PORT
    return NetworkShape.NONE


def has_both_yeses(policy: EgressPolicy, command: ExecutionCommand) -> bool:
    """Whether this command may reach the destinations of its environment's policy."""
    return command.network_enabled and network_shape(policy) is NetworkShape.PROXY_PORT


def network_grant(operator: EgressPolicy) -> EgressPolicy:
    """What a yes grants under the operator's policy: its destinations in canonical form, as a
    specification may carry them; `deny` where there are none.

    Raises:
        DestinationInvalid: the policy has not passed the startup checks.
    """
    destinations = configured_destinations(operator)
    if not destinations:
        return DENY_ALL
    return EgressPolicy(mode=EgressMode.ALLOWLIST, destinations=destinations)
