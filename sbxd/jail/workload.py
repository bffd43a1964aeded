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
 9. take_a_label_on_exec
RUN_STEPS
 1. take_the_streams
 2. become_the_workload
 3. drop_capabilities
 4. die_with_init
 5. enter_the_working_directory
 6. close_descriptors
 7. forbid_new_privileges
 8. confine_files
 9. confine_system_calls
10. execute

Command frames.CANARY is the launcher's own: it brings its program as a fourth descriptor, goes
through the same steps, and is looked at from outside before the environment counts as built.

Why 6 of the first list: oom_score_adj of init is the service's own, since what init lowers a
workload could lower too; so the workload's is raised. It can undo that, and no more.
"""

import errno
import fcntl
import os
import signal
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from sbxd.jail import frames, identity, label, syscalls
from sbxd.jail.handshake import Gate
from sbxd.jail.identity import Capability
from sbxd.jail.plan import WORKLOAD_ID
from sbxd.jail.steps import JailError, Step, run_steps

OOM_SCORE_ADJ: Final = 500
WORKSPACE: Final = b"/workspace"
PARKED: Final = b"parked"
_ERROR_FD: Final = 3
_COMMAND_FD: Final = 4
_RULESET_FD: Final = 5
_NULL_DEVICE: Final = os.makedev(1, 3)
_SECOND_STAGE: Final = identity.mask(Capability.SETUID, Capability.SETGID)


@dataclass(frozen=True)
class Confinement:
    """What every command of an environment is confined by."""

    rlimits: Mapping[str, tuple[int, int]]
    seccomp: bytes
    apparmor_label: str | None  # None: the kernel has no AppArmor
    ruleset_fd: int | None  # of Landlock; None: the kernel has none


@dataclass
class Parked:
    """The waiting process and its descriptors."""

    confinement: Confinement
    error_fd: int
    command_fd: int


@dataclass(frozen=True)
class Released:
    """The command, its three descriptors, and the program that the launcher's own brings."""

    confinement: Confinement
    command: frames.Run
    streams: tuple[int, ...]
    program_fd: int | None = None


def keep_its_descriptors(parked: Parked) -> None:
    """Move the error pipe to 3, the command channel to 4, Landlock's ruleset to 5; close others."""
    wanted = {_ERROR_FD: parked.error_fd, _COMMAND_FD: parked.command_fd}
    if parked.confinement.ruleset_fd is not None:
        wanted[_RULESET_FD] = parked.confinement.ruleset_fd
    moved = {
        target: fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _RULESET_FD + 1)
        for target, descriptor in wanted.items()
    }
    for target, descriptor in moved.items():
        os.dup2(descriptor, target, inheritable=False)
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
    identity.drop_bounding_set(0)
    if identity.bounding_set() != 0:
        raise OSError(errno.EPERM, "the bounding set is not empty", "prctl")
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, identity.SECUREBITS_LOCKED)
    identity.keep_capabilities(_SECOND_STAGE)


def hide(_: Parked) -> None:
    """Not dumpable: nobody in the environment may trace it or look into it."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def take_a_label_on_exec(parked: Parked) -> None:
    """The workload's AppArmor profile, from exec on; nothing where the kernel has no AppArmor."""
    if parked.confinement.apparmor_label is not None:
        label.set_label_on_exec(parked.confinement.apparmor_label)


def take_the_streams(released: Released) -> None:
    """Received pipes (or the null device) become 0, 1 and 2."""
    for target, descriptor in enumerate(released.streams):
        found = os.fstat(descriptor)
        null = stat.S_ISCHR(found.st_mode) and found.st_rdev == _NULL_DEVICE
        if not stat.S_ISFIFO(found.st_mode) and not null:
            raise OSError(errno.EINVAL, "a stream is neither a pipe nor the null device")
        os.dup2(descriptor, target, inheritable=True)


def become_the_workload(_: Released) -> None:
    """Take uid and gid 10001 in all their forms, with no supplementary group."""
    identity.become(WORKLOAD_ID)


def drop_capabilities(_: Released) -> None:
    """Empty all five sets, read them back, and require setuid(0) to fail."""
    identity.keep_capabilities(0)
    identity.require_powerless()


def enter_the_working_directory(released: Released) -> None:
    """Enter the directory with the workload's own rights, never leaving the workspace."""
    wanted = released.command.working_directory
    if wanted.startswith(b"/"):
        raise OSError(errno.EINVAL, "the working directory is not relative")
    try:
        _enter(wanted)
    except PermissionError:
        mode = stat.S_IMODE(os.stat(WORKSPACE).st_mode)
        if mode & stat.S_IRWXU == stat.S_IRWXU:
            raise
        # A command has closed the workspace to its owner: no other could start to open it again.
        os.chmod(WORKSPACE, mode | stat.S_IRWXU)
        _enter(wanted)


