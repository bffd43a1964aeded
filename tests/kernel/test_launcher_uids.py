"""Uid blocks: one environment each, never shared, kept until they are given back."""

import os
from pathlib import Path

import pytest

from sbxd.launcher.kernel import hostpaths, uids

pytestmark = pytest.mark.needs("root")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hostpaths, "STATE_DIRECTORY", str(tmp_path))
    return tmp_path


def name(number: int) -> str:
    return f"{number:032x}"


def test_each_environment_has_a_block_of_its_own() -> None:
    bases = [uids.allocate(name(number)).base for number in range(50)]
    assert len({base + offset for base in bases for offset in range(3)}) == 150
    assert uids.owners() == {name(number) for number in range(50)}


def test_an_environment_gets_no_second_block() -> None:
    uids.allocate(name(1))
    with pytest.raises(FileExistsError):
        uids.allocate(name(1))


@pytest.mark.case("LIF-12")
def test_a_block_comes_back_only_when_it_is_released_and_then_last() -> None:
    first = uids.allocate(name(1))
    kept = uids.allocate(name(2))
    uids.release(name(1))
    uids.release(name(1))
    assert uids.find(name(1)) is None
    later = [uids.allocate(name(number)) for number in range(3, 20)]
    assert first not in later
    assert kept not in later
    assert uids.find(name(2)) == kept


def test_a_block_in_use_is_passed_over_when_the_search_comes_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uids, "_SLOTS", 3)
    blocks = [uids.allocate(name(number)) for number in range(3)]
    with pytest.raises(OSError, match="free"):
        uids.allocate(name(9))
    uids.release(name(1))
    assert uids.allocate(name(9)) == blocks[1]


def test_helpers_that_allocate_at_once_never_get_the_same() -> None:
    children = []
    for worker in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                for number in range(10):
                    uids.allocate(name(worker * 100 + number))
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
    bases = [uids.find(owner) for owner in uids.owners()]
    assert len(bases) == 80
    assert len({block.base for block in bases if block is not None}) == 80
