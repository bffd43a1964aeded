"""Look at a process of an environment from outside: what it says of itself is no evidence.

Checked: its uid and gid map, that every one of its namespaces is another than the launcher's,
that a seccomp filter is on, no_new_privs (of the steward alone: init's child takes its profile on
exec, which no_new_privs would forbid, and sets it after that), its ids, and its cgroup.
"""

import errno
import os
from enum import StrEnum

from sbxd.jail.plan import IdBlock
from sbxd.launcher.kernel import hostpaths

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


class NotConfined(OSError):
    """A process of an environment is not confined as it was asked to be."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EPERM, what)


def parse_status(text: str) -> dict[str, str]:
    """The fields of a /proc/PID/status file."""
    fields = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.strip()
    return fields


def parse_map(text: str) -> list[tuple[int, ...]]:
    """The lines of a uid_map file as numbers."""
    return [tuple(int(word) for word in line.split()) for line in text.splitlines()]


class Process(StrEnum):
    """Which of the two."""

    INIT = "init"
    STEWARD = "steward"


def check_status(fields: dict[str, str], ids: IdBlock, process: Process) -> None:
    """Raises NotConfined unless the status is that of this process of this block."""
    if process is Process.STEWARD and fields.get("NoNewPrivs") != "1":
        raise NotConfined("no_new_privs is not set")
    if fields.get("Seccomp") != "2":
        raise NotConfined("no seccomp filter is on")
    allowed = {str(ids.outer(0))}
    for name in ("Uid", "Gid"):
        if not set(fields.get(name, "-").split()) <= allowed:
            raise NotConfined(f"{name} is outside the environment's block")


def verify_process(pid: int, ids: IdBlock, cgroup_path: str, process: Process) -> None:
    """Raises NotConfined, or OSError when the process is gone."""
    expected = parse_map(ids.map_lines())
    for name in ("uid_map", "gid_map"):
        if parse_map(_read(pid, name)) != expected:
            raise NotConfined(f"{name} is not the environment's")
    own = os.getpid()
    for name in NAMESPACES:
        theirs = os.stat(hostpaths.process_file(pid, f"ns/{name}")).st_ino
        if theirs == os.stat(hostpaths.process_file(own, f"ns/{name}")).st_ino:
            raise NotConfined(f"the {name} namespace is the host's")
    check_status(parse_status(_read(pid, "status")), ids, process)
    if f"0::{cgroup_path}" not in _read(pid, "cgroup").splitlines():
        raise NotConfined("the process is in another cgroup")


def _read(pid: int, name: str) -> str:
    with open(hostpaths.process_file(pid, name), encoding="ascii", errors="replace") as file:
        return file.read()
