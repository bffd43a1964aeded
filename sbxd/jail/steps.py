"""Ordered steps with names, and the one error of construction.

Invariant: a step is a function of one argument; its name is the function's, what it does is the
first line of its docstring. The lists in `construct`, `init`, `workload` and `steward_process`
are therefore at once what runs, what `describe` prints and what an error names.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

# What the kernel says, and what a mistake of ours would raise: both name their step.
_FAILURES = (OSError, ValueError, TypeError, LookupError, AttributeError, NameError, RuntimeError)

C = TypeVar("C")
Step = Callable[[C], None]


class JailError(Exception):
    """A step failed. errno is 0 where no system call is to blame; nothing of the jail is left."""

    def __init__(self, step: str, errno: int, detail: str = "") -> None:
        super().__init__(step, errno, detail)
        self.step = step
        self.errno = errno
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.step}: {self.detail or f'errno {self.errno}'}"


def run_steps(steps: Sequence[Step[C]], context: C) -> None:
    """Run them in order. Raises JailError, named after the first step that fails."""
    for step in steps:
        try:
            step(context)
        except JailError:
            raise
        except _FAILURES as problem:
            number = problem.errno if isinstance(problem, OSError) else None
            raise JailError(step.__name__, number or 0, str(problem)) from problem


def claim(step: Callable[..., None]) -> tuple[str, str]:
    """The name of a step and the first line of its docstring."""
    return step.__name__, (step.__doc__ or "").strip().split("\n")[0]
