"""A copy of the volume's mount as a steward has it, which the kernel makes only of what is attached
somewhere.

Invariant: nothing is attached in the launcher's own mount namespace, and no process of the guest
is entered: the copying is done by a child in the steward's namespace, which belongs to the initial
user namespace and holds nothing but the volume. The steward is entered by a pidfd: what has its
number may be another process by then.
"""

import errno
import os
from contextlib import suppress
from typing import Final

from sbxd.jail import syscalls
from sbxd.jail.handshake import Gate
from sbxd.launcher.kernel import cgroup, mounts, process

_STEWARDS_VOLUME: Final = b"/workspace"
_STEWARDS_PROCESSES: Final = "steward/cgroup.procs"


def steward_of(box: int) -> int:
    """A pidfd of the one process in the steward's leaf; the caller owns it. Raises OSError.

    The leaf names the number before and after it is opened: so it is the steward, or has ended.
    """
    named = cgroup.read(box, _STEWARDS_PROCESSES)
    if not named.strip().isdigit():
        raise ProcessLookupError(errno.ESRCH, "the steward is gone, or is not alone in its leaf")
    pidfd = os.pidfd_open(int(named))
    if cgroup.read(box, _STEWARDS_PROCESSES) != named:
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, "the steward ended meanwhile")
    return pidfd


def copy_of_stewards(steward: int) -> int:
    """A detached copy of the volume as the steward (a pidfd, borrowed) has it, without its noexec
    (a gofer's files are mapped). The caller owns the descriptor. Raises OSError."""
    ours, theirs = Gate.pair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            process.close_all_but(theirs.fileno(), steward)
            process.die_with_parent(parent)
            syscalls.setns(steward, syscalls.CLONE_NEWNS)
            flags = syscalls.OPEN_TREE_CLONE
            made = syscalls.open_tree(syscalls.AT_FDCWD, _STEWARDS_VOLUME, flags)
            mounts.allow_exec(made)
            theirs.send(b"copied", (made,))
            os._exit(0)
        except OSError as problem:
            with suppress(OSError):
                theirs.send(b"%d" % (problem.errno or errno.EIO))
        finally:
            os._exit(1)
    theirs.close()
    try:
        message, received = ours.receive(1)
    finally:
        ours.close()
        os.waitpid(pid, 0)
    if len(received) != 1:
        number = int(message) if message.isdigit() else errno.EIO
        raise OSError(number, os.strerror(number))
    return received[0]
