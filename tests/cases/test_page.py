"""docs/cases.md is the catalogue with the tests that name each case.

To write it anew: python -m tests.cases.test_page
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from sbxd.probes.catalogue import PROBES
from sbxd.probes.egress import EGRESS_PROBES
from sbxd.probes.probe import Layer
from tests.cases.table import CASES

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "cases.md"
PROBES_ARE_RUN_BY = "redteam/test_inside_probes.py::test_a_probe_finds_what_it_is_to_find"
EGRESS_PROBES_ARE_RUN_BY = (
    "redteam/test_egress_conformance.py::test_a_probe_finds_what_it_is_to_find"
)
# Those of other gates or of layers that not every host has; they have tests of their own.
RUN_ELSEWHERE = {
    Layer.APPARMOR: "redteam/test_inside_layers.py::"
    "test_the_probe_of_the_label_finds_what_it_is_to_find",
}
HEAD = """# Cases

Attacks and failures that an environment is to withstand, and the tests that try them. ESC is
escape, KRN the kernel's surface, RES resources, FS files, EGR destinations, EXP export and
artifacts, API the sockets, AUD the audit, LIF the lifecycle, PEER a hostile worker or local user,
DMN a daemon that was taken over, TTY a terminal. This page is generated from the marks of the tests
and the probes of `sbxd/probes`; `tests/cases/table.py` says what is not covered.

| case | about | tests | not covered |
|---|---|---|---|
"""


def marks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(case, test) for each `pytest.mark.case` on a test function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.case":
                    for argument in mark.args:
                        yield ast.literal_eval(argument), node.name


@cache
def covered() -> Mapping[str, list[str]]:
    """The tests of each case, as `file::function` below tests/. Every file is read once."""
    found: dict[str, list[str]] = {}
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for case, test in marks(ast.parse(path.read_text("utf-8"))):
            place = path.relative_to(REPOSITORY / "tests").as_posix()
            found.setdefault(case, []).append(f"{place}::{test}")
    for each in EGRESS_PROBES:
        for case in each.probe.cases:
            found.setdefault(case, []).append(f"{EGRESS_PROBES_ARE_RUN_BY}[{each.probe.id}]")
    for probe in PROBES:
        for case in probe.cases:
            test = RUN_ELSEWHERE.get(probe.layer, f"{PROBES_ARE_RUN_BY}[{probe.id}]")
            found.setdefault(case, []).append(test)
    return found


def page() -> str:
    """The whole page."""
    tests = covered()
    rows = []
    for case, what in CASES.items():
        named = "<br>".join(f"`{test}`" for test in tests.get(case, ()))
        rows.append(f"| {case} | {what.about} | {named or 'none'} | {what.missing} |\n")
    return HEAD + "".join(rows)


def test_the_page_of_cases_is_what_the_tests_say() -> None:
    assert PAGE.read_text("utf-8") == page(), __doc__


def test_each_mark_names_a_case_of_the_table() -> None:
    assert covered().keys() - CASES.keys() == set()


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_a_test_or_a_reason(case: str) -> None:
    assert case in covered() or CASES[case].missing


def test_a_mark_is_found_where_it_is_and_only_there() -> None:
    text = '@pytest.mark.case("A-1", "A-2")\nasync def test_x(): pass\ndef test_y(): pass\n'
    assert list(marks(ast.parse(text))) == [("A-1", "test_x"), ("A-2", "test_x")]


def test_ids_are_of_the_families() -> None:
    families = "ESC|KRN|RES|FS|EGR|EXP|API|AUD|LIF|PEER|DMN|TTY"
    assert all(re.fullmatch(rf"({families})-\d\d", case) for case in CASES)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
