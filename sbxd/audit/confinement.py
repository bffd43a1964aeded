"""What is recorded when a slot was built and is not confined as it was asked to be.

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
