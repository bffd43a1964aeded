"""Detached mounts: clone a tree, make it read-only or id-mapped, hand over the descriptor.

Invariant: nothing is ever attached in the launcher's own mount namespace; a mount lives as long
as a descriptor or a sandbox's namespace holds it, so that the death of all of them removes it.
An id-mapped mount shows the owner `inner` of the disk as the host uid that the map gives it.
"""

import errno
import os
import platform
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Final, NamedTuple

from sbxd.jail import syscalls
from sbxd.launcher.kernel import hostpaths, static_program

RDONLY = syscalls.MOUNT_ATTR_RDONLY
NOSUID = syscalls.MOUNT_ATTR_NOSUID
NODEV = syscalls.MOUNT_ATTR_NODEV

NOT_SUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})

# unshare(CLONE_NEWUSER); prctl(PR_SET_PDEATHSIG, SIGKILL), which a new user namespace would undo;
# write(1, any byte, 1), which ends it when the parent is gone already; close_range(0, -1, 0); then
# poll(NULL, 0, -1) for ever. exit_group(1) when one of the first three fails.
HOLDER: Final[static_program.Code] = {
    "x86_64": (62, bytes.fromhex(
        "bf00000010b8100100000f0585c0754cbf01000000be09000000b89d0000000f05bf010000004889"
        "e6ba01000000b8010000000f0583f801752231ffbeffffffff31d2b8b40100000f0531ff31f6baff"
        "ffffffb8070000000f05ebeebf01000000b8e70000000f05"
    )),
    "aarch64": (183, bytes.fromhex(
        "0000a2d2280c80d2010000d4000300b5200080d2210180d2e81480d2010000d4200080d2e1030091"
        "220080d2080880d2010000d41f0400f1a1010054000080d201008092020080d2883680d2010000d4"
        "000080d2010080d2020080d2030080d2280980d2010000d4faffff17200080d2c80b80d2010000d4"
    )),
}  # fmt: skip

MapLine = tuple[int, int, int]  # on disk, as shown, length


def clone_tree(directory: int) -> int:
    """A detached copy of the mount that this directory is on, rooted at the directory itself.

    Not recursive: what is mounted below stays behind. The caller owns the descriptor.
    """
    return syscalls.open_tree(directory, b"", syscalls.OPEN_TREE_CLONE | syscalls.AT_EMPTY_PATH)


def restrict(mount: int, attributes: int) -> None:
    """Set RDONLY, NOSUID, NODEV on a detached mount and cut it off from all propagation."""
    _set_attributes(mount, attributes, propagation=syscalls.MS_PRIVATE)


def allow_exec(mount: int) -> None:
    """Take NOEXEC from a detached mount."""
    noexec = syscalls.MOUNT_ATTR_NOEXEC
    _set_attributes(mount, 0, cleared=noexec, propagation=syscalls.MS_PRIVATE)


def id_map(mount: int, user_namespace: int) -> None:
    """Show the owners of the disk through this user namespace's map. Only once per mount.

    Raises OSError with an errno of NOT_SUPPORTED where the file system or kernel cannot.
    """
    _set_attributes(mount, syscalls.MOUNT_ATTR_IDMAP, userns_fd=user_namespace)


def _set_attributes(
    mount: int, attributes: int, *, cleared: int = 0, propagation: int = 0, userns_fd: int = 0
) -> None:
    flags = syscalls.AT_EMPTY_PATH | syscalls.AT_RECURSIVE
    syscalls.mount_setattr(mount, b"", flags, attributes, userns_fd, cleared, propagation)


def map_text(lines: Iterable[MapLine]) -> str:
    """The text of a uid_map or gid_map file."""
    return "".join(f"{inner} {outer} {length}\n" for inner, outer, length in lines)


def write_maps(pid: int, text: str) -> None:
    """Write uid_map and gid_map of this process' new user namespace."""
    for name in ("uid_map", "gid_map"):
        descriptor = os.open(hostpaths.process_file(pid, name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode("ascii"))
        finally:
            os.close(descriptor)


class Holder(NamedTuple):
    """A process that does nothing, and the user namespace that it is the first of. The caller
    owns both."""

    pid: int
    user_namespace: int

    def end(self) -> None:
        """Kill the process, whose number is its own until it is reaped here; the namespace lives
        on by its descriptor."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def start_holder(text: str) -> Holder:
    """Start a process in a new user namespace with this uid and gid map.

    It holds no descriptor and dies with the caller. It is no fork: it is started by vfork and is
    `HOLDER`, since copying an interpreter for it costs ten times as much.
    """
    with ExitStack() as held:
        here, there = os.pipe2(os.O_CLOEXEC)
        held.callback(os.close, here)
        try:
            image = static_program.image(platform.machine(), HOLDER)
            program = static_program.sealed("sbx-holder", image)
            held.callback(os.close, program)
            pid = os.posix_spawn(
                hostpaths.descriptor_path(program),
                ("sbx-holder",),
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, there, 1)],
                setsigdef=[signal.SIGPIPE],
            )
        finally:
            os.close(there)
        try:
            if not os.read(here, 1):
                raise OSError(errno.EPERM, "unshare of a user namespace failed")
            write_maps(pid, text)
            path = hostpaths.process_file(pid, "ns/user")
            return Holder(pid, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise


def user_namespace(text: str) -> int:
    """A user namespace with this uid and gid map and no process; the caller owns the
    descriptor."""
    holder = start_holder(text)
    holder.end()
    return holder.user_namespace
