"""Every gate that is due has a test that carries its mark; every mark names a gate."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.gates.registry import GATES, REACHED, Gate, Milestone
from tests.gates.source import REPOSITORY, dotted, suite_files

AREA = "gate.sandbox."


def marks_of(tree: ast.Module) -> set[str]:
    """The ids of the gates that marks in a file name, each as one literal."""
    return {
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func) == "pytest.mark.gate"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def marks_on_tests(tree: ast.Module) -> set[str]:
    """Those of them that reach a test: on the module (`pytestmark`), a class or a function, in a
    file that has a test."""
    has_test = any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        for node in ast.walk(tree)
    )
    return marks_of(tree) if has_test else set()


def all_marks() -> dict[str, set[str]]:
    found = defaultdict(set)
    for path, tree in suite_files(REPOSITORY):
        for gate in marks_of(tree):
            found[gate].add(str(path.relative_to(REPOSITORY)))
    return found


def missing(gates: Iterable[Gate], root: Path) -> list[str]:
    """Each gate that is due and has no marked test where it should be."""
    found = []
    for gate in gates:
        if gate.milestone not in REACHED:
            continue
        path = root / gate.file if gate.file else None
        if path is None or not path.is_file():
            found.append(f"{gate.id}: no file")
        elif gate.id not in marks_on_tests(ast.parse(path.read_text(encoding="utf-8"))):
            found.append(f"{gate.id}: no marked test in {gate.file}")
    return found


def test_there_are_thirteen_gates_with_ids_of_their_own() -> None:
    ids = [gate.id for gate in GATES]
    assert len(set(ids)) == len(ids) == 13
    assert all(gate.startswith(AREA) for gate in ids)
    assert all(gate.claim.endswith(".") for gate in GATES)


def test_every_gate_that_is_due_has_its_test() -> None:
    assert missing(GATES, REPOSITORY) == []


def test_every_mark_names_a_gate_of_the_table() -> None:
    known = {gate.id for gate in GATES}
    assert {gate: files for gate, files in all_marks().items() if gate not in known} == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def test_x(): pass\n",
        "import pytest\npytestmark = pytest.mark.gate('gate.sandbox.other')\ndef test_x(): pass\n",
        "import pytest\npytestmark = pytest.mark.gate('gate.sandbox.planted')\n",
    ],
)
def test_a_planted_gate_without_a_marked_test_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_it.py").write_text(text)
    planted = Gate(
        "gate.sandbox.planted", GATES[0].kind, Milestone.FIRST_LIGHT, "It is.", "test_it.py"
    )
    assert missing([planted], tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.gate('gate.sandbox.planted')\ndef test_x(): pass\n"
    )
    assert missing([planted], tmp_path) == []
