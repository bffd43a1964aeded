"""Whether a command may be asked for at all, judged before anything is touched.

Invariants: pure; every refusal names the field and what to write instead; nothing is repaired,
split or guessed. Whether the program exists is the environment's answer and not judged here.
"""

import json
from collections.abc import Sequence
from pathlib import PurePosixPath

from msgspec import Struct

from sbxd.policy.containment import relative_bytes
from sbxd.port.command import (
    ARGV_BYTES_MAX,
    OUTPUT_BYTES_MAX,
    STDIN_BYTES_MAX,
    ExecutionCommand,
)
from sbxd.port.errors import ExecutionRejected, RejectedCode, WorkspaceEscape

ARGUMENTS_MAX = 4096
NAME_SHOWN_MAX = 200
TIMEOUT_SECONDS_MAX = 86_400


class CommandLine(Struct, frozen=True, kw_only=True):
    """A command in the form that is executed: bytes without NUL.

    working_directory: relative to /workspace; b"." for the root.
    """

    argv: tuple[bytes, ...]
    working_directory: bytes


def validate_command(command: ExecutionCommand) -> CommandLine:
    """Judge a command and give it as bytes.

    Raises:
        ExecutionRejected: INVALID_COMMAND; `field` names what is wrong (`argv`, `argv[2]`,
            `working_directory`, `timeout_seconds`, `stdin`, `maximum_output_bytes`).
    """
    line = CommandLine(
        argv=validate_argv(command.argv),
        working_directory=validate_working_directory(command.working_directory),
    )
    _check_range("timeout_seconds", command.timeout_seconds, TIMEOUT_SECONDS_MAX)
    _check_range("maximum_output_bytes", command.maximum_output_bytes, OUTPUT_BYTES_MAX)
    if not isinstance(command.stdin, bytes | None):
        raise _rejected("stdin", f"a {type(command.stdin).__name__}: give bytes, or none")
    if not isinstance(command.network_enabled, bool):
        raise _rejected("network_enabled", f"{command.network_enabled!r}: give true or false")
    if command.stdin is not None and len(command.stdin) > STDIN_BYTES_MAX:
        raise _rejected(
            "stdin",
            f"{len(command.stdin)} bytes, and the most is {STDIN_BYTES_MAX}: write a file to the "
            "workspace instead",
        )
    return line


def validate_argv(argv: Sequence[str] | Sequence[bytes]) -> tuple[bytes, ...]:
    """An argument vector as bytes (text becomes UTF-8, with surrogateescape).

    Raises:
        ExecutionRejected: INVALID_COMMAND, with `field` "argv" or "argv[n]".
    """
    if isinstance(argv, str | bytes):
        words = argv if isinstance(argv, str) else argv.decode("utf-8", "backslashreplace")
        shown = ", ".join(json.dumps(word) for word in words[:NAME_SHOWN_MAX].split())
        raise _rejected(
            "argv",
            f'one string, not a vector: write [{shown}], or name the shell: ["sh", "-c", "..."]',
        )
    if not isinstance(argv, Sequence):
        raise _rejected("argv", f"a {type(argv).__name__}, not a vector of words")
    if not argv:
        raise _rejected("argv", 'empty: name a program, for example ["python3", "script.py"]')
    if len(argv) > ARGUMENTS_MAX:
        raise _rejected("argv", f"{len(argv)} arguments, and the most is {ARGUMENTS_MAX}")
    vector = tuple(_argument(position, value) for position, value in enumerate(argv))
    size = sum(len(value) for value in vector)
    if size > ARGV_BYTES_MAX:
        raise _rejected(
            "argv",
            f"{size} bytes in all, and the most is {ARGV_BYTES_MAX}: pass the data as stdin or "
            "as a file of the workspace",
        )
    program = vector[0]
    if not program:
        raise _rejected("argv[0]", "empty: name a program")
    if program in (b".", b".."):
        raise _rejected("argv[0]", "a directory, not a program")
    if b"/" in program and not program.startswith(b"/"):
        raise _rejected(
            "argv[0]",
            "a relative path: give an absolute path or a bare name that is found on the image's "
            'PATH; to run a script of the workspace, name its interpreter: ["bash", "./setup.sh"]',
        )
    return vector


def no_such_program(argv: Sequence[str]) -> str:
    """What a caller reads whose program the image does not have: which one, and what to write where
    it is a line for a shell."""
    name = argv[0]
    shown = ascii(name if len(name) <= NAME_SHOWN_MAX else name[:NAME_SHOWN_MAX] + "…")
    detail = (
        f"argv[0]: {shown}: no such program on the image's PATH (or its interpreter is missing)"
    )
    if name.split() == [name]:
        return detail
    return f'{detail}; a line is for a shell to read: ["sh", "-c", {shown}]'


def validate_working_directory(path: str | bytes | PurePosixPath) -> bytes:
    """A working directory as bytes relative to /workspace (b"." for the root).

    Raises:
        ExecutionRejected: INVALID_COMMAND, with `field` "working_directory".
    """
    if not isinstance(path, str | bytes | PurePosixPath):
        raise _rejected("working_directory", f"a {type(path).__name__}: give a path as text")
    try:
        return relative_bytes(path)
    except WorkspaceEscape as escape:
        raise _rejected("working_directory", escape.detail) from None


def _argument(position: int, value: object) -> bytes:
    field = f"argv[{position}]"
    if isinstance(value, str):
        try:
            value = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise _rejected(field, "holds a character that stands for no bytes") from None
    if not isinstance(value, bytes):
        raise _rejected(field, f"a {type(value).__name__}: every argument is text or bytes")
    if b"\0" in value:
        raise _rejected(field, "holds a NUL byte, which no argument can carry: remove it")
    return value


def _check_range(field: str, value: object, maximum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        raise _rejected(field, f"{value!r}: give a whole number from 1 to {maximum}")


def _rejected(field: str, detail: str) -> ExecutionRejected:
    return ExecutionRejected(RejectedCode.INVALID_COMMAND, f"{field}: {detail}", field=field)