def _enter(wanted: bytes) -> None:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    root = os.open(WORKSPACE, flags)
    rules = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_XDEV
    os.fchdir(syscalls.openat2(root, wanted or b".", os.O_PATH | os.O_DIRECTORY, rules))
    here = os.getcwdb()
    if here != WORKSPACE and not here.startswith(WORKSPACE + b"/"):
        raise OSError(errno.EXDEV, "the working directory is outside the workspace")


def close_descriptors(released: Released) -> None:
    """Only 0, 1, 2 and what closes on exec stay open: the error pipe and Landlock's ruleset."""
    keep = {_ERROR_FD}
    if released.confinement.ruleset_fd is not None:
        keep.add(_RULESET_FD)
    if released.program_fd is not None:
        os.set_inheritable(released.program_fd, False)
        keep.add(released.program_fd)
    identity.close_all_but(keep)


def forbid_new_privileges(_: Released) -> None:
    """no_new_privs: no program gives this process more than it has."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)


def confine_files(released: Released) -> None:
    """Landlock's ruleset; nothing where the kernel has no Landlock."""
    if released.confinement.ruleset_fd is not None:
        syscalls.landlock_restrict_self(_RULESET_FD)


def confine_system_calls(released: Released) -> None:
    """The workload's seccomp filter."""
    syscalls.seccomp_set_mode_filter(released.confinement.seccomp)


def execute(released: Released) -> None:
    """Become the program: an absolute path as it is, a bare name on the search path alone."""
    command = released.command
    if released.program_fd is not None:
        syscalls.execveat(released.program_fd, command.argv, command.environment)
    candidates = program_candidates(command.argv[0], command.search_path)
    refused: OSError | None = None
    for path in candidates:
        try:
            syscalls.execve(path, command.argv, command.environment)
        except OSError as problem:
            if problem.errno in (errno.ENOENT, errno.ENOTDIR):
                if os.path.exists(path):
                    raise JailError("interpreter", errno.ENOENT) from problem
            elif problem.errno == errno.EACCES:
                refused = refused or problem
            else:
                raise
    raise refused or OSError(errno.ENOENT, os.strerror(errno.ENOENT), "execve")


def program_candidates(name: bytes, search_path: bytes) -> list[bytes]:
    """The paths to try for argv[0], in order.

    Raises JailError `program_name` for a relative path or an empty name, and `search_path` for
    an entry that is not absolute or lies in the workspace.
    """
    if name.startswith(b"/"):
        return [name]
    if not name or b"/" in name or name in (b".", b".."):
        raise JailError("program_name", errno.EINVAL)
    directories = search_path.split(b":")
    for directory in directories:
        parts = [part for part in directory.split(b"/") if part not in (b"", b".")]
        if not directory.startswith(b"/") or b".." in parts or parts[:1] == [WORKSPACE[1:]]:
            raise JailError("search_path", errno.EINVAL)
    return [directory + b"/" + name for directory in directories]


PARK_STEPS: tuple[Step[Parked], ...] = (
    keep_its_descriptors,
    leave_the_session,
    die_with_init,
    reset_signals,
    set_limits,
    offer_itself_to_the_oom_killer,
    lock_out_privileges,
    hide,
    take_a_label_on_exec,
)
RUN_STEPS: tuple[Step[Released], ...] = (
    take_the_streams,
    become_the_workload,
    drop_capabilities,
    die_with_init,
    enter_the_working_directory,
    close_descriptors,
    forbid_new_privileges,
    confine_files,
    confine_system_calls,
    execute,
)


def main(confinement: Confinement, error_fd: int, command_fd: int) -> NoReturn:
    """The whole life of the process. Exits with 127 when a step fails."""
    parked = Parked(confinement, error_fd, command_fd)
    step, number = "workload", 0  # what is said if this code itself is wrong
    try:
        run_steps(PARK_STEPS, parked)
        run_steps(RUN_STEPS, _wait_for_command(confinement))
    except JailError as problem:
        step, number = problem.step, problem.errno
    finally:
        os.write(parked.error_fd, f"{step}\0{number}".encode())
        os._exit(127)


def _wait_for_command(confinement: Confinement) -> Released:
    # Waits for as long as init lives: PDEATHSIG and the end of file both end it.
    channel = Gate(socket.socket(fileno=_COMMAND_FD))
    channel.send(PARKED)
    raw, received = channel.receive_when_it_comes(frames.FRAME_BYTES_MAX, frames.CANARY_DESCRIPTORS)
    command = frames.decode(raw)
    if not isinstance(command, frames.Run) or len(received) != frames.run_descriptors(
        command.number
    ):
        raise JailError("command", errno.EPROTO)
    return Released(confinement, command, tuple(received[:3]), *received[3:])
