"""Hooks for every test: what each needs of its machine, and where it therefore runs.

The lab's runner (`tests/lab/run --tests`) drives them; see `tests/lab/README.md`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hypothesis import settings

from tests.lab.plugin import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_makereport,
    pytest_terminal_summary,
    pytest_unconfigure,
)

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
    "pytest_unconfigure",
]

# No test is timed: a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
