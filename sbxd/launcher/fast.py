"""The verbs that the loop does itself, since a fork would cost more than the work.

Each is a handful of system calls on cgroup files and mounts, none of which waits for anything.
"""

import os
from collections.abc import Callable

from sbxd.jail import mounts
from sbxd.launcher.books import Environment
from sbxd.launcher.kernel import cgroup, hostpaths, volume
from sbxd.launcher.prepare import tmpfs_bytes
from sbxd.launcher.requests import Assign, DropLeaf, Kernel, Leaf


def make_leaf(request: Leaf, environment: Environment) -> tuple[int, ...]:
    """Make the leaf; LEAF_DESCRIPTORS, owned by the caller. Raises OSError."""
    with cgroup.box_of(request.environment_id) as box:
        return cgroup.make_leaf(box, request.number, request.limits, environment.uid_base)


def drop_leaf(request: DropLeaf) -> None:
    """Remove an empty leaf. Raises OSError(EBUSY) while it has a process."""
    with cgroup.box_of(request.environment_id) as box:
        cgroup.remove_leaf(box, request.number)


def assign(request: Assign, environment: Environment, init_of: Callable[[str], int]) -> None:
    """Write the limits that differ from those that the slot was built with. init_of: the pid of
    an environment's process 1, a child of this process that is not reaped yet. Raises OSError."""
    built = environment.request
    assert built is not None
    if request.limits != built.limits:
        with cgroup.box_of(request.environment_id) as box:
            controllers = cgroup.controllers_of(box)
            limits = cgroup.kernel_limits(request.limits, built.kernel)
            cgroup.apply(box, cgroup.box_limits(limits), controllers)
            with cgroup.leaf_of(box, 1) as leaf:
                cgroup.apply(leaf, limits, controllers, built.kernel)
    if request.limits.memory_bytes != built.limits.memory_bytes and built.kernel is Kernel.HOST:
        _resize_tmpfs(init_of(request.environment_id), tmpfs_bytes(request.limits))
    if request.volume != built.volume and environment.volume_kind == volume.QUOTA:
        volume.resize(request.environment_id, request.volume)


def _resize_tmpfs(init_pid: int, size_bytes: int) -> None:
    """Both of its file systems in memory, before anything of a tenant is in them."""
    root = os.open(hostpaths.process_file(init_pid, "root"), os.O_PATH | os.O_DIRECTORY)
    try:
        for name in ("tmp", "dev/shm"):
            mounts.resize_tmpfs(root, name, size_bytes)
    finally:
        os.close(root)
