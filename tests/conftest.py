"""Hooks for every test: what each needs of its machine, and where it therefore runs.

The lab's runner (`tests/lab/run --tests`) drives them; see `tests/lab/README.md`.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from hypothesis import settings

from tests.lab.plugin import (
    marked,
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


@pytest.fixture(scope="session")
def configured_as_installed() -> None:
    """What a run that was killed has left in the daemon's configuration is put back, once."""
    from tests.redteam import configuration, operator

    if configuration.recover():
        operator.stop()
        assert operator.start() == 0, operator.said()


@pytest.fixture(autouse=True)
def nothing_stays_quarantined(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test against the daemon leaves no environment that a pass of the reaper cannot prove gone:
    the next tests would find it in the books and take it for theirs."""
    if "SBXD_LANE" not in os.environ or "daemon" not in marked(request.node, "needs"):
        yield
        return
    from tests.redteam.inventory import quarantined_after_a_pass, quarantined_ids

    request.getfixturevalue("configured_as_installed")
    before = quarantined_ids()
    yield
    if quarantined_ids() - before:
        left = quarantined_after_a_pass() - before
        assert not left, f"quarantined since the test began: {sorted(left)}"
