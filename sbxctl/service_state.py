"""Whether the daemon's service has ended, seen without asking anybody.

Invariant: looking starts nothing and needs no right; a user of the moment has no message bus where
the host's accounts are not resolved by systemd. What is not known is not ended.
"""

from pathlib import Path

# A link for each unit that is neither inactive nor failed, of every systemd that this runs on.
UNITS = Path("/run/systemd/units")
_LINK = "invocation:{}"
_SERVICE = "sbxd.service"


def has_ended(socket: Path, asked: Path, units: Path = UNITS) -> bool:
    """Whether the service ran, or was refused, since its socket began to listen, and neither runs
    now nor is on its way there.

    socket: what starts it. asked: a file that is written after each question over this socket.
    False where it waits for its first client: after a boot, and after an upgrade, which starts the
    sockets alone.
    """
    try:
        was_asked = asked.stat().st_mtime_ns > socket.lstat().st_mtime_ns
        links = {each.name for each in units.iterdir()}
    except OSError:
        return False
    is_known = any(name.startswith(_LINK.format("")) for name in links)
    return was_asked and is_known and _LINK.format(_SERVICE) not in links
