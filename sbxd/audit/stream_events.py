"""Events of the audit itself: a part of its vocabulary (`sbxd.audit.events`, whose rules hold
here). They tie the numbered records of one daemon to those before it, so that a missing end is as
visible as a missing middle.
"""

from typing import ClassVar

from sbxd.audit.events import AuditEvent, Priority


class AuditOpened(AuditEvent, frozen=True, kw_only=True):
    """The first record of every start of the daemon. previous_boot_id, previous_boot_sequence:
    the boot before this one in which the daemon ran, and its last number; absent within a boot,
    whose numbers go on. resumed_after: the number before this one. waiting: records that an
    earlier daemon left in the spool; they went, or go, before this one. discarded_bytes: of a
    record at the spool's end that was not written whole."""

    MESSAGE_ID: ClassVar[str] = "0798ac97082f4d8ebfae0015dfacb6b2"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Audit opened after number {resumed_after}, {waiting} records waiting"

    resumed_after: int
    previous_boot_id: str | None = None
    previous_boot_sequence: int | None = None
    waiting: int = 0
    discarded_bytes: int = 0


class AuditRecovered(AuditEvent, frozen=True, kw_only=True):
    """The journal takes records again, and what waited has been given to it. spooled: how many
    waited. refused: requests for new work that were refused meanwhile, and not recorded one by
    one. unrecorded: attempts to record that a full spool did not take; what had to be recorded
    was tried again."""

    MESSAGE_ID: ClassVar[str] = "bfe5dde2aef941ccafcf14bb0bf7ffd7"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = (
        "The journal took no record for {outage_ms} ms: {spooled} waited, {refused} requests for "
        "new work refused, {unrecorded} attempts unrecorded"
    )

    outage_ms: int
    spooled: int
    refused: int
    unrecorded: int


STREAM_EVENT_TYPES: tuple[type[AuditEvent], ...] = (AuditOpened, AuditRecovered)
