"""What a fake environment does when it is asked to run something.

A `Script` maps argument vectors, or program names, to an `Outcome`, or to a function of the
`Invocation` that gives one. Nothing is executed. Pure: no clocks, no files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

from sbxd.port.command import KillReason


@dataclass(frozen=True)
class Invocation:
    """One command as the environment would have seen it.

    working_directory: absolute. files: the regular files of the workspace by relative path.
    """

    argv: tuple[str, ...]
    stdin: bytes
    environment: Mapping[str, str]
    working_directory: str
    files: Mapping[str, bytes]


class Outcome(Struct, frozen=True, kw_only=True):
    """What a command is to do, in this order: talk, write its output, change files, sleep, end.

    bridge: frames that it sends over its bridge, each after the reply to the one before; the
    replies follow in its stdout. Without a bridge it cannot, says so on stderr and exits with 1.

    exit_code: of its own end, 0-255. signal: it dies of this signal instead. killed_by: the
    service kills it at its end (a limit that a fake cannot reach by itself). sleep_seconds:
    float("inf") for a command that never ends. deletes: relative paths, removed with all below.
    """

    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: Annotated[int, Meta(ge=0, le=255)] = 0
    signal: Annotated[int, Meta(ge=1, le=64)] | None = None
    killed_by: KillReason | None = None
    sleep_seconds: Annotated[float, Meta(ge=0)] = 0.0
    writes: Mapping[str, bytes] = {}
    deletes: tuple[str, ...] = ()
    bridge: tuple[bytes, ...] = ()


Answer = Outcome | Callable[[Invocation], Outcome]


@dataclass(frozen=True)
class Script:
    """Answers for commands: by the whole vector first, then by argv[0], then `otherwise`.

    A command without an answer is refused as COMMAND_NOT_FOUND.
    """

    by_argv: Mapping[tuple[str, ...], Answer] = field(default_factory=dict)
    by_program: Mapping[str, Answer] = field(default_factory=dict)
    otherwise: Answer | None = None

    def answer(self, invocation: Invocation) -> Outcome | None:
        """The outcome of this invocation; None when nothing answers for it."""
        found = self.by_argv.get(invocation.argv)
        if found is None:
            found = self.by_program.get(invocation.argv[0], self.otherwise)
        if found is None or isinstance(found, Outcome):
            return found
        return found(invocation)
