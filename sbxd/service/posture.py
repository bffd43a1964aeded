"""What the daemon adds of itself to what its host can enforce: for `sbxctl doctor`.

Invariant: what is said of the audit is what new work is admitted by, asked at that moment.
"""

from collections.abc import Sequence

from sbxd.audit.sink import AuditSink, AuditUnavailable
from sbxd.wire.descriptions import PostureItem


def own_items(audit: AuditSink, quarantined: Sequence[str]) -> tuple[PostureItem, ...]:
    """The audit, and the quarantine where something is in it."""
    if not quarantined:
        return (_audit(audit),)
    return (
        _audit(audit),
        PostureItem(
            name="quarantine",
            state="degraded",
            detail=f"not proven stopped: {', '.join(quarantined)}",
            fix="find out why, then `sbxctl quarantine clear`",
        ),
    )


def _audit(audit: AuditSink) -> PostureItem:
    try:
        audit.admit()
    except AuditUnavailable:
        return PostureItem(
            name="audit",
            state="missing",
            detail="the journal takes no record: new work is refused; what runs goes on, and its "
            "records wait in order",
            fix="systemctl status systemd-journald.socket systemd-journald; is its disk full "
            "(journalctl --disk-usage)? Once it takes records again, nothing is to be done here",
        )
    return PostureItem(name="audit", state="ok", detail="the journal takes every record")
