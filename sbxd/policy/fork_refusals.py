"""Within which time a command's refused forks are counted together.

The rule is K refusals within W. A guest's kernel copies an address space before it refuses a fork:
12 ms of a processor for one of Python, where the host's kernel takes a tenth of one. So there the
same K is counted over a longer W; K itself is what tells a bomb from a build, on either.
"""

from sbxd.settings import SandboxMechanism, Settings

GUEST_WINDOW_FACTOR = 6


def refusals_window_seconds(settings: Settings) -> int:
    """W of this daemon's mechanism."""
    window = settings.limits.pids_refusals_window_seconds
    return window * GUEST_WINDOW_FACTOR if settings.sandbox is SandboxMechanism.GVISOR else window
