"""The `gvisor` mechanism: slots whose commands run on a kernel of their own, gVisor's Sentry.

Invariants: as of `namespaces`, whose launcher, steward and slot these are too; the runsc that is
used has the version and the digest that the configuration names, where it names them.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import trio

from sbxd.launcher.requests import RUNSC_ITEM, SHIPPED_PROFILE, Kernel, Prepare, Prepared
from sbxd.mechanism import launcher_client
from sbxd.mechanism.gvisor_sandbox import GvisorSandbox
from sbxd.mechanism.launcher_client import LauncherClient
from sbxd.mechanism.namespaces import NamespacesMechanism
from sbxd.mechanism.protocol import MechanismError, SlotProfile
from sbxd.port.limits import IoCeilings
from sbxd.port.network import NetworkShape

NO_CEILINGS = IoCeilings()


class GvisorMechanism(NamespacesMechanism):
    """Implements sbxd.mechanism.protocol.Mechanism. Made by `open_gvisor`."""

    name = "gvisor"
    # It binds a command on the host's kernel. (So does AppArmor, and the daemon besides.)
    _ignored_items = frozenset({"landlock"})

    def __init__(
        self,
        client: LauncherClient,
        nursery: trio.Nursery,
        profile: str,
        io: IoCeilings,
        runsc_sha256: str | None,
    ) -> None:
        super().__init__(client, nursery, profile, io)
        self._runsc_sha256 = runsc_sha256

    def _preparation(self, request: Prepare) -> Prepare:
        # The port is of the guest's own loopback, and process 1's to bind: the launcher has no
        # part in it, and the host no interface.
        return msgspec.structs.replace(
            request,
            kernel=Kernel.SENTRY,
            runsc_sha256=self._runsc_sha256,
            network=NetworkShape.NONE,
        )

    def _sandbox(
        self, profile: SlotProfile, reply: Prepared, descriptors: list[int]
    ) -> GvisorSandbox:
        return GvisorSandbox(self._client, self._nursery, profile, reply, descriptors, self._doors)

    async def require_runsc(self, version: str | None) -> str:
        """What the launcher found, as text for the log.

        Raises MechanismError when there is none, or another than the configuration names.
        """
        found = {item.name: item for item in await self.posture()}.get(RUNSC_ITEM)
        if found is None or found.state != "ok":
            raise MechanismError(
                "runsc", 0, "the launcher found no runsc: install it, and restart sbxd-launcher"
            )
        words = found.detail.split()
        for name, wanted in (("version", version), ("sha256", self._runsc_sha256)):
            if wanted is not None and words[words.index(name) + 1] != wanted:
                raise MechanismError(
                    "runsc",
                    0,
                    f"the launcher's runsc is not that of gvisor.runsc_{name}: {found.detail}",
                )
        return found.detail


@asynccontextmanager
async def open_gvisor(
    launcher_socket: str,
    *,
    seccomp_profile: str = SHIPPED_PROFILE,
    io: IoCeilings = NO_CEILINGS,
    runsc_sha256: str | None = None,
) -> AsyncIterator[GvisorMechanism]:
    """The mechanism for the length of the block. Raises OSError when nothing listens.

    seccomp_profile: what binds the commands within the sandbox, as of `open_namespaces`.
    runsc_sha256: the digest of the only runsc that may be used; None for the launcher's own.

    Leaving the block closes the launcher's channel, which ends every environment.
    """
    async with launcher_client.connect(launcher_socket) as client, trio.open_nursery() as nursery:
        mechanism = GvisorMechanism(client, nursery, seccomp_profile, io, runsc_sha256)
        try:
            yield mechanism
        finally:
            mechanism.release()
            nursery.cancel_scope.cancel()
