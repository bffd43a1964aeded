"""The tables of the documents say what the code says, and those of codes leave none out."""

import re
from enum import StrEnum
from pathlib import Path

import pytest

from sbxctl.exits import Exit, of_kill
from sbxd.port.command import KillReason
from sbxd.port.errors import EscapeCode, RejectedCode, UnavailableCode, WorkspaceCode
from tests.docs import tables

ERRORS = tables.DOCS / "errors.md"


@pytest.mark.parametrize("file", tables.marked(), ids=lambda file: file.name)
def test_a_table_is_what_the_code_says(file: Path) -> None:
    """`python -m tests.docs.tables` writes it."""
    assert file.read_text() == tables.filled(file.read_text())


def test_every_table_is_in_a_document_and_every_exit_code_has_a_meaning() -> None:
    text = "".join(file.read_text() for file in tables.marked())
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(tables.TABLES)
    assert {row[0] for row in tables.exits()} >= {str(int(code)) for code in Exit}
    assert all(row[-1] for row in tables.exits())


def test_control_a_table_that_is_out_of_date_is_found() -> None:
    text = (tables.DOCS / "limits.md").read_text()
    assert "`memory_bytes`" in text
    planted = text.replace("`memory_bytes`", "`memory`")
    assert tables.filled(planted) == text != planted


@pytest.mark.parametrize(
    ("kind", "heading"),
    [
        (UnavailableCode, "ExecutionUnavailable"),
        (RejectedCode, "ExecutionRejected"),
        (EscapeCode, "SandboxEscapeSuspected"),
        (WorkspaceCode, "WorkspaceError"),
        (KillReason, "Why a command was killed\n\n| `killed_by`"),
    ],
)
def test_every_code_has_a_row_and_no_row_is_without_a_code(
    kind: type[StrEnum], heading: str
) -> None:
    _, _, below = ERRORS.read_text().partition(f"## {heading}")
    section = below.partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == [str(code) for code in kind]


def test_the_codes_of_kills_are_those_of_sbxctl() -> None:
    for reason in KillReason:
        assert re.search(
            rf"^\| `{reason}` \| [^|]+ \| {of_kill(reason)} \|$", ERRORS.read_text(), re.M
        )
