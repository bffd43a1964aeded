"""The bench of the egress proxy itself works: a little of everything."""

import json
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2]


def test_each_way_and_the_crowd_are_measured_and_written_down(tmp_path: Path) -> None:
    place = tmp_path / "results.json"
    finished = subprocess.run(
        [sys.executable, "-m", "tests.bench.egress", "--quick", "--json", str(place)],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads(place.read_text())
    # tinyproxy is measured where it is installed.
    assert [way["name"] for way in results["ways"]][:2] == ["direct", "sbxd"]
    assert all(len(way["mib_per_second"]) == 2 for way in results["ways"])
    assert all(len(way["connect_ms"]) == 10 for way in results["ways"])
    assert results["crowd"]["exchanges"] > 0
