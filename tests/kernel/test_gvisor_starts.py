"""A guest's kernel that cannot execute a program is replaced once, then the environment is lost."""

import errno

import pytest
import trio

from sbxd.jail.frames import RunFailed
from sbxd.mechanism.gvisor_sandbox import GvisorCommand, GvisorSandbox
from sbxd.mechanism.protocol import CommandNotStarted, CommandSpec, MechanismError, StartFailure

COMMAND = CommandSpec(argv=(b"true",), environment=(), working_directory=b".", stdin=b"")
NO_DESCRIPTOR = RunFailed(1, errno.EMFILE, "execute")
NO_MEMORY = RunFailed(1, errno.ENOMEM, "execute")


class Guest(GvisorSandbox):
    """Answers each attempt with the next of these."""

    def __init__(self, *answers: GvisorCommand | RunFailed) -> None:
        self.answers = list(answers)

    async def _attempt(self, command: CommandSpec) -> GvisorCommand | RunFailed:
        await trio.lowlevel.checkpoint()
        return self.answers.pop(0)


async def test_a_failure_that_is_not_the_callers_is_tried_again_on_a_fresh_kernel() -> None:
    running = object.__new__(GvisorCommand)
    guest = Guest(NO_DESCRIPTOR, running)
    assert await guest.start(COMMAND) is running
    assert guest.answers == []


@pytest.mark.parametrize("failure", [NO_DESCRIPTOR, RunFailed(1, errno.EIO, "set_limits")])
async def test_a_fresh_kernel_that_fails_too_is_a_failure_of_the_mechanism(
    failure: RunFailed,
) -> None:
    guest = Guest(failure, failure, object.__new__(GvisorCommand))
    with pytest.raises(MechanismError) as problem:
        await guest.start(COMMAND)
    assert (problem.value.step, problem.value.errno) == (failure.step, failure.errno)
    assert len(guest.answers) == 1


async def test_memory_that_a_fresh_kernel_has_not_either_is_the_environments_limit() -> None:
    with pytest.raises(CommandNotStarted) as problem:
        await Guest(NO_MEMORY, NO_MEMORY).start(COMMAND)
    assert problem.value.failure is StartFailure.RESOURCES
    assert problem.value.detail == "execute: Cannot allocate memory"
