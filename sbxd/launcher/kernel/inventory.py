"""What the kernel, PID 1 and the disk hold that is an environment's, by its id.

Invariant: nothing comes from our own books. An environment that any source still names is there.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator

from sbxd.launcher.kernel import hostpaths, systemd, uids

_SCOPE_IN_PATH = re.compile(r"/sbx-([0-9a-f]{32})\.scope(?:/|$)")
_ID_AT_START = re.compile(r"^([0-9a-f]{32})(?:[^0-9a-f]|$)")

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


def scope_in_cgroup(text: str) -> str | None:
    """The environment that a /proc/PID/cgroup file (or a cgroup path) names, or None."""
    match = _SCOPE_IN_PATH.search(text)
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
    for backing in hostpaths.loop_backing_files():
        try:
            with open(backing, encoding="utf-8", errors="surrogateescape") as file:
                texts.append(file.read())
        except OSError:  # the device was released while we looked
            continue
    prefix = re.escape(hostpaths.volumes_directory())
    for text in texts:
        for match in re.finditer(prefix + r"/([0-9a-f]{32})", text):
            yield match.group(1)
