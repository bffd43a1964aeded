"""The process that becomes one command: what it does before it knows the command, and after.

Invariants: while it waits it is uid 0 of the user namespace, in its leaf, not dumpable, and out of
the reach of a command that runs beside it (which could stop, kill or limit a process of its own
uid). From RUN on, each step leaves less: streams, identity, capabilities, directory, descriptors,
no_new_privs, and the seccomp filter last. A step that fails ends the process with its name and
errno on the error pipe; the guest's program is never entered half-confined.

PARK_STEPS
 1. keep_its_descriptors
 2. leave_the_session
 3. die_with_init
 4. reset_signals
 5. set_limits
 6. offer_itself_to_the_oom_killer
 7. lock_out_privileges
 8. hide
 9. leave_the_interpreter

The last of them is an exec of guest/command.h, which take the command: an interpreter's
memory would be given back only when the program begins, while somebody waits for it (decision
0150). They are COMMAND_STEPS, and a test compares them with the program's own list.

COMMAND_STEPS
 1. hide
 2. die_with_init
 3. end_the_ambient_set
 4. take_a_label_on_exec
 5. take_the_filter
 6. wait_for_the_command
 7. take_the_pipes
 8. become_the_workload
 9. drop_capabilities
10. die_with_init
11. enter_the_working_directory
12. close_descriptors
13. forbid_new_privileges
14. confine_files
15. confine_system_calls
16. become_the_program

Command frames.CANARY is the launcher's own: it brings its program as a fourth descriptor, goes
through the same steps, and is looked at from outside before the environment counts as built.

Why 6 of the first list: oom_score_adj of init is the service's own, since what init lowers a
workload could lower too; so the workload's is raised. It can undo that, and no more. Why 8 comes
twice: an exec makes a process dumpable again, unless the program cannot be read, as this one.
"""

import errno
import fcntl
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from sbxd.jail import identity, syscalls
from sbxd.jail.identity import Capability
from sbxd.jail.steps import JailError, Step, run_steps

OOM_SCORE_ADJ: Final = 500
PARKED: Final = b"parked"
PROGRAM: Final = b"sbx-command"
_ERROR_FD: Final = 3
_COMMAND_FD: Final = 4
_RULESET_FD: Final = 5
_PROGRAM_FD: Final = 6
_SECOND_STAGE: Final = (Capability.SETUID, Capability.SETGID)


@dataclass(frozen=True)
class Confinement:
    """What every command of an environment is confined by."""

    rlimits: Mapping[str, tuple[int, int]]
    seccomp: bytes  # sent to each process by init
    apparmor_label: str | None  # None: the kernel has no AppArmor
    ruleset_fd: int | None  # of Landlock; None: the kernel has none
    program_fd: int  # guest/init.c, compiled


@dataclass
class Parked:
    """The waiting process and its descriptors."""

    confinement: Confinement
    error_fd: int
    command_fd: int


def keep_its_descriptors(parked: Parked) -> None:
    """Error pipe to 3, channel to 4, Landlock's ruleset to 5, program to 6; close others."""
    wanted = {
        _ERROR_FD: parked.error_fd,
        _COMMAND_FD: parked.command_fd,
        _PROGRAM_FD: parked.confinement.program_fd,
    }
    if parked.confinement.ruleset_fd is not None:
        wanted[_RULESET_FD] = parked.confinement.ruleset_fd
    moved = {
        target: fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _PROGRAM_FD + 1)
        for target, descriptor in wanted.items()
    }
    for target, descriptor in moved.items():
        os.dup2(descriptor, target, inheritable=target != _PROGRAM_FD)
    parked.error_fd, parked.command_fd = _ERROR_FD, _COMMAND_FD
    identity.close_all_but(set(moved))


def leave_the_session(_: Parked) -> None:
    """A session of its own, and a umask of 022."""
    os.setsid()
    os.umask(0o022)


