"""How far back the journal keeps the records of the audit, for `sbxctl doctor`."""

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from sbxctl import journal
from sbxd.wire.descriptions import PostureItem

# Where the journal is kept on disk; without this folder it is in memory.
ON_DISK = Path("/var/log/journal")
NAME = "audit.kept"


def kept_item(on_disk: Path = ON_DISK, unit: str = journal.UNIT) -> PostureItem:
    """The oldest record that is there, and whether a reboot leaves any."""
    try:
        oldest = _oldest(unit)
    except journal.JournalUnreadable as problem:
        return PostureItem(
            name=NAME,
            state="degraded",
            detail=f"not known: {problem.message}",
            fix=journal.WHO_MAY,
        )
    since = "there is no record" if oldest is None else f"the oldest record is of {oldest}"
    if on_disk.is_dir():
        return PostureItem(name=NAME, state="ok", detail=f"{since}; the journal is on disk")
    return PostureItem(
        name=NAME,
        state="degraded",
        detail=f"{since}; the journal is in memory, and a reboot leaves none",
        fix=f"mkdir -p {on_disk} && systemctl restart systemd-journald && journalctl --flush; "
        "docs/audit.md says how large it should be",
    )


def _oldest(unit: str) -> str | None:
    """The time of the oldest record of the unit. Raises journal.JournalUnreadable."""
    if not journal.require_readable(journal.unit(unit)):
        return None
    query = journal.Query(matches=(journal.unit(unit),), only=("SBX_EVENT",))
    with closing(journal.records(query.argv(), at_most=1)) as found:
        for record in found:
            microseconds = journal.number(record, "__REALTIME_TIMESTAMP") or 0
            moment = datetime.fromtimestamp(microseconds / 1_000_000, UTC)
            return moment.strftime("%Y-%m-%d %H:%M UTC")
    return None
