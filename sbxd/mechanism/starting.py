"""What init is told of a command that is to start, and what its FAILED means.

Invariant: NeverReleased is raised for nothing but what init says of a child that it did not
release: no program can have been executed, so that the command may be tried again.
"""

import errno
import os

from sbxd.jail import frames
from sbxd.mechanism.protocol import CommandNotStarted, CommandSpec, MechanismError, StartFailure
from sbxd.policy.child_environment import IMAGE_PATH

KILLED_BEFORE_IT_WAITED = ("park.park", errno.ESRCH)  # as init says it
# Reaped before RUN came; and dead when RUN was handed to it, so that it was not.
_NEVER_RELEASED = frozenset(
    {("park", errno.ESRCH), ("release", errno.EPIPE), ("release", errno.ECONNRESET)}
)


class NeverReleased(MechanismError):
    """The child died while it waited for its command, which it did not get."""


def start_failure(failure: frames.RunFailed) -> Exception:
    """What init's FAILED means to the caller of start()."""
    number, step = failure.errno, failure.step
    detail = f"{step}: {os.strerror(number)}" if number else step
    match step:
        case "execute" | "program_name" | "interpreter":
            if number in (errno.ENOENT, errno.ENOTDIR):
                return CommandNotStarted(StartFailure.NOT_FOUND, detail)
            if number in (errno.EACCES, errno.ENOEXEC, errno.EISDIR, errno.EPERM, errno.ELOOP):
                return CommandNotStarted(StartFailure.NOT_EXECUTABLE, detail)
            if number in (errno.E2BIG, errno.ENOMEM, errno.EAGAIN, errno.ETXTBSY):
                return CommandNotStarted(StartFailure.RESOURCES, detail)
            return CommandNotStarted(StartFailure.NOT_EXECUTABLE, detail)
        case "enter_the_working_directory":
            return CommandNotStarted(StartFailure.BAD_WORKING_DIRECTORY, detail)
        case _ if (step, number) in _NEVER_RELEASED:
            return NeverReleased(step, number)
        case _:
            return MechanismError(step, number)


def run_frame(number: int, command: CommandSpec) -> frames.Run:
    """What init is told of a command."""
    return frames.Run(
        number=number,
        working_directory=command.working_directory,
        argv=command.argv,
        environment=tuple(name + b"=" + value for name, value in command.environment),
        search_path=IMAGE_PATH.encode(),
    )
