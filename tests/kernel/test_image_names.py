"""Every unpacked image names the sandbox's user, group and host, whatever it holds there."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.jail.plan import WORKLOAD_ID
from sbxd.launcher.kernel import image_names
from sbxd.launcher.kernel.image_names import FILE_BYTES_MAX, FIRST, HOST, USER, add_names
from sbxd.launcher.prepare import HOSTNAME
from sbxd.policy.child_environment import TIER_TWO_CONSTANTS


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "etc").mkdir()
    opened = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield opened
    os.close(opened)


def test_the_names_are_those_of_the_environment_and_of_the_host() -> None:
    assert {TIER_TWO_CONSTANTS[name] for name in ("USER", "LOGNAME")} == {USER}
    assert HOST == HOSTNAME
    assert FIRST["passwd"].split(":")[2:4] == [str(WORKLOAD_ID)] * 2


def test_they_stand_before_what_the_image_says(root: int, tmp_path: Path) -> None:
    theirs = {
        "passwd": f"root:x:0:0::/root:/bin/sh\nmallory:x:{WORKLOAD_ID}:0::/:/bin/sh\n",
        "group": "root:x:0:\n",
        "hosts": "10.0.0.1 sandbox\n",
    }
    for name, text in theirs.items():
        (tmp_path / "etc" / name).write_text(text)
    add_names(root)
    for name, text in theirs.items():
        assert (tmp_path / "etc" / name).read_text() == FIRST[name] + text
        assert (tmp_path / "etc" / name).stat().st_mode & 0o777 == 0o644


def test_an_image_without_the_files_gets_them_and_root(root: int, tmp_path: Path) -> None:
    add_names(root)
    lines = (tmp_path / "etc" / "passwd").read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == [USER, "root", "nobody"]
    assert HOST in (tmp_path / "etc" / "hosts").read_text()


@pytest.mark.parametrize("name", sorted(FIRST))
def test_a_folder_of_that_name_is_left_and_the_others_are_written(
    root: int, tmp_path: Path, name: str
) -> None:
    (tmp_path / "etc" / name).mkdir()
    add_names(root)
    assert (tmp_path / "etc" / name).is_dir()
    for other in FIRST.keys() - {name}:
        assert (tmp_path / "etc" / other).read_text().startswith(FIRST[other])


@pytest.mark.case("KRN-14")
def test_nothing_else_is_written_through_links_and_second_names(root: int, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another's\n")
    os.link(other, tmp_path / "etc" / "passwd")
    os.symlink("../other", tmp_path / "etc" / "group")
    os.mkfifo(tmp_path / "etc" / "hosts")
    add_names(root)
    assert other.read_text() == "another's\n"
    assert (tmp_path / "etc" / "passwd").read_text() == FIRST["passwd"] + "another's\n"
    assert (tmp_path / "etc" / "group").is_symlink()
    assert (tmp_path / "etc" / "hosts").is_fifo()


def test_what_is_too_large_and_a_folder_that_is_a_link_are_left(tmp_path: Path) -> None:
    real, linked = tmp_path / "real", tmp_path / "linked"
    (real / "etc").mkdir(parents=True)
    linked.mkdir()
    os.symlink("../real/etc", linked / "etc")
    with (real / "etc" / "passwd").open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    for place in (linked, real):
        opened = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        add_names(opened)
        os.close(opened)
        assert (real / "etc" / "group").exists() == (place == real), "through no link"
    assert (real / "etc" / "passwd").stat().st_size == FILE_BYTES_MAX + 1
    assert image_names.FIRST["group"] in (real / "etc" / "group").read_text()
