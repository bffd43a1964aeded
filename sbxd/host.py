"""What production needs of its host, and what the configuration leaves to the host.

The host is judged once the launcher has told what it has.

Invariants: a layer that the host lacks is a refusal, unless the operator has written that it is
accepted; one that is accepted and lacking is recorded at every start; a host that has the layer and
does not use it as it was installed (a profile that is not loaded) is refused all the same, since
that is a fault and no lack; in production no more memory is promised than the host has.
"""

import os
from collections.abc import Sequence

import msgspec

from sbxd.audit.confinement import MissingLayerAccepted
from sbxd.audit.events import StartupRefused
from sbxd.config import StartupRefusal
from sbxd.settings import DeploymentMode, HostLayer, Settings
from sbxd.wire.descriptions import PostureItem

_ACCEPT = 'or accept a host without it, in writing: accept_missing_layers = ["{layer}"]'


class HostRefused(Exception):
    """This host is not fit for this configuration."""

    def __init__(self, refusals: tuple[StartupRefusal, ...]) -> None:
        super().__init__("; ".join(str(each) for each in refusals))
        self.refusals = refusals


def host_memory_bytes() -> int:
    """All of it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def with_host_memory(settings: Settings, memory_bytes: int) -> Settings:
    """The settings with what a host of this memory may promise, where they do not say it: a quarter
    is kept for the host itself, and for what each environment needs besides its limit. Whoever
    names no limit is offered half of it at most, so that two find room."""
    if settings.limits.memory_committed_max_bytes is not None:
        return settings
    committed = memory_bytes - memory_bytes // 4
    offered = settings.limits.defaults
    limits = msgspec.structs.replace(
        settings.limits,
        memory_committed_max_bytes=committed,
        defaults=msgspec.structs.replace(
            offered, memory_bytes=min(offered.memory_bytes, committed // 2)
        ),
    )
    return msgspec.structs.replace(settings, limits=limits)


def of_this_host(settings: Settings) -> Settings:
    """As `with_host_memory`, of the host that this runs on."""
    return with_host_memory(settings, host_memory_bytes())


def memory_refusals(settings: Settings, memory_bytes: int) -> tuple[StartupRefusal, ...]:
    """Why not to start on a host of this memory; empty on a development host."""
    committed = settings.limits.memory_committed_max_bytes
    if (
        settings.deployment_mode is DeploymentMode.DEVELOPMENT
        or committed is None
        or committed <= memory_bytes
    ):
        return ()
    return (
        StartupRefusal(
            settings=(
                ("deployment_mode", str(settings.deployment_mode)),
                ("limits.memory_committed_max_bytes", str(committed)),
                ("memory of this host", str(memory_bytes)),
            ),
            detail="more memory would be promised than there is",
            fix="Lower it, or leave it out",
        ),
    )


def layer_refusals(
    settings: Settings, posture: Sequence[PostureItem]
) -> tuple[StartupRefusal, ...]:
    """Why not to start on this host; empty when there is no reason, and on a development host.

    A layer of which the posture says nothing counts as one that the host lacks.
    """
    if settings.deployment_mode is DeploymentMode.DEVELOPMENT:
        return ()
    refusals = []
    for layer in HostLayer:
        found = _find(posture, layer)
        if found.state == "ok":
            continue
        is_lacking = found.state != "missing"
        if is_lacking and layer in settings.accept_missing_layers:
            continue
        fix = found.fix or "see `sbxctl doctor`"
        accept = ", " + _ACCEPT.format(layer=layer) if is_lacking else ""
        refusals.append(
            StartupRefusal(
                settings=(
                    ("deployment_mode", str(settings.deployment_mode)),
                    (f"{layer} of this host", found.state),
                ),
                detail=found.detail,
                fix=fix[:1].upper() + fix[1:] + accept,
            )
        )
    return tuple(refusals)


def refuse_host(settings: Settings, posture: Sequence[PostureItem]) -> None:
    """Raises HostRefused with every reason at once."""
    refusals = (
        *layer_refusals(settings, posture),
        *memory_refusals(settings, host_memory_bytes()),
    )
    if refusals:
        raise HostRefused(refusals)


def accepted_missing(
    settings: Settings, posture: Sequence[PostureItem]
) -> tuple[MissingLayerAccepted, ...]:
    """What is to be recorded at this start."""
    return tuple(
        MissingLayerAccepted(layer=layer.value, detail=found.detail)
        for layer in HostLayer
        if layer in settings.accept_missing_layers
        and (found := _find(posture, layer)).state != "ok"
    )


def _find(posture: Sequence[PostureItem], layer: HostLayer) -> PostureItem:
    return next(
        (item for item in posture if item.name == layer),
        PostureItem(name=layer.value, state="degraded", detail="it is not known to be there"),
    )


def refused(refusals: Sequence[StartupRefusal]) -> StartupRefused:
    """What is to be recorded of them."""
    return StartupRefused(
        settings=tuple(f"{key}={value}" for refusal in refusals for key, value in refusal.settings)
    )
