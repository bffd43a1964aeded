"""The benchmark itself works: one round of everything that is sampled, in a lane."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]
ONE_ROUND = ("--quick", "--rounds", "1", "--skip", "memory", "--skip", "load")


def bench(*options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *ONE_ROUND, *options],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.needs("daemon", "systemd", "lane-container")
def test_a_round_of_everything_succeeds_and_is_written_down(tmp_path: Path) -> None:
    place = tmp_path / "results.json"
    finished = bench("--profile", "--json", str(place))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "where the time goes" in finished.stdout
    results = json.loads(place.read_text())
    assert {group["name"] for group in results["groups"]} == {
        "fresh sandbox",
        "second command",
        "round trip",
        "kill to populated 0",
    }
    assert all(row["marks"] for group in results["groups"] for row in group["rows"])


@pytest.mark.needs("root", "systemd", "lane-container")
def test_a_failing_operation_makes_the_exit_status_one(tmp_path: Path) -> None:
    empty, place = tmp_path / "empty.tar", tmp_path / "results.json"
    tarfile.open(empty, "w").close()
    finished = bench(
        *("--skip", "sbxd", "--skip", "exec", "--image", str(empty), "--json", str(place))
    )
    assert finished.returncode == 1, finished.stdout
    assert "operations failed" in finished.stdout
    rows = json.loads(place.read_text())["groups"][0]["rows"]
    # bare does not run in the image, so it is the control
    assert {row["tool"] for row in rows if not row["failures"]} == {"bare", "systemd-run --scope"}


@pytest.mark.needs("daemon", "systemd", "lane-container")
def test_a_short_soak_counts_its_cycles_and_finds_nothing_left(tmp_path: Path) -> None:
    place = tmp_path / "results.json"
    finished = bench("--soak", "16", "--at-once", "4", "--json", str(place))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "soak: 16 of 16 cycles, 4 at a time" in finished.stdout
    assert "nothing is left over" in finished.stdout
    results = json.loads(place.read_text())
    assert results["destroy"]["n"] == 16
    assert results["before"]["kernel"] == results["after"]["kernel"]
    # The control: what is compared is there.
    assert results["after"]["kernel"]["scopes"] > 0
    assert all(
        service["memory_kib"]["Pss"] > 1000 for service in results["after"]["services"].values()
    )
