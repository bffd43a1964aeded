"""Points in time as people write them: `2h`, `today`, `2026-03-01 14:00`, `2026-03-01T14:00Z`."""

import re
from datetime import UTC, datetime, timedelta

import click

_AGO = re.compile(r"-?([0-9]{1,9}) ?(s|sec|min|m|h|d|w)(?: ago)?", re.ASCII)
_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
FORMS = "write 15m, 2h, 3d, today, yesterday, 2026-03-01, 2026-03-01T14:00 or with a zone"


class When(click.ParamType[datetime]):
    """A point in time, aware. Without a zone it is this host's; a length of time is that long
    ago."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        if isinstance(value, datetime):
            return value
        found = parse(str(value), datetime.now(UTC))
        if found is None:
            self.fail(f"{value!a} is no point in time: {FORMS}", param, ctx)
        return found


def parse(value: str, now: datetime) -> datetime | None:
    """The point in time; None when it has none of the forms. now: aware."""
    words = value.strip()
    if words == "now":
        return now
    if words in ("today", "yesterday"):
        midnight = now.astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight if words == "today" else midnight - timedelta(days=1)
    try:
        match = _AGO.fullmatch(words)
        if match is not None:
            return now - timedelta(seconds=int(match[1]) * _UNITS[match[2]])
        # `astimezone` takes a time without a zone for this host's.
        return datetime.fromisoformat(words).astimezone()
    except (ValueError, OverflowError):
        return None
