"""Copies of a detached mount, which the kernel makes only of what is attached somewhere.

Invariant: nothing is attached in the launcher's own mount namespace, and no process of the guest
is entered: the copying is done by a child, in a namespace of its own or in the steward's, which
belongs to the initial user namespace and holds nothing but the volume.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from sbxd.jail import mounts as jail_mounts
from sbxd.jail import syscalls
from sbxd.jail.handshake import Gate
from sbxd.launcher.kernel import hostpaths, mounts, process

_STEWARDS_VOLUME: Final = b"/workspace"


def copy(mount: int, count: int) -> list[int]:
    """Detached copies of a detached mount, which stays as good as it was for looking at numbers
    but can no longer be attached. The caller owns the descriptors. Raises OSError."""

    def work() -> list[int]:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        jail_mounts.make_private()
        jail_mounts.put_on_root(mount)
        return [mounts.clone_tree(mount) for _ in range(count)]

    return _in_a_child(work, count, (mount,))


def copy_of_stewards(steward_pid: int) -> int:
    """A detached copy of the volume as the steward has it, without its noexec (a gofer's files
    are mapped). The caller owns the descriptor. Raises OSError."""
    path = hostpaths.process_file(steward_pid, "ns/mnt")
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def work() -> list[int]:
        syscalls.setns(namespace, syscalls.CLONE_NEWNS)
        flags = syscalls.OPEN_TREE_CLONE
        return [syscalls.open_tree(syscalls.AT_FDCWD, _STEWARDS_VOLUME, flags)]

    try:
        (copied,) = _in_a_child(work, 1, (namespace,))
    finally:
        os.close(namespace)
    try:
        mounts.allow_exec(copied)
    except OSError:
        os.close(copied)
        raise
    return copied


def _in_a_child(work: Callable[[], list[int]], count: int, kept: tuple[int, ...]) -> list[int]:
    ours, theirs = Gate.pair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            process.close_all_but(theirs.fileno(), *kept)
            process.die_with_parent(parent)
            made = work()
            theirs.send(b"copied", tuple(made))
            os._exit(0)
        except OSError as problem:
            with suppress(OSError):
                theirs.send(b"%d" % (problem.errno or errno.EIO))
        finally:
            os._exit(1)
    theirs.close()
    try:
        message, received = ours.receive(count)
    finally:
        ours.close()
        os.waitpid(pid, 0)
    if message != b"copied" or len(received) != count:
        for descriptor in received:
            os.close(descriptor)
        number = int(message) if message.isdigit() else errno.EIO
        raise OSError(number, os.strerror(number))
    return received