def die_with_init(_: object) -> None:
    """SIGKILL when init dies; init must still be the parent. A change of credentials clears it."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != 1:
        raise OSError(errno.ESRCH, "init is not the parent", "prctl")


def reset_signals(_: Parked) -> None:
    """Every disposition to the default, and no signal blocked."""
    identity.reset_signals()


def set_limits(parked: Parked) -> None:
    """The resource limits of the plan."""
    identity.set_rlimits(parked.confinement.rlimits)


def offer_itself_to_the_oom_killer(_: Parked) -> None:
    """Raise oom_score_adj, so that the kernel prefers a command to init and the steward."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else the file belongs to the host's root
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"%d" % OOM_SCORE_ADJ)
    finally:
        os.close(descriptor)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def lock_out_privileges(_: Parked) -> None:
    """Empty the bounding set, lock the securebits, keep only what the change of identity needs."""
    identity.raise_ambient(_SECOND_STAGE)  # else the exec would end them too
    identity.drop_bounding_set(0)
    if identity.bounding_set() != 0:
        raise OSError(errno.EPERM, "the bounding set is not empty", "prctl")
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, identity.SECUREBITS_LOCKED)
    identity.keep_over_exec(_SECOND_STAGE)


def hide(_: Parked) -> None:
    """Not dumpable: nobody in the environment may trace it or look into it."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def leave_the_interpreter(parked: Parked) -> None:
    """Become the small program that takes the steps below."""
    confinement = parked.confinement
    label = (confinement.apparmor_label or "").encode()
    ruleset = b"" if confinement.ruleset_fd is None else b"ruleset"
    syscalls.execveat(_PROGRAM_FD, (PROGRAM, label, ruleset), ())


PARK_STEPS: tuple[Step[Parked], ...] = (
    keep_its_descriptors,
    leave_the_session,
    die_with_init,
    reset_signals,
    set_limits,
    offer_itself_to_the_oom_killer,
    lock_out_privileges,
    hide,
    leave_the_interpreter,
)
# Of guest/command.h: name and claim.
COMMAND_STEPS: Final = (
    ("hide", "Not dumpable, from here on in this program's own memory."),
    ("die_with_init", "SIGKILL when init dies; init must still be the parent."),
    ("end_the_ambient_set", "SETUID and SETGID alone, effective and permitted."),
    ("take_a_label_on_exec", "The workload's AppArmor profile, from exec on; nothing where the "
     "kernel has no AppArmor."),
    ("take_the_filter", "The workload's seccomp filter, from init."),
    ("wait_for_the_command", "Say that it waits; take one RUN and its descriptors."),
    ("take_the_pipes", "Received pipes (or the null device) become 0, 1 and 2."),
    ("become_the_workload", "Take uid and gid 10001 in all their forms, with no supplementary "
     "group."),
    ("drop_capabilities", "Empty all five sets, read them back, and require setuid(0) to fail."),
    ("die_with_init", "Again: a change of credentials clears it."),
    ("enter_the_working_directory", "Enter the directory with the workload's own rights, never "
     "leaving the workspace."),
    ("close_descriptors", "Only 0, 1, 2 and what closes on exec stay open: the error pipe and "
     "Landlock's ruleset."),
    ("forbid_new_privileges", "no_new_privs: no program gives this process more than it has."),
    ("confine_files", "Landlock's ruleset; nothing where the kernel has no Landlock."),
    ("confine_system_calls", "The workload's seccomp filter."),
    ("become_the_program", "An absolute path as it is, a bare name on the search path alone."),
)  # fmt: skip


def main(confinement: Confinement, error_fd: int, command_fd: int) -> NoReturn:
    """The life of the process until it leaves the interpreter. Exits with 127 when a step fails."""
    parked = Parked(confinement, error_fd, command_fd)
    step, number = "workload", 0  # what is said if this code itself is wrong
    try:
        run_steps(PARK_STEPS, parked)
    except JailError as problem:
        step, number = problem.step, problem.errno
    finally:
        os.write(parked.error_fd, f"{step}\0{number}".encode())
        os._exit(127)
