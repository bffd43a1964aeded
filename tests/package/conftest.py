"""One build of each package for all tests, and a later one of the same tree."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.package import building

# Any two moments; the second build is an upgrade of the first.
EARLIER, LATER = 1_790_000_000, 1_790_000_060


@dataclass(frozen=True)
class Packages:
    first: Path
    again: Path
    later: Path
    tree: Path


@pytest.fixture(scope="session")
def first_deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return building.build(tmp_path_factory.mktemp("deb"), EARLIER)


@pytest.fixture(scope="session")
def packages(first_deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Built where no trace of an earlier build is; `tree` is what the first one holds."""
    folder = tmp_path_factory.mktemp("package")
    return Packages(
        first=first_deb,
        again=building.build(folder / "again", EARLIER),
        later=building.build(folder / "later", LATER),
        tree=building.extract(first_deb, folder / "tree"),
    )


@dataclass(frozen=True)
class Rpms:
    first: Path
    again: Path
    later: Path


@pytest.fixture(scope="session")
def rpms(tmp_path_factory: pytest.TempPathFactory) -> Rpms:
    folder = tmp_path_factory.mktemp("rpm")
    return Rpms(
        first=building.build(folder / "first", EARLIER, "rpm"),
        again=building.build(folder / "again", EARLIER, "rpm"),
        later=building.build(folder / "later", LATER, "rpm"),
    )
