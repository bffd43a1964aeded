"""What is recorded when a slot was built and is not confined as it was asked to be, and when the
whole service runs with a layer less.

Beside `sbxd.audit.events`, with its rules. `detail` is of the launcher's own words, of which there
are a fixed few: nothing of a guest is in it.
"""

from typing import ClassVar

from sbxd.audit.events import AuditEvent, Priority
from sbxd.port.ids import EnvironmentId


class ConfinementMismatched(AuditEvent, frozen=True, kw_only=True):
    """A layer did not take; nobody got the slot, and nothing of it is left."""

    MESSAGE_ID: ClassVar[str] = "c3b0a9d0f07f4a64a0a6a1f2f1b7d36e"
    PRIORITY: ClassVar[Priority] = Priority.ALERT
    SUMMARY: ClassVar[str] = (
        "Slot {environment_id} is not confined as it was asked to be: {step}: {detail}"
    )

    environment_id: EnvironmentId
    step: str
    errno: int
    detail: str


class MissingLayerAccepted(AuditEvent, frozen=True, kw_only=True):
    """The service serves on a host without this layer, because its operator accepts that. Once a
    start."""

    MESSAGE_ID: ClassVar[str] = "0d7c4b8f5f9e4a7d9f0b63c1a8e2d574"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = (
        "This host runs without {layer}, as its operator has accepted: {detail}"
    )

    layer: str
    detail: str
