"""What the kernel, PID 1 and the disk hold that is an environment's, by its id.

Invariant: nothing comes from our own books. An environment that any source still names is there.
"""

import fcntl
import os
import re
import struct
from collections import defaultdict
from collections.abc import Iterator

from sbxd.launcher.kernel import hostpaths, systemd, uids

_SCOPE_IN_PATH = re.compile(r"/sbx-([0-9a-f]{32})\.scope(?:/|$)")
_ID_AT_START = re.compile(r"^([0-9a-f]{32})(?:[^0-9a-f]|$)")

_LOOP_GET_STATUS64 = 0x4C05
_LOOP_INFO64_BYTES = 232  # struct loop_info64

Kinds = dict[str, set[str]]


def take() -> tuple[str, Kinds]:
    """The boot id, and for each environment the kinds of things that are left of it: scope,
    cgroup, volume, mount, uid_block, process. Raises OSError."""
    found: Kinds = defaultdict(set)
    with systemd.connect() as manager:
        for unit in manager.list_scopes():
            found[unit.environment_id].add("scope")
    for kind, ids in (
        ("cgroup", _cgroups()),
        ("process", _processes()),
        ("volume", volumes()),
        ("mount", _mounts()),
        ("uid_block", uids.owners()),
    ):
        for environment_id in ids:
            found[environment_id].add(kind)
    return hostpaths.boot_id(), dict(found)


def scope_in_cgroup(line: str) -> str | None:
    """The environment that a line of /proc/PID/cgroup names, or None.

    A removed cgroup names none: only a dead process that nobody has reaped yet can be in one.
    """
    if line.endswith(" (deleted)"):
        return None
    match = _SCOPE_IN_PATH.search(line)
    return match.group(1) if match else None


def _cgroups() -> Iterator[str]:
    try:
        names = os.listdir(hostpaths.slice_directory())
    except FileNotFoundError:
        return
    for name in names:
        environment_id = hostpaths.environment_of_scope(name)
        if environment_id is not None:
            yield environment_id


def _processes() -> Iterator[str]:
    for name in os.listdir(hostpaths.PROC):
        if not name.isdigit():
            continue
        try:
            with open(hostpaths.process_file(int(name), "cgroup"), encoding="utf-8") as file:
                text = file.read()
        except OSError:  # it ended while we looked
            continue
        for line in text.splitlines():
            environment_id = scope_in_cgroup(line)
            if environment_id is not None:
                yield environment_id


def volumes() -> Iterator[str]:
    """The environments that have an entry among the volumes (whose names start with the id)."""
    directory = hostpaths.private_directory(hostpaths.volumes_directory())
    try:
        names = os.listdir(directory)
    finally:
        os.close(directory)
    for name in names:
        match = _ID_AT_START.match(name)
        if match:
            yield match.group(1)


def _mounts() -> Iterator[str]:
    """Mounts of volumes in our own namespace, and loop devices on volumes (detached mounts have
    no other trace)."""
    with open(hostpaths.process_file(os.getpid(), "mountinfo"), encoding="utf-8") as file:
        texts = [file.read()]
    directory = hostpaths.private_directory(hostpaths.volumes_directory())
    try:
        device = os.fstat(directory).st_dev
    finally:
        os.close(directory)
    prefix = hostpaths.volumes_directory()
    for number, backing in hostpaths.loop_backing_files():
        if backing.startswith(prefix) and _backing_device(number) == device:
            texts.append(backing)
    for text in texts:
        for match in re.finditer(re.escape(prefix) + r"/([0-9a-f]{32})", text):
            yield match.group(1)


def _backing_device(number: int) -> int | None:
    """The file system that a loop device's image lies on: a path alone may be another mount
    namespace's. None when the device was released meanwhile."""
    try:
        loop = os.open(hostpaths.loop_device(number), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = fcntl.ioctl(loop, _LOOP_GET_STATUS64, bytes(_LOOP_INFO64_BYTES))
    except OSError:
        return None
    finally:
        os.close(loop)
    (device,) = struct.unpack_from("=Q", status)
    return int(device)
