"""How old gVisor's program is, for `sbxctl doctor`: a warning, and never a refusal.

gVisor has no long-term releases: a fix is in the next weekly one. A distribution that backports
fixes keeps the date in the version, so an old date is a question to the operator and no proof.
"""

import re
from datetime import date

from sbxd.wire.descriptions import PostureItem

NAME = "runsc"
AGE_DAYS_MAX = 365
FIX = (
    "follow your distribution's security updates of runsc, or install a newer release and pin its "
    "digest with gvisor.runsc_sha256; then systemctl restart sbxd-launcher sbxd (docs/gvisor.md)"
)
# release-20240729.0, and 0.0~20240729.0-4 of Debian.
_DATE = re.compile(r"(?<![0-9])(20[0-9]{2})([0-9]{2})([0-9]{2})(?![0-9])")


def built(version: str) -> date | None:
    """The day that a version of runsc names; None where it names none."""
    for year, month, day in _DATE.findall(version):
        try:
            return date(int(year), int(month), int(day))
        except ValueError:
            continue
    return None


def judged(item: PostureItem, today: date) -> PostureItem:
    """The item, degraded when it is runsc's, is ok, and is old or of an unknown age."""
    if item.name != NAME or item.state != "ok":
        return item
    words = item.detail.split()
    found = built(words[1]) if words[:1] == ["version"] and len(words) > 1 else None
    if found is None:
        said = "the version names no day, so its age is not known"
    elif found > today:
        said = f"built on {found}, which is after this host's today: its age is not known"
    elif (days := (today - found).days) > AGE_DAYS_MAX:
        said = (
            f"built on {found}, {days} days ago: more than {AGE_DAYS_MAX}, so fixes of gVisor may "
            "be missing that your distribution has not added to it"
        )
    else:
        return item
    return PostureItem(name=NAME, state="degraded", detail=f"{item.detail}; {said}", fix=FIX)
