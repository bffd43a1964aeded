"""The audit under load, small: nothing is lost although the journal limits the rate of units."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]
EVENTS = 2000  # above what the journal lets an ordinary unit write in its interval


@pytest.mark.case("AUD-04")
@pytest.mark.needs("daemon", "systemd", "lane-container")
def test_every_decision_under_load_is_recorded_once_and_in_order(tmp_path: Path) -> None:
    place = tmp_path / "audited.json"
    finished = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--audit", str(EVENTS), "--json", str(place)],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(place.read_text())
    assert (found["recorded"], found["repeated"], found["reordered"]) == (EVENTS, 0, 0)
    assert found["sound"]
    assert found["commands"] > 0, "real work went on beside it"
    # The control: the same journal loses records of a unit that does not forbid it.
    assert found["control_lost"] > 0
