"""What a forked child of the launcher does to itself before it works, and what each of them says.

Invariant: no child outlives its parent unless it was handed over (init and the steward), and none
keeps a descriptor that it was not meant to have.
"""

import os
import signal
import stat

from sbxd.jail import syscalls

# How urgent a line is (sd-daemon(3)).
ERROR, WARNING, INFO = 3, 4, 6

_PR_SET_CHILD_SUBREAPER = 36
_DESCRIPTORS_MAX = 2**20


def become_subreaper() -> None:
    """Orphans of helpers (init, steward) become children of this process."""
    syscalls.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when its parent ends; leaves at once when it has ended already.

    A change of credentials (setresuid, a new user namespace) undoes it: call it again after one.
    """
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def close_all_but(*kept: int) -> None:
    """Close every descriptor above 2 but these."""
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, _DESCRIPTORS_MAX)


def say(urgency: int, text: str) -> None:
    """One line on stderr. The journal, which is a socket there, is told how urgent it is."""
    front = f"<{urgency}>" if stat.S_ISSOCK(os.fstat(2).st_mode) else ""
    os.write(2, f"{front}{' '.join(text.splitlines())}\n".encode("utf-8", "replace"))
