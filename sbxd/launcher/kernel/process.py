"""What a forked child of the launcher does to itself before it works, what each of them says, and
how a program of the host is run.

Invariant: no child outlives its parent unless it was handed over (init and the steward), and none
keeps a descriptor that it was not meant to have.

Deliberately absent: `subprocess`. It loads `threading`, which then works in every fork there is.
"""

import errno
import os
import select
import signal
import stat
from collections.abc import Mapping
from contextlib import ExitStack

from sbxd.jail import syscalls
from sbxd.launcher.kernel import hostpaths

# How urgent a line is (sd-daemon(3)).
ERROR, WARNING, INFO = 3, 4, 6

_PR_SET_CHILD_SUBREAPER = 36
_DESCRIPTORS_MAX = 2**20
_SAID_BYTES_MAX = 64 * 1024


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


def run(
    argv: list[str], environment: Mapping[str, str], seconds: float, stream: int, *kept: int
) -> tuple[int, bytes]:
    """The exit status of a program (below 0: of its signal), and the first 64 KiB of what it wrote
    to `stream`, 1 or 2. argv begins with its path. kept: descriptors that it is to have.

    Raises OSError when it cannot be started, TimeoutError when it did not end in time; then it is
    killed.
    """
    with ExitStack() as held:
        said = os.memfd_create("said", os.MFD_CLOEXEC)
        held.callback(os.close, said)
        null = os.open(hostpaths.NULL_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        held.callback(os.close, null)
        streams = {0: null, 1: null, 2: null, stream: said, **{each: each for each in kept}}
        actions = [(os.POSIX_SPAWN_DUP2, old, new) for new, old in streams.items()]
        pid = os.posix_spawn(
            argv[0], argv, environment, file_actions=actions, setsigdef=[signal.SIGPIPE]
        )
        poll = select.poll()
        poll.register(pidfd := os.pidfd_open(pid), select.POLLIN)
        held.callback(os.close, pidfd)
        if not (in_time := poll.poll(seconds * 1000)):
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not in_time:
            raise TimeoutError(errno.ETIMEDOUT, "a program of the host did not end in time")
        return status, os.pread(said, _SAID_BYTES_MAX, 0)
