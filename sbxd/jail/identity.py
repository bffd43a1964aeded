"""Who a process is and what it may do: ids, capabilities, keyring, limits.

Invariants: each function acts on the calling process alone and either holds in full or raises.
"""

import errno
import os
import resource
import signal
from collections.abc import Mapping
from enum import IntEnum

from sbxd.jail import syscalls
from sbxd.jail.syscalls import Capabilities


class Capability(IntEnum):
    """The capabilities that some process of an environment keeps for a while."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    FOWNER = 3
    SETGID = 6
    SETUID = 7
    SETPCAP = 8


# NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE set; KEEP_CAPS clear; all four locked.
SECUREBITS_LOCKED = 0b1110_1111
_LAST_CAPABILITY_MAX = 63
# SIGKILL and SIGSTOP cannot be handled. 32 and 33 are the C library's, which refuses to set them,
# though whoever started the launcher may have left them ignored.
_UNCHANGEABLE = (signal.SIGKILL, signal.SIGSTOP)
_OF_THE_LIBRARY = (32, 33)


def mask(*capabilities: Capability) -> int:
    """The bit mask of these capabilities."""
    return sum(1 << capability for capability in capabilities)


def drop_bounding_set(keep: int) -> None:
    """Drop every capability that this kernel knows and that is not in `keep` (a mask)."""
    for number in range(_LAST_CAPABILITY_MAX + 1):
        try:
            held = syscalls.prctl(syscalls.PR_CAPBSET_READ, number)
        except OSError as problem:
            if problem.errno == errno.EINVAL and number > 0:
                return  # one past the kernel's last
            raise
        if held and not keep >> number & 1:
            syscalls.prctl(syscalls.PR_CAPBSET_DROP, number)


def bounding_set() -> int:
    """The mask of the bounding set."""
    found = 0
    for number in range(_LAST_CAPABILITY_MAX + 1):
        try:
            found |= syscalls.prctl(syscalls.PR_CAPBSET_READ, number) << number
        except OSError:
            break
    return found


def keep_capabilities(keep: int) -> None:
    """Effective and permitted become `keep`, inheritable and ambient empty."""
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(Capabilities(keep, keep, 0))
    found = syscalls.capget()
    if found != Capabilities(keep, keep, 0):
        raise OSError(errno.EPERM, f"the capability sets read back as {found}", "capget")


def raise_ambient(capabilities: tuple[Capability, ...]) -> None:
    """These stay over an exec, besides what is held now. Before the securebits are locked."""
    held = syscalls.capget()
    syscalls.capset(held._replace(inheritable=mask(*capabilities)))
    for capability in capabilities:
        syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_RAISE, capability)


def keep_over_exec(capabilities: tuple[Capability, ...]) -> None:
    """Effective, permitted and inheritable become these; that they are ambient is read back."""
    kept = mask(*capabilities)
    syscalls.capset(Capabilities(kept, kept, kept))
    if syscalls.capget() != Capabilities(kept, kept, kept) or not all(
        syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_IS_SET, capability)
        for capability in capabilities
    ):
        raise OSError(errno.EPERM, "the capability sets do not outlast an exec", "capget")


def become(number: int) -> None:
    """Take this uid and gid, real, effective, saved and for files; no supplementary group."""
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
    if os.getresuid() != (number,) * 3 or os.getresgid() != (number,) * 3 or os.getgroups():
        raise OSError(errno.EPERM, f"the identity did not become {number}", "setresuid")


def set_rlimits(limits: Mapping[str, tuple[int, int]]) -> None:
    """Set soft and hard limits by the names of setrlimit, with or without RLIMIT_; -1: none.

    A limit that is already lower stays: no process of an environment could raise it.
    """
    for name, pair in limits.items():
        number = getattr(resource, f"RLIMIT_{name.removeprefix('RLIMIT_')}", None)
        if number is None:
            raise OSError(errno.EINVAL, f"no resource limit is called {name}", "setrlimit")
        hard = _lower(pair[1], resource.getrlimit(number)[1])
        try:
            resource.setrlimit(number, (_lower(pair[0], hard), hard))
        except (OSError, ValueError) as problem:  # ValueError is this module's word for EPERM
            code = getattr(problem, "errno", None) or errno.EPERM
            raise OSError(code, f"{name} {pair}: {problem}", "setrlimit") from problem


def _lower(one: int, other: int) -> int:
    return min(one, other, key=lambda limit: limit if limit >= 0 else 1 << 64)


def reset_signals() -> None:
    """Every disposition to the default (an interpreter ignores SIGPIPE) and an empty mask.

    Not by the interpreter's own functions, which would make an object for each signal, in memory
    that is shared until it is written to.
    """
    for number in range(1, signal.NSIG):
        if number in _OF_THE_LIBRARY:
            syscalls.rt_sigaction_default(number)
        elif number not in _UNCHANGEABLE:
            syscalls.signal_default(number)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor above 2 that is not in `keep`."""
    first = 3
    for number in sorted(keep):
        if number > first:
            syscalls.close_range(first, number - 1)
        first = max(first, number + 1)
    syscalls.close_range(first, 2**32 - 1)
