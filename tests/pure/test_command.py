"""What a command may look like: each refusal names its field, and nothing is repaired."""

from pathlib import PurePosixPath
from typing import Any

import pytest

from sbxd.policy.command import no_such_program, validate_argv, validate_command
from sbxd.port.command import ARGV_BYTES_MAX, ExecutionCommand
from sbxd.port.errors import ExecutionRejected, RejectedCode


def command(**changes: Any) -> ExecutionCommand:
    fields: dict[str, Any] = {
        "argv": ("python3", "script.py"),
        "working_directory": ".",
        "timeout_seconds": 30,
        "stdin": None,
        "maximum_output_bytes": 1024,
    }
    return ExecutionCommand(**(fields | changes))


def refused_field(**changes: Any) -> str | None:
    with pytest.raises(ExecutionRejected) as refused:
        validate_command(command(**changes))
    assert refused.value.code is RejectedCode.INVALID_COMMAND
    return refused.value.field


@pytest.mark.parametrize(
    "argv",
    [
        ("python3",),
        ("/usr/bin/env", "x"),
        ("bash", "-lc", "pytest -q && echo ok"),
        ("bash", "./setup.sh"),
        ("x", "", "\n", "\udcff"),
        ("..a",),
        ("x", "y" * (ARGV_BYTES_MAX - 1)),
    ],
)
def test_a_vector_that_names_its_program_is_accepted_as_it_is(argv: tuple[str, ...]) -> None:
    line = validate_command(command(argv=argv))
    assert line.argv == tuple(each.encode("utf-8", "surrogateescape") for each in argv)


def test_a_vector_of_bytes_is_judged_by_the_same_rules() -> None:
    assert validate_argv((b"x", b"\xff")) == (b"x", b"\xff")
    with pytest.raises(ExecutionRejected):
        validate_argv((b"./x",))


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        ("ls -l", "argv"),
        (b"ls", "argv"),
        ((), "argv"),
        (("x",) * 4097, "argv"),
        (("x", "y" * ARGV_BYTES_MAX), "argv"),
        (("y" * (ARGV_BYTES_MAX + 1),), "argv"),
        (("",), "argv[0]"),
        ((".",), "argv[0]"),
        (("..",), "argv[0]"),
        (("./setup.sh",), "argv[0]"),
        (("bin/tool",), "argv[0]"),
        (("tool/",), "argv[0]"),
        (("x\0y",), "argv[0]"),
        (("x", "a\0"), "argv[1]"),
        (("x", "ok", 3), "argv[2]"),
        (("x", None), "argv[1]"),
        (("x", "\ud800"), "argv[1]"),
    ],
)
def test_a_vector_that_breaks_a_rule_is_refused_naming_the_field(argv: object, field: str) -> None:
    assert refused_field(argv=argv) == field


def test_a_vector_given_as_text_is_answered_with_the_form_to_write() -> None:
    with pytest.raises(ExecutionRejected, match=r'\["python3", "script.py"\]'):
        validate_command(command(argv="python3 script.py"))


def test_a_working_directory_is_relative_bytes_and_a_dot_alone_is_the_root() -> None:
    assert validate_command(command()).working_directory == b"."
    assert validate_command(command(working_directory="a/b")).working_directory == b"a/b"
    path = PurePosixPath("a/b")
    assert validate_command(command(working_directory=path)).working_directory == b"a/b"


@pytest.mark.parametrize("path", ["..", "../a", "/workspace", "a/./b", "./a", "", "a\0", "x" * 256])
def test_a_working_directory_that_escapes_is_refused(path: str) -> None:
    assert refused_field(working_directory=path) == "working_directory"


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "30", 86_401, None])
def test_a_timeout_that_is_no_positive_whole_number_is_refused(wrong: object) -> None:
    assert refused_field(timeout_seconds=wrong) == "timeout_seconds"


@pytest.mark.parametrize("wrong", [0, -1, True, 64 * 1024 * 1024 + 1])
def test_an_output_cap_out_of_range_is_refused(wrong: object) -> None:
    assert refused_field(maximum_output_bytes=wrong) == "maximum_output_bytes"


def test_stdin_above_the_cap_is_refused_and_at_the_cap_is_not() -> None:
    cap = 64 * 1024 * 1024
    assert validate_command(command(stdin=bytes(cap)))
    assert refused_field(stdin=bytes(cap + 1)) == "stdin"


@pytest.mark.parametrize("line", ["ls -la", b"ls -la"])
def test_one_string_is_refused_with_the_vector_that_it_could_be(line: Any) -> None:
    with pytest.raises(ExecutionRejected, match=r'write \["ls", "-la"\]') as refused:
        validate_argv(line)
    assert refused.value.field == "argv"


def test_a_program_that_is_not_there_is_named_and_a_line_is_told_from_a_name() -> None:
    assert "argv[0]: 'pyhton3': no such program" in no_such_program(("pyhton3", "a.py"))
    assert '"sh"' not in no_such_program(("pyhton3", "a.py"))
    assert """["sh", "-c", 'ls -la']""" in no_such_program(("ls -la",))
    hostile = no_such_program(("\x1b[2J\u202e" + "x" * 100_000,))
    assert hostile.isascii()
    assert "\x1b" not in hostile
    assert len(hostile) < 1000
