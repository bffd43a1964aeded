"""Named steps of a slow verb: how long each took, and which one failed with which errno.

Invariant: what leaves this module names the step and the errno, never a path.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sbxd.jail.steps import JailError
from sbxd.launcher.requests import Failed, Step


class StepFailed(Exception):
    """A step failed. `number` is the errno, 0 when it was no system call."""

    def __init__(self, step: str, number: int, detail: str) -> None:
        super().__init__(f"{step}: {detail}")
        self.step = step
        self.number = number
        self.detail = detail

    def reply(self, ticket: int) -> Failed:
        """The answer to the daemon. Retriable: the same request may succeed later."""
        retriable = self.number in (errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.ETIMEDOUT)
        return Failed(
            ticket=ticket,
            step=self.step,
            errno=self.number,
            detail=self.detail[:500],
            retriable=retriable,
        )


class Steps:
    """Collects the steps of one verb in their order."""

    def __init__(self) -> None:
        self._done: list[Step] = []

    @property
    def done(self) -> tuple[Step, ...]:
        """The steps that are finished."""
        return tuple(self._done)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run the block as step `name`. OSError, JailError and ValueError become StepFailed."""
        begin = time.monotonic_ns()
        try:
            yield
        except OSError as problem:
            raise StepFailed(name, problem.errno or 0, describe(problem)) from problem
        except JailError as problem:
            detail = os.strerror(problem.errno) if problem.errno else "no system call failed"
            raise StepFailed(f"{name}.{problem.step}", problem.errno, detail) from problem
        except ValueError as problem:
            raise StepFailed(name, 0, str(problem)) from problem
        duration_us = (time.monotonic_ns() - begin) // 1000
        self._done.append(Step(name=name, duration_us=duration_us))


def describe(problem: OSError) -> str:
    """The text of an OSError without its file name."""
    if problem.strerror:
        return problem.strerror
    return os.strerror(problem.errno) if problem.errno else type(problem).__name__
