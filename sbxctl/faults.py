"""The last resort of a command line: a fault of sbxctl itself is one sentence, not a stack trace.

What a verb expects to fail has its sentence and its exit code elsewhere (`sbxctl.session`). This
is for what nobody expected; `--debug` leaves it as it is.
"""

import errno
import os
import sys
from types import TracebackType

import click

from sbxctl.exits import Exit

_FOR_CLICK = (click.ClickException, click.Abort, click.exceptions.Exit)
_BROKEN_PIPE = 128 + 13
_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


class Faults:
    """Around the whole of a command line."""

    def __init__(self) -> None:
        self.are_shown = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, _FOR_CLICK):
            return
        leaves = _leaves(error)
        if all(isinstance(leaf, BrokenPipeError) for leaf in leaves):
            # Whoever read our output has gone: nothing is left to be said, also not at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(_BROKEN_PIPE)
        if self.are_shown:
            return
        for leaf in leaves:
            text = ascii(str(leaf))[1:-1] or "no detail"
            click.echo(f"sbxctl: unexpected {type(leaf).__name__}: {text}", err=True)
        if all(isinstance(leaf, OSError) and leaf.errno in _OF_THE_DISK for leaf in leaves):
            click.echo("  → the output, or a file here, could not be written", err=True)
        else:
            click.echo("  → this is a fault of sbxctl; `sbxctl --debug …` shows where", err=True)
        sys.exit(Exit.INTERNAL)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
