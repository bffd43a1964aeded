"""What a service writes, and root or a collector reads, lies where nobody else may write."""

import os
import re
from pathlib import Path

import pytest

from sbxctl.metrics import _replace

REPOSITORY = Path(__file__).parents[2]
FOLDERS = re.findall(
    r"^d\s+(/\S+)\s+(\d+)\s+(\S+)\s+(\S+)",
    (REPOSITORY / "packaging/tmpfiles.d/sbxd.conf").read_text("utf-8"),
    re.M,
)
UNITS = sorted((REPOSITORY / "units").glob("*.service"))


def setting(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text("utf-8"), re.M)


@pytest.mark.case("DMN-11")
@pytest.mark.parametrize(("path", "mode", "user", "group"), FOLDERS, ids=lambda each: each)
def test_no_folder_is_writable_for_more_than_its_owner(
    path: str, mode: str, user: str, group: str
) -> None:
    assert int(mode, 8) & 0o022 == 0, f"{path}: {group} or everybody may write"


@pytest.mark.case("DMN-11")
def test_the_metrics_folder_is_its_units_own_and_no_operators() -> None:
    (owner,) = [(user, group) for path, _, user, group in FOLDERS if path == "/run/sbxd-metrics"]
    writers = [
        unit for unit in UNITS if "/run/sbxd-metrics" in " ".join(setting(unit, "ReadWritePaths"))
    ]
    assert [(unit.name, setting(unit, "User")) for unit in writers] == [
        ("sbxd-metrics.service", [owner[0]])
    ]
    assert "sbxd-admin" not in owner
    assert not setting(writers[0], "DynamicUser")


@pytest.mark.case("DMN-11")
def test_a_link_in_the_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    target = tmp_path / "sbxd.prom"
    target.symlink_to(other)
    assert _replace(target, "sbxd_up 1\n") == 0
    assert (other.read_text(), target.read_text()) == ("mine", "sbxd_up 1\n")
    assert not target.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["other", "sbxd.prom"]
