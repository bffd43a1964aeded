"""Every errno of a start that failed: whose it is, and what the caller is told."""

import errno

import pytest

from sbxd.jail.frames import RunFailed
from sbxd.mechanism.protocol import CommandNotStarted, MechanismError, StartFailure
from sbxd.mechanism.starting import NeverReleased, is_callers, start_failure

PROGRAM_STEPS = ("execute", "program_name", "interpreter")
DIRECTORY_STEP = "enter_the_working_directory"
NOT_FOUND = {"ENOENT", "ENOTDIR"}
NOT_EXECUTABLE = {
    "EACCES", "EPERM", "ENOEXEC", "EISDIR", "ELOOP", "ENAMETOOLONG", "EINVAL", "ELIBBAD", "ENXIO",
}  # fmt: skip
ARGUMENTS = {"E2BIG", "ETXTBSY"}
LIMITS = {"ENOMEM", "EAGAIN"}
DIRECTORY = {
    "ENOENT", "ENOTDIR", "EACCES", "EPERM", "ELOOP", "ENAMETOOLONG", "EINVAL", "EXDEV", "ERANGE",
}  # fmt: skip


def expected(step: str, name: str) -> StartFailure | None:
    """None: not the caller's."""
    if name in LIMITS:
        return StartFailure.RESOURCES
    if step == DIRECTORY_STEP:
        return StartFailure.BAD_WORKING_DIRECTORY if name in DIRECTORY else None
    if name in NOT_FOUND:
        return StartFailure.NOT_FOUND
    if name in NOT_EXECUTABLE:
        return StartFailure.NOT_EXECUTABLE
    return StartFailure.RESOURCES if name in ARGUMENTS else None


@pytest.mark.case("RES-20")
@pytest.mark.parametrize("step", [*PROGRAM_STEPS, DIRECTORY_STEP])
def test_an_errno_that_is_not_the_callers_is_a_failure_of_the_mechanism(step: str) -> None:
    for number, name in errno.errorcode.items():
        problem = start_failure(RunFailed(1, number, step))
        wanted = expected(step, name)
        if wanted is None:
            assert isinstance(problem, MechanismError), name
            assert not isinstance(problem, NeverReleased), name
            assert (problem.step, problem.errno) == (step, number)
        else:
            assert isinstance(problem, CommandNotStarted), name
            assert problem.failure is wanted, name
        assert is_callers(RunFailed(1, number, step)) == (wanted is not None and name not in LIMITS)


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "EIO", "ENOSPC", "EDQUOT", "ENOSYS"])
def test_the_resource_is_named(name: str) -> None:
    number = getattr(errno, name)
    problem = start_failure(RunFailed(1, number, "execute"))
    assert isinstance(problem, MechanismError)
    assert problem.errno == number


@pytest.mark.parametrize("step", ["drop_capabilities", "set_limits", "search_path", "command"])
def test_a_step_of_the_confinement_is_never_the_callers(step: str) -> None:
    for number in errno.errorcode:
        assert not is_callers(RunFailed(1, number, step))
        assert isinstance(start_failure(RunFailed(1, number, step)), MechanismError)
