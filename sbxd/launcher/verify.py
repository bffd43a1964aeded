"""Look at a process of an environment from outside: what it says of itself is no evidence.

Of init and the steward: their uid and gid map, that every one of their namespaces is another than
the launcher's, that a seccomp filter is on, no_new_privs (of the steward alone: a command takes
its profile on exec and sets it itself), their ids, and their cgroup.

Of a command, once its program runs: the same, and that its namespaces are init's; that it carries
one seccomp filter more than init; no_new_privs; five empty capability sets; the workload's ids
and no group; the AppArmor profile, where the kernel has AppArmor; no descriptor but 0, 1 and 2.

Of a sandbox with a kernel of its own, once its process 1 is ready: that the leaf holds the Sentry,
its stubs and one gofer, each with no_new_privs and a seccomp filter, in namespaces of their own;
the gofer with the block's map, the Sentry with an id of the block that nothing else has, five empty
capability sets and no other id in its map. What the guest's kernel does is not seen from outside.

Every process is looked at by its number. Another that has got it meanwhile is of another cgroup,
and fails; and the pidfd that the daemon gets was opened before, and says that its process ended.

Not seen from outside, because the kernel shows it nowhere: Landlock's ruleset, and securebits.
"""

import errno
import os
from collections.abc import Collection, Mapping
from enum import StrEnum

from sbxd.jail.plan import SENTRY_ID, WORKLOAD_ID, IdBlock
from sbxd.launcher.kernel import apparmor, hostpaths

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


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


# The gofer is in a pid namespace of its own. The Sentry and its stubs are not (systrap), and so
# have a host uid that is only theirs; no process of runsc sees a cgroup.
GOFER_NAMESPACES: tuple[str, ...] = ("user", "mnt", "pid", "net", "ipc", "uts")
SENTRY_NAMESPACES: tuple[str, ...] = ("user", "mnt", "net", "ipc", "uts")


def check_status(fields: Mapping[str, str], ids: IdBlock, process: Process) -> None:
    """Raises NotConfined unless the status is that of this process of this block."""
    if process is Process.STEWARD and fields.get("NoNewPrivs") != "1":
        raise NotConfined("no_new_privs is not set")
    if fields.get("Seccomp") != "2":
        raise NotConfined("no seccomp filter is on")
    allowed = {str(ids.outer(0))}
    for name in ("Uid", "Gid"):
        if not set(fields.get(name, "-").split()) <= allowed:
            raise NotConfined(f"{name} is outside the environment's block")


def check_command_status(fields: Mapping[str, str], init: Mapping[str, str], ids: IdBlock) -> None:
    """Raises NotConfined unless the status is a command's, under an init with that status."""
    if fields.get("NoNewPrivs") != "1":
        raise NotConfined("command: no_new_privs is not set")
    if fields.get("Seccomp") != "2":
        raise NotConfined("command: no seccomp filter is on")
    if _filters(fields) != _filters(init) + 1:
        raise NotConfined("command: the workload's seccomp filter is not on")
    for name in CAPABILITY_SETS:
        if int(fields.get(name, "-1"), 16) != 0:
            raise NotConfined(f"command: {name} is not empty")
    for name in ("Uid", "Gid"):
        if fields.get(name, "").split() != [str(ids.outer(WORKLOAD_ID))] * 4:
            raise NotConfined(f"command: {name} is not the workload's")
    if fields.get("Groups", "-"):
        raise NotConfined("command: it has supplementary groups")


def _filters(fields: Mapping[str, str]) -> int:
    count = fields.get("Seccomp_filters", "")
    if not count.isdecimal():
        raise NotConfined("the kernel does not count seccomp filters")
    return int(count)


def verify_process(
    pid: int, ids: IdBlock, cgroup_path: str, process: Process, lines: str | None = None
) -> None:
    """lines: of its map, when it has more than the block's. Raises NotConfined, or OSError when
    the process is gone."""
    _check_maps(pid, lines or ids.map_lines())
    own = os.getpid()
    for name in NAMESPACES:
        if _namespace(pid, name) == _namespace(own, name):
            raise NotConfined(f"the {name} namespace is the host's")
    check_status(parse_status(_read(pid, "status")), ids, process)
    if f"0::{cgroup_path}" not in _read(pid, "cgroup").splitlines():
        raise NotConfined("the process is in another cgroup")


