"""Whether AppArmor is on, and whether the workload's profile is loaded and enforced.

Read at every preparation and not once: an operator who loads the profile need restart nothing,
and one who removes it finds that no further sandbox is built without it.
"""

import errno
from enum import StrEnum, auto

from sbxd.launcher.kernel import hostpaths

WORKLOAD_PROFILE = "sbxd-workload"
_ENFORCED = f"{WORKLOAD_PROFILE} (enforce)"


class State(StrEnum):
    OFF = auto()  # the kernel has no AppArmor, or it is switched off
    UNKNOWN = auto()  # it is on, and its list of profiles cannot be read
    NOT_LOADED = auto()
    NOT_ENFORCED = auto()  # loaded to complain, or in another mode than enforce
    ENFORCED = auto()


FIXES = {
    State.OFF: "boot with apparmor=1 security=apparmor",
    State.UNKNOWN: f"mount -t securityfs securityfs {hostpaths.SECURITYFS}",
    State.NOT_LOADED: f"apparmor_parser -r {hostpaths.APPARMOR_POLICY}/{WORKLOAD_PROFILE}",
    State.NOT_ENFORCED: f"aa-enforce {hostpaths.APPARMOR_POLICY}/{WORKLOAD_PROFILE}",
}
DETAILS = {
    State.OFF: "AppArmor is off",
    State.UNKNOWN: "AppArmor is on, but its profiles cannot be listed",
    State.NOT_LOADED: f"AppArmor is on, but the profile {WORKLOAD_PROFILE} is not loaded",
    State.NOT_ENFORCED: f"the profile {WORKLOAD_PROFILE} is loaded, but not in enforce mode",
    State.ENFORCED: f"the profile {WORKLOAD_PROFILE} is enforced",
}


def parse_profiles(text: str) -> State:
    """What the kernel's list, one `name (mode)` a line, says of the workload's profile."""
    lines = text.splitlines()
    if _ENFORCED in lines:
        return State.ENFORCED
    if any(line.startswith(f"{WORKLOAD_PROFILE} (") for line in lines):
        return State.NOT_ENFORCED
    return State.NOT_LOADED


def state() -> State:
    """What holds now."""
    if hostpaths.flag_file("apparmor") != "Y":
        return State.OFF
    try:
        return parse_profiles(hostpaths.apparmor_profiles())
    except OSError:
        return State.UNKNOWN


def workload_label() -> str | None:
    """The label of every command; None where the kernel has no AppArmor.

    Raises OSError when it has one and the profile is not enforced: then nothing may be built.
    """
    found = state()
    if found is State.OFF:
        return None
    if found is not State.ENFORCED:
        raise OSError(errno.ENOENT, DETAILS[found])
    return WORKLOAD_PROFILE


def confined_as(current: str, label: str) -> bool:
    """Whether a process's attr/apparmor/current says that exactly this profile confines it."""
    return current.rstrip("\0\n") == f"{label} (enforce)"
