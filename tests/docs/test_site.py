"""The site is built without a warning from the pages that are in the tree."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.host import REPOSITORY

pytestmark = pytest.mark.needs("lab")


def build(configuration: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            *(sys.executable, "-m", "mkdocs", "build", "--strict"),  # quiet would count no warning
            *("--config-file", str(configuration), "--site-dir", str(target)),
        ],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    done = build(REPOSITORY / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    page = (tmp_path / "site/quickstart.html").read_text()
    assert "sbxctl run -- python3 -c" in page
    for file in (tmp_path / "site").rglob("*.html"):
        for word in ('src="http', 'rel="stylesheet" href="http', "fonts.googleapis"):
            assert word not in file.read_text(), (file, word)


def test_control_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[gone](gone.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: planted\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "gone.md" in done.stdout + done.stderr
