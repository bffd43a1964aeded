"""Whether a command of a run has the network: the one place that every adapter asks.

Invariants: SANDBOX_NETWORK is what gives it; where the run's destinations include a package
registry, PACKAGE_INSTALL is needed as well, since a command with the network reaches all of them;
what is denied is refused before anything is provisioned, and never run with less than was asked.
"""

from sbxd.policy.network import network_shape
from sbxd.policy.registries import registries_of
from sbxd.port.egress import EgressPolicy
from sbxd.port.network import NetworkShape
from sbxd.tools.tool import (
    Disposition,
    Profile,
    SideEffect,
    ToolDenied,
    ToolName,
)


class PackageInstallDenied(ToolDenied):
    """The network would reach a package registry, and PACKAGE_INSTALL is denied. registries: which
    destinations those are."""

    def __init__(self, registries: tuple[str, ...]) -> None:
        super().__init__(ToolName.RUN_COMMAND, SideEffect.PACKAGE_INSTALL)
        self.registries = registries
        self.message = (
            f"{self.message}: the network of this run reaches {', '.join(registries[:4])}. Allow "
            "PACKAGE_INSTALL as well, or leave package registries out of the run's destinations"
        )
        self.args = (self.message,)


def network_enabled(profile: Profile, egress: EgressPolicy) -> bool:
    """`network_enabled` of a command. egress: of the run's specification.

    Raises: PackageInstallDenied.
    """
    if profile.decide(SideEffect.SANDBOX_NETWORK) is Disposition.DENY:
        return False
    if network_shape(egress) is NetworkShape.NONE:
        return True  # a yes without destinations reaches nothing
    found = registries_of(egress, profile.registries)
    if found and profile.decide(SideEffect.PACKAGE_INSTALL) is Disposition.DENY:
        raise PackageInstallDenied(found)
    return True
