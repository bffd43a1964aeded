"""From the mechanism's failures to the port's: mapped here and nowhere else.

Invariant: of a mechanism's failure only the name of its step and its errno's name go on; the
detail, which was written for the operator, stays.
"""

import errno

from sbxd.mechanism.protocol import (
    CommandNotStarted,
    MechanismError,
    SandboxLost,
    StartFailure,
)
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    PortError,
    RejectedCode,
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


def shutting_down() -> ExecutionUnavailable:
    return ExecutionUnavailable(
        UnavailableCode.SHUTTING_DOWN, "the service is shutting down: try again later"
    )


def audit_unavailable() -> ExecutionUnavailable:
    return ExecutionUnavailable(
        UnavailableCode.AUDIT_UNAVAILABLE,
        "the audit log does not take events, and nothing is done that it does not record",
    )


def journal_unwritable() -> ExecutionUnavailable:
    return ExecutionUnavailable(
        UnavailableCode.SETUP_FAILED, "the creation journal takes no record"
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


def setup_failed(problem: MechanismError) -> ExecutionUnavailable:
    """A mechanism could not do a step: retriable. SandboxLost becomes ENVIRONMENT_LOST."""
    if isinstance(problem, SandboxLost):
        return lost()
    name = errno.errorcode.get(problem.errno, str(problem.errno)) if problem.errno else "failed"
    return ExecutionUnavailable(UnavailableCode.SETUP_FAILED, f"{problem.step}: {name}")


def not_started(problem: CommandNotStarted) -> PortError:
    """Why a command has no exit code: it never ran."""
    match problem.failure:
        case StartFailure.NOT_FOUND:
            return ExecutionRejected(
                RejectedCode.COMMAND_NOT_FOUND,
                "argv[0]: no such program on the image's PATH (or its interpreter is missing)",
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
                "working_directory: not a directory of the workspace",
                field="working_directory",
            )
        case StartFailure.RESOURCES:
            return ExecutionUnavailable(
                UnavailableCode.SETUP_FAILED,
                "the command could not be started within the environment's limits",
            )