def verify_command(
    pid: int, init_pid: int, ids: IdBlock, cgroup_path: str, apparmor_label: str | None
) -> None:
    """Raises NotConfined, or OSError when the process is gone. Init must be verified already."""
    try:
        _look_at_command(pid, init_pid, ids, cgroup_path, apparmor_label)
    except NotConfined:
        # What was killed meanwhile, and is not reaped yet, shows less than it was.
        if not _read(pid, "auxv"):
            raise ProcessLookupError(errno.ESRCH, "the process was killed") from None
        raise


def _look_at_command(
    pid: int, init_pid: int, ids: IdBlock, cgroup_path: str, apparmor_label: str | None
) -> None:
    # An exec closes init's pipe a moment before it takes the new label; reading this waits for it.
    _read(pid, "auxv")
    _check_maps(pid, ids.map_lines())
    for name in NAMESPACES:
        if _namespace(pid, name) != _namespace(init_pid, name):
            raise NotConfined(f"command: the {name} namespace is not init's")
    check_command_status(
        parse_status(_read(pid, "status")), parse_status(_read(init_pid, "status")), ids
    )
    if f"0::{cgroup_path}" not in _read(pid, "cgroup").splitlines():
        raise NotConfined("command: it is in another cgroup")
    if apparmor_label is not None:
        current = _read(pid, "attr/apparmor/current")
        if not apparmor.confined_as(current, apparmor_label):
            raise NotConfined("command: its AppArmor profile is not the workload's")
    if set(os.listdir(hostpaths.process_file(pid, "fd"))) != {"0", "1", "2"}:
        raise NotConfined("command: other descriptors than 0, 1 and 2 are open")


def verify_sentry(sentry: int, pids: Collection[int], ids: IdBlock, cgroup_path: str) -> None:
    """Of the processes of a leaf: the Sentry and its stubs, and one gofer.

    Raises NotConfined, or OSError when one of them is gone.
    """
    gofers = 0
    for pid in pids:
        fields = parse_status(_read(pid, "status"))
        check_runsc_status(fields)
        if fields["Uid"].split() == [str(ids.outer(0))] * 4:
            gofers += 1
            lines = ids.map_lines()
            namespaces = GOFER_NAMESPACES
        else:
            check_sentry_status(fields, ids)
            lines = f"{SENTRY_ID} {ids.outer(SENTRY_ID)} 1"
            namespaces = SENTRY_NAMESPACES
        _check_maps(pid, lines)
        for name in namespaces:
            if _namespace(pid, name) == _namespace(os.getpid(), name):
                raise NotConfined(f"runsc: the {name} namespace is the host's")
        if f"0::{cgroup_path}" not in _read(pid, "cgroup").splitlines():
            raise NotConfined("runsc: a process is in another cgroup")
    if sentry not in pids or gofers != 1:
        raise NotConfined("runsc: the leaf does not hold one Sentry and one gofer")


def check_runsc_status(fields: Mapping[str, str]) -> None:
    """Raises NotConfined unless the status is that of a process of runsc, once it serves."""
    if fields.get("NoNewPrivs") != "1":
        raise NotConfined("runsc: no_new_privs is not set")
    if fields.get("Seccomp") != "2":
        raise NotConfined("runsc: no seccomp filter is on")
    if fields.get("Groups", "-"):
        raise NotConfined("runsc: it has supplementary groups")


def check_sentry_status(fields: Mapping[str, str], ids: IdBlock) -> None:
    """Raises NotConfined unless the status is that of the Sentry of this block, or of a stub."""
    for name in ("Uid", "Gid"):
        if fields.get(name, "").split() != [str(ids.outer(SENTRY_ID))] * 4:
            raise NotConfined(f"Sentry: {name} is not its own")
    for name in CAPABILITY_SETS:
        if int(fields.get(name, "-1"), 16) != 0:
            raise NotConfined(f"Sentry: {name} is not empty")


def _check_maps(pid: int, lines: str) -> None:
    expected = parse_map(lines)
    for name in ("uid_map", "gid_map"):
        if parse_map(_read(pid, name)) != expected:
            raise NotConfined(f"{name} is not the environment's")


def _namespace(pid: int, name: str) -> int:
    return os.stat(hostpaths.process_file(pid, f"ns/{name}")).st_ino


def _read(pid: int, name: str) -> str:
    with open(hostpaths.process_file(pid, name), encoding="ascii", errors="replace") as file:
        return file.read()
