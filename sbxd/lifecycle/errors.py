"""From the mechanism's failures to the port's: mapped here and nowhere else.

Invariant: of a mechanism's failure only the name of its step and its errno's name go on, with a
remedy that is written here; the detail stays.
"""

import errno
from collections.abc import Sequence

from sbxd.lifecycle.journal import JournalUnwritable
from sbxd.mechanism.protocol import (
    CommandNotStarted,
    ConfinementMismatch,
    MechanismError,
    SandboxLost,
    StartFailure,
)
from sbxd.policy.command import no_such_program
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
    ServiceShuttingDown,
    UnavailableCode,
)


def gone() -> ExecutionRejected:
    """The same for an id that never was, one that is over, and one of another peer."""
    return ExecutionRejected(
        RejectedCode.ENVIRONMENT_GONE,
        "no such environment: provision a new one",
        field="environment_id",
    )


def lost() -> ExecutionUnavailable:
    return ExecutionUnavailable(
        UnavailableCode.ENVIRONMENT_LOST,
        "the environment ended under the command and is destroyed: provision a new one",
    )


def shutting_down() -> ServiceShuttingDown:
    return ServiceShuttingDown("the service is shutting down: connect again and provision anew")


def audit_unavailable() -> ExecutionUnavailable:
    return ExecutionUnavailable(
        UnavailableCode.AUDIT_UNAVAILABLE,
        "the audit log does not take events, and nothing is done that it does not record",
    )


def journal_unwritable(problem: JournalUnwritable) -> ExecutionUnavailable:
    return ExecutionUnavailable(
        UnavailableCode.SETUP_FAILED,
        f"the creation journal takes no record ({problem}): is the disk of the state directory "
        "full, or broken?",
    )


def not_quarantined() -> ExecutionRejected:
    return ExecutionRejected(
        RejectedCode.ENVIRONMENT_GONE, "nothing of that name is quarantined", field="name"
    )


def not_proven_gone() -> ExecutionUnavailable:
    return ExecutionUnavailable(
        UnavailableCode.SETUP_FAILED,
        "it stays quarantined: not everything of it can be proven gone",
    )


def not_proven_stopped() -> ExecutionUnavailable:
    return ExecutionUnavailable(
        UnavailableCode.SETUP_FAILED,
        "the environment has ended, but it is not proven yet that nothing of it is left: the "
        "service goes on trying (`sbxctl quarantine ls` shows what it gave up)",
    )


def lacks_room(problem: MechanismError) -> bool:
    """Whether a volume was refused for want of disk."""
    return (problem.step, problem.errno) == ("volume", errno.ENOSPC)


def setup_failed(problem: MechanismError) -> ExecutionUnavailable:
    """A mechanism could not do a step: retriable. SandboxLost becomes ENVIRONMENT_LOST, and
    ConfinementMismatch CONFINEMENT_MISMATCH."""
    if isinstance(problem, SandboxLost):
        return lost()
    if isinstance(problem, ConfinementMismatch):
        return ExecutionUnavailable(
            UnavailableCode.CONFINEMENT_MISMATCH,
            f"{problem.step}: the environment was built and is not confined as it was asked to be, "
            "so nobody gets it: the operator has been alerted",
        )
    name = errno.errorcode.get(problem.errno, str(problem.errno)) if problem.errno else "failed"
    remedy = _REMEDIES.get((problem.step, problem.errno)) or _REMEDIES.get((problem.step, None))
    detail = f"{problem.step}: {name}" + ("" if remedy is None else f" ({remedy})")
    return ExecutionUnavailable(UnavailableCode.SETUP_FAILED, detail)


_LOG = "`journalctl -u sbxd-launcher` says which"
# What an operator does about a step that failed, for those of which that can be said.
_REMEDIES: dict[tuple[str, int | None], str] = {
    ("legality", None): "the launcher refused a request that its rules do not allow now, such as "
    f"one about an image that is just being removed; {_LOG}; if it stays so, restart sbxd-launcher",
    ("launcher", None): "see `systemctl status sbxd-launcher`",
    ("helper", None): f"a helper of the launcher died or took too long; {_LOG}",
    ("apparmor", None): "load and enforce the workload's profile: `sbxctl doctor` says how",
    ("seccomp_profile", None): "the launcher has no usable profile of the name in seccomp.profile: "
    "see `sbxctl seccomp dump`, and restart sbxd-launcher after a change",
    ("uid_block", None): "no block of host uids is free: see `sbxctl doctor`",
    ("anchor", errno.EACCES): "the host forbids to run a program from memory: set the sysctl "
    "vm.memfd_noexec to 1 or 0",
    ("volume", errno.ENOSPC): "the state directory has no room for a workspace of this size beside "
    "those in use, which are promised theirs: ask for less (`sbxctl run --disk`), or lower "
    "limits.defaults.workspace_bytes; prepared slots have given way already",
    ("volume", None): "the workspace could not be made: see `sbxctl doctor` about project_quota",
    ("image", None): "the image cannot be mounted: import it again",
    ("id_maps", None): "this host cannot show files under other ids: see `sbxctl doctor`",
    ("scope", None): "systemd refused the scope: see `systemctl status sbx.slice`",
    ("box", None): "the control group could not be made: see `sbxctl doctor`",
    ("controllers", None): "the limits could not be set: see `sbxctl doctor`",
    ("launch", errno.ENOSPC): "the host's user.max_*_namespaces (sysctl) is used up",
}


def not_started(problem: CommandNotStarted, argv: Sequence[str]) -> PortError:
    """Why a command has no exit code: it never ran."""
    match problem.failure:
        case StartFailure.NOT_FOUND:
            return ExecutionRejected(
                RejectedCode.COMMAND_NOT_FOUND,
                no_such_program(argv),
                field="argv",
            )
        case StartFailure.NOT_EXECUTABLE:
            return ExecutionRejected(
                RejectedCode.COMMAND_NOT_EXECUTABLE,
                "argv[0]: not a program that can be executed",
                field="argv",
            )
        case StartFailure.BAD_WORKING_DIRECTORY:
            return ExecutionRejected(
                RejectedCode.WORKING_DIRECTORY_NOT_FOUND,
                "working_directory: not a directory of the workspace that may be entered",
                field="working_directory",
            )
        case StartFailure.RESOURCES:
            return ExecutionUnavailable(
                UnavailableCode.SETUP_FAILED,
                "the command could not be started within the environment's limits: "
                f"{problem.detail}",
            )
