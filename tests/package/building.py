"""Builds the packages as `make packages` does, and reads what is in one."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.lab.host import REPOSITORY

BUILD = REPOSITORY / "packaging" / "build"


def build(output: Path, source_date: int, kind: str = "deb") -> Path:
    """A package whose time is `source_date`; AssertionError with what the builder said."""
    done = subprocess.run(
        [sys.executable, str(BUILD), f"--output={output}", f"--kind={kind}"],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(source_date)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.strip())


def extract(package: Path, target: Path) -> Path:
    """What the package lays on a host, below `target`, and its control files in DEBIAN."""
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(target)], check=True)
    return target


def digest(package: Path) -> str:
    return hashlib.sha256(package.read_bytes()).hexdigest()
