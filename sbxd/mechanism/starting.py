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


# What execve says of the program that was asked for, or of its arguments.
_OF_THE_PROGRAM = {
    errno.ENOENT: StartFailure.NOT_FOUND,
    errno.ENOTDIR: StartFailure.NOT_FOUND,
    errno.EACCES: StartFailure.NOT_EXECUTABLE,
    errno.EPERM: StartFailure.NOT_EXECUTABLE,
    errno.ENOEXEC: StartFailure.NOT_EXECUTABLE,
    errno.EISDIR: StartFailure.NOT_EXECUTABLE,
    errno.ELOOP: StartFailure.NOT_EXECUTABLE,
    errno.ENAMETOOLONG: StartFailure.NOT_EXECUTABLE,
    errno.EINVAL: StartFailure.NOT_EXECUTABLE,  # no bare name, or more than one interpreter
    errno.ELIBBAD: StartFailure.NOT_EXECUTABLE,
    errno.ENXIO: StartFailure.NOT_EXECUTABLE,  # a socket or a pipe, as gVisor says it
    errno.E2BIG: StartFailure.RESOURCES,
    errno.ETXTBSY: StartFailure.RESOURCES,  # something of the environment has it open to write
}
_OF_THE_DIRECTORY = dict.fromkeys(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,  # not relative
        errno.EXDEV,  # out of the workspace
        errno.ERANGE,  # deeper than a path can be
    ),
    StartFailure.BAD_WORKING_DIRECTORY,
)
_OF_THE_CALLER = {
    "execute": _OF_THE_PROGRAM,
    "program_name": _OF_THE_PROGRAM,
    "interpreter": _OF_THE_PROGRAM,
    "enter_the_working_directory": _OF_THE_DIRECTORY,
}
# The command's own limits, where its process counts against the host's kernel.
_OF_THE_LIMITS = frozenset({errno.ENOMEM, errno.EAGAIN})


def is_callers(failure: frames.RunFailed) -> bool:
    """Whether it says something of what the caller asked for; else of what was to run it."""
    return failure.errno in _OF_THE_CALLER.get(failure.step, ())


def start_failure(failure: frames.RunFailed) -> Exception:
    """What init's FAILED means to the caller of start(): CommandNotStarted for what the caller
    asked for and for the limits of its environment, MechanismError for everything else."""
    number, step = failure.errno, failure.step
    detail = f"{step}: {os.strerror(number)}" if number else step
    if is_callers(failure):
        return CommandNotStarted(_OF_THE_CALLER[step][number], detail)
    if step in _OF_THE_CALLER and number in _OF_THE_LIMITS:
        return CommandNotStarted(StartFailure.RESOURCES, detail)
    if (step, number) in _NEVER_RELEASED:
        return NeverReleased(step, number)
    return MechanismError(step, number, detail)


def run_frame(number: int, command: CommandSpec) -> frames.Run:
    """What init is told of a command."""
    return frames.Run(
        number=number,
        working_directory=command.working_directory,
        argv=command.argv,
        environment=tuple(name + b"=" + value for name, value in command.environment),
        search_path=IMAGE_PATH.encode(),
    )
