"""The arguments of a call, as a model wrote them.

Invariants: pure; nothing is coerced or repaired; each refusal names the field and shows the right
form, because the reader is a model that tries again. Deliberately absent: JSON (a framework has
decoded it) and defaults that do anything.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from sbxd.policy.command import validate_argv
from sbxd.policy.containment import resolve
from sbxd.policy.timeouts import clamp_model_timeout
from sbxd.port.errors import ExecutionRejected, WorkspaceEscape
from sbxd.tools.tool import ToolValidationError

EXAMPLE_VECTOR = '["python3", "script.py"]'


def check_names(arguments: Mapping[str, object], known: Sequence[str]) -> None:
    """Raises ToolValidationError for a field that the tool does not have."""
    for name in arguments:
        if name not in known:
            raise ToolValidationError(
                f"{name!a} is no field of this tool: it takes {', '.join(known)}", field=name
            )


def command_vector(value: object) -> tuple[str, ...]:
    """S1's first three checks: a vector, of strings, whose program is absolute or a bare name."""
    if isinstance(value, str):
        raise ToolValidationError(
            "command is one string, and an argument vector is needed: write "
            f'{EXAMPLE_VECTOR}, or name the shell: ["bash", "-c", "..."]',
            field="command",
        )
    if not isinstance(value, list | tuple) or not value:
        raise ToolValidationError(
            f"command is to be an array of one or more strings, such as {EXAMPLE_VECTOR}",
            field="command",
        )
    for position, word in enumerate(value):
        if not isinstance(word, str):
            raise ToolValidationError(
                f"command[{position}] is no string: every element of the vector is one, such as "
                f"{EXAMPLE_VECTOR}",
                field=f"command[{position}]",
            )
    try:
        validate_argv(value)
    except ExecutionRejected as problem:
        detail = problem.detail.replace("argv", "command", 1)
        field = (problem.field or "argv").replace("argv", "command", 1)
        raise ToolValidationError(detail, field=field) from None
    return tuple(value)


def workspace_path(value: object, field: str) -> str:
    """A path that passes the lexical rules. Raises ToolValidationError."""
    if not isinstance(value, str):
        raise ToolValidationError(
            f'{field} is to be a string: a path relative to the workspace, such as "data/in.csv"',
            field=field,
        )
    try:
        resolve(value)
    except WorkspaceEscape as escape:
        raise ToolValidationError(f"{field}: {escape.detail}", field=field) from None
    return value


def file_path(value: object, field: str) -> str:
    """A path of a file: as `workspace_path`, and not the workspace itself."""
    path = workspace_path(value, field)
    if path == ".":
        raise ToolValidationError(f"{field} is the workspace itself: name a file", field=field)
    return path


def timeout(value: object, *, declared_seconds: int) -> int:
    """A model's wish, clamped to what the tool declares."""
    if value is None:
        return declared_seconds
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ToolValidationError(
            "timeout_seconds is to be a whole number of seconds, 1 or more", field="timeout_seconds"
        )
    return clamp_model_timeout(value, declared_seconds=declared_seconds)


def whole_number(value: object, field: str, *, least: int, most: int) -> int:
    """A number of a closed range; another is refused and never clamped."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ToolValidationError(
            f"{field} is to be a whole number from {least} to {most}", field=field
        )
    return value


def text(value: object, field: str, *, bytes_max: int) -> str:
    """Text that has a UTF-8 form of at most bytes_max."""
    if not isinstance(value, str):
        raise ToolValidationError(f"{field} is to be a string", field=field)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ToolValidationError(
            f"{field} holds a lone surrogate, which is no character", field=field
        ) from None
    if size > bytes_max:
        raise ToolValidationError(
            f"{field} is {size} bytes long and the most is {bytes_max}", field=field
        )
    return value


def base_name(path: str) -> str:
    """The last component of a workspace path: what an export is called when nothing else is
    said. A name that is not UTF-8 is shown with U+FFFD."""
    name = PurePosixPath(path).name
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
