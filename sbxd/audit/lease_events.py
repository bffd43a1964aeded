"""Events of leases, of the journal and of the quarantine: a part of the audit's vocabulary
(`sbxd.audit.events`, whose rules hold here)."""

from enum import StrEnum
from typing import ClassVar

from sbxd.audit.events import AuditEvent, EnvironmentEvent, Priority
from sbxd.port.ids import EnvironmentId
from sbxd.port.leases import LeaseStanding


class ClearingProof(StrEnum):
    """What the end of a quarantine rests on. PROVEN: nothing is left. OPERATOR_WORD: an operator
    said so although something could not be proven; its uids stay taken."""

    PROVEN = "PROVEN"
    OPERATOR_WORD = "OPERATOR_WORD"


class StaleLeaseEnded(EnvironmentEvent, frozen=True, kw_only=True):
    """The reaper ended an environment whose lease is not held any more. standing: STALE as the
    authority said, or UNKNOWN, which it said for two intervals."""

    MESSAGE_ID: ClassVar[str] = "3f0d2b7c9a514e6bb8c1d94e07a25f63"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Environment {environment_id} ended: its lease is {standing}"

    standing: LeaseStanding
    authority: str


class LeaseAuthorityMissed(AuditEvent, frozen=True, kw_only=True):
    """A lease authority did not answer the reaper: none of its environments is taken for stale on
    its account. Connections and expiry still end what they end."""

    MESSAGE_ID: ClassVar[str] = "b5f7c1e08d2a4c3f9e60a7124d8be951"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = (
        "Lease authority {authority} did not answer about {environments} environments: {detail}"
    )

    authority: str
    environments: int
    detail: str


class JournalWriteFailed(AuditEvent, frozen=True, kw_only=True):
    """The creation journal took no record: nothing new is built while that lasts. What exists is
    used and destroyed as ever."""

    MESSAGE_ID: ClassVar[str] = "d1a05b3e6f974c2298bb74e1305cfa86"
    PRIORITY: ClassVar[Priority] = Priority.ALERT
    SUMMARY: ClassVar[str] = "The creation journal took no record of {environment_id}: {detail}"

    environment_id: EnvironmentId
    detail: str


class QuarantineCleared(AuditEvent, frozen=True, kw_only=True):
    """An operator released what had not been proven stopped. kinds: what was there before."""

    MESSAGE_ID: ClassVar[str] = "6c94ae2f7b1d4805a3de58f1c0927b4e"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = "Quarantine of {environment_id} cleared ({proof}) by uid {peer_uid}"

    environment_id: str
    proof: ClearingProof
    kinds: tuple[str, ...]
    peer_uid: int


class QuarantineReleased(AuditEvent, frozen=True, kw_only=True):
    """What had not been proven stopped is proven gone: a pass of the reaper, or a reconciliation,
    tried again and released it. kinds: what was there before."""

    MESSAGE_ID: ClassVar[str] = "54f2707f866a431382b6671b88074883"
    PRIORITY: ClassVar[Priority] = Priority.NOTICE
    SUMMARY: ClassVar[str] = "Quarantine of {environment_id} is over: it is proven gone"

    environment_id: EnvironmentId
    kinds: tuple[str, ...]


LEASE_EVENT_TYPES: tuple[type[AuditEvent], ...] = (
    StaleLeaseEnded,
    LeaseAuthorityMissed,
    JournalWriteFailed,
    QuarantineCleared,
    QuarantineReleased,
)
