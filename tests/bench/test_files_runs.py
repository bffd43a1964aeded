"""The bench of workspace and artifacts itself works, and what it says of memory can be wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from sbxd.port.limits import MIB
from tests.bench.watching import Watched, anonymous_kib, watching

SOURCE = Path(__file__).parents[2]
SIZE_KIB = 64 * 1024


@pytest.mark.needs("daemon", "systemd", "lane-container")
def test_every_way_is_measured_beside_a_plain_copy_and_no_process_holds_the_file(
    tmp_path: Path,
) -> None:
    place = tmp_path / "results.json"
    finished = subprocess.run(
        [sys.executable, "-m", "tests.bench.files", "--quick", "--json", str(place)],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "x copy" in finished.stdout
    results = json.loads(place.read_text())
    assert results["size_bytes"] == SIZE_KIB * 1024
    assert [way["name"] for way in results["large"]] == [
        "plain copy", "plain copy and SHA-256", "workspace write", "workspace read",
        "artifact put", "artifact open",
    ]  # fmt: skip
    assert {way["name"] for way in results["small"]} >= {"workspace listdir", "artifact put"}
    assert all(len(way["per_second"]) == 2 for way in (*results["large"], *results["small"]))
    held = {each["name"]: each["most_kib"] - each["before_kib"] for each in results["memory"]}
    assert set(held) == {"this worker", "daemon", "launcher", "stewards"}
    assert max(held.values()) < SIZE_KIB / 2, held


async def test_control_who_holds_the_file_is_seen_to(autojump_clock: MockClock) -> None:
    async with watching([Watched("me", os.getpid())]) as memory:
        block = bytearray(os.urandom(MIB)) * 64
        await trio.sleep(1)
        del block
    (me,) = memory()
    assert me.most_kib - me.before_kib > SIZE_KIB / 2


def test_a_process_that_is_gone_holds_nothing() -> None:
    finished = subprocess.Popen([sys.executable, "-c", ""])
    finished.wait()
    assert anonymous_kib(finished.pid) == 0.0
