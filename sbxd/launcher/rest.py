"""The other slow verbs (run in helpers): images, inventory, probe, shares."""

from sbxd.launcher import unpacker
from sbxd.launcher.helpers import Outcome, Report
from sbxd.launcher.kernel import hostpaths, images, systemd, volume
from sbxd.launcher.kernel import inventory as kernel_inventory
from sbxd.launcher.kernel import probe as kernel_probe
from sbxd.launcher.kernel.runsc import Runsc, Unusable
from sbxd.launcher.requests import (
    Acknowledged,
    ImageDrop,
    ImageUnpack,
    Inventory,
    InventoryIs,
    InventoryItem,
    Probe,
    Probed,
    Share,
)
from sbxd.launcher.steps import Steps

# So that the answer is one message: the daemon removes these and asks again.
ITEMS_MAX = 400


def image_unpack(request: ImageUnpack, seccomp: bytes) -> Outcome:
    """seccomp: the filter of the process that unpacks. Raises StepFailed."""
    with Steps().step("image_unpack"):
        unpacker.unpack(request.image_digest, seccomp)
    return Outcome(Report(reply=Acknowledged(ticket=request.ticket)))


def image_drop(request: ImageDrop) -> Outcome:
    """Raises StepFailed."""
    with Steps().step("image_drop"):
        images.drop(request.image_digest)
    return Outcome(Report(reply=Acknowledged(ticket=request.ticket)))


def inventory(request: Inventory) -> Outcome:
    """At most ITEMS_MAX environments. Raises StepFailed."""
    with Steps().step("inventory"):
        boot_id, found = kernel_inventory.take()
        is_erasing = volume.held_by_erasing()[0] > 0
    items = tuple(
        InventoryItem(environment_id=environment_id, kinds=tuple(sorted(kinds)))
        for environment_id, kinds in sorted(found.items())[:ITEMS_MAX]
    )
    reply = InventoryIs(ticket=request.ticket, boot_id=boot_id, items=items)
    return Outcome(Report(reply=reply, is_erasing=is_erasing))


def probe(request: Probe, runsc: Runsc | Unusable) -> Outcome:
    """runsc: the program that the launcher found. Raises StepFailed."""
    with Steps().step("probe"):
        items = (*kernel_probe.run(), kernel_probe.of_runsc(runsc))
    return Outcome(Report(reply=Probed(ticket=request.ticket, items=tuple(items))))


def share(request: Share) -> Outcome:
    """Raises StepFailed."""
    with Steps().step("share"), systemd.connect() as manager:
        for each in request.weights:
            manager.set_cpu_weight(hostpaths.scope_name(each.environment_id), each.cpu_weight)
    return Outcome(Report(reply=Acknowledged(ticket=request.ticket)))
