"""Opening the mechanism that the configuration names. No other one is imported."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from sbxd.host import refuse_host
from sbxd.mechanism.protocol import Mechanism, MechanismError
from sbxd.settings import SandboxMechanism, Settings

PROBE_SECONDS = 20.0


@asynccontextmanager
async def open_mechanism(settings: Settings, log: logging.Logger) -> AsyncIterator[Mechanism]:
    """The mechanism for the length of the block.

    Raises OSError when no launcher listens, HostRefused when production needs more of this host,
    and MechanismError when its runsc is missing, another than the configuration names, or not told
    within PROBE_SECONDS.
    """
    if settings.sandbox is SandboxMechanism.GVISOR:
        from sbxd.mechanism.gvisor import open_gvisor

        async with open_gvisor(
            settings.launcher_socket,
            seccomp_profile=settings.seccomp.profile,
            io=settings.limits.io,
            runsc_sha256=settings.gvisor.runsc_sha256,
        ) as gvisor:
            found = None
            with trio.move_on_after(PROBE_SECONDS):
                found = await gvisor.require_runsc(settings.gvisor.runsc_version)
            if found is None:
                raise MechanismError("probe", 0, "the launcher does not answer")
            log.info("runsc: %s", found)
            refuse_host(settings, await gvisor.posture())
            yield gvisor
    else:
        from sbxd.mechanism.namespaces import open_namespaces

        async with open_namespaces(
            settings.launcher_socket,
            seccomp_profile=settings.seccomp.profile,
            io=settings.limits.io,
        ) as namespaces:  # of a development host alone
            yield namespaces
