"""Events about what is counted instead of being recorded one by one: a part of the vocabulary
(`sbxd.audit.events`, whose rules hold here). Which events are counted, and from when on:
`sbxd.audit.counting`.
"""

from typing import ClassVar

from sbxd.audit.events import AuditEvent, EnvironmentEvent, Priority
from sbxd.port.errors import WorkspaceCode


class RefusalsCounted(AuditEvent, frozen=True, kw_only=True):
    """Refusals beyond the number that is recorded one by one. counts: "event.reason=number".
    over_ms: from the first of them to this record. peer_uid: whose they are; absent for those that
    belong to no peer, or to more peers than are told apart."""

    MESSAGE_ID: ClassVar[str] = "bb3ac88b2dbd41039ebffdfd941f2fde"
    PRIORITY: ClassVar[Priority] = Priority.WARNING
    SUMMARY: ClassVar[str] = "{total} more refusals of uid {peer_uid} in {over_ms} ms: {counts}"

    peer_uid: int | None
    total: int
    counts: tuple[str, ...]
    over_ms: int


class WorkspaceUsed(EnvironmentEvent, frozen=True, kw_only=True):
    """A workspace operation was answered, the first of its environment with this verb and this
    code. code: what the peer was told; absent when it was served. The path is not kept."""

    MESSAGE_ID: ClassVar[str] = "e8579587127d49c0a1828817fa9a94b6"
    SUMMARY: ClassVar[str] = (
        "Workspace of environment {environment_id} used by uid {peer_uid}: {verb}, code {code}"
    )

    verb: str
    peer_uid: int
    code: WorkspaceCode | None = None


class WorkspaceUsesCounted(EnvironmentEvent, frozen=True, kw_only=True):
    """All workspace operations of an environment that were answered, before the record of its end.
    counts: "verb=number" of those that were served, "verb.code=number" of the others; those with a
    record of their own are in them."""

    MESSAGE_ID: ClassVar[str] = "262040f507a0486c8c3a672a099d2bf6"
    SUMMARY: ClassVar[str] = (
        "Workspace of environment {environment_id} was used {total} times: {counts}"
    )

    total: int
    counts: tuple[str, ...]


COUNTED_EVENT_TYPES: tuple[type[AuditEvent], ...] = (
    RefusalsCounted,
    WorkspaceUsed,
    WorkspaceUsesCounted,
)
