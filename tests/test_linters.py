"""The linters and type checkers, as tests: one command says whether the tree is clean.

They run from the environment of this interpreter, over the tree that this file is in, and write
their caches to a folder of the test's own where the tree is read-only.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS_MAX = 300


def run(
    tmp_path: Path, *arguments: str, cwd: Path = REPOSITORY
) -> "subprocess.CompletedProcess[str]":
    """Run one tool of this interpreter's environment to its end."""
    cache = REPOSITORY if os.access(REPOSITORY, os.W_OK) else tmp_path
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "MYPY_CACHE_DIR": str(cache / ".mypy_cache"),
            "RUFF_CACHE_DIR": str(cache / ".ruff_cache"),
            "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
        },
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def assert_clean(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"


def test_ruff_finds_nothing(tmp_path: Path) -> None:
    assert_clean(run(tmp_path, "ruff", "check"))


def test_the_tree_is_formatted(tmp_path: Path) -> None:
    assert_clean(run(tmp_path, "ruff", "format", "--check"))


def test_mypy_strict_finds_nothing(tmp_path: Path) -> None:
    assert_clean(run(tmp_path, "mypy", "--strict"))


def test_pyright_finds_nothing(tmp_path: Path) -> None:
    assert_clean(run(tmp_path, "pyright", "--pythonpath", sys.executable))


@pytest.mark.parametrize(
    ("tool", "found"),
    [
        (("ruff", "check"), "F401"),
        (("ruff", "format", "--check"), "reformat"),
        (("mypy", "--strict", "planted.py"), "Incompatible return value"),
        (("pyright", "--pythonpath", sys.executable, "planted.py"), "not assignable"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_control_each_tool_finds_what_is_planted(
    tmp_path: Path, tool: tuple[str, ...], found: str
) -> None:
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / "planted.py").write_text("import os\ndef f()  -> int:\n    return 'x'\n")
    done = run(tmp_path, *tool, cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(found, done.stdout + done.stderr), done.stdout + done.stderr
