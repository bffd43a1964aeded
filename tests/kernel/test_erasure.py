"""Erasing the trees of the dead: by steps, in turns, with few descriptors, and confined."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbxd.launcher import erase, filters, helpers
from sbxd.launcher.kernel import erasure, hostpaths
from sbxd.launcher.requests import Acknowledged

ONE, TWO = "00000001", "00000002"
NAME_BYTES_MAX = 255


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "erasing").mkdir()
    descriptor = os.open(tmp_path / "erasing", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def volume(folder: int, name: str, files: int = 0) -> int:
    """A dead volume with its workspace, and so many files in that; the workspace's descriptor."""
    os.mkdir(name, dir_fd=folder)
    os.mkdir(f"{name}/workspace", dir_fd=folder)
    workspace = os.open(f"{name}/workspace", os.O_RDONLY, dir_fd=folder)
    for number in range(files):
        os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY, dir_fd=workspace))
    return workspace


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.case("PEER-31")
def test_a_deep_chain_takes_few_descriptors_and_moves_each_directory_once(
    folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = 1000
    here = volume(folder, "v")
    for _ in range(depth):
        os.mkdir("d" * NAME_BYTES_MAX, dir_fd=here)
        below = os.open("d" * NAME_BYTES_MAX, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    moves = 0
    real = os.rename

    def rename(*names: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        nonlocal moves
        moves += 1
        real(*names, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", rename)
    before = descriptors()
    most = max(descriptors() for _ in erasure.remove(folder, b"v"))
    assert most - before <= 4
    assert depth - 1 <= moves <= depth
    assert os.listdir(folder) == []


def test_a_wide_tree_is_erased_by_steps_and_begun_again_where_it_was_left(folder: int) -> None:
    workspace = volume(folder, "v", files=300)
    for number in range(300):
        os.mkdir(f"d{number}", dir_fd=workspace)
        os.mkdir(f"d{number}/below", dir_fd=workspace)
    steps = erasure.remove(folder, b"v")
    for _ in range(200):
        next(steps)
    steps.close()
    left = len(os.listdir(workspace))
    assert 400 <= left < 600, "no more than what the steps say was touched"
    os.close(workspace)
    for _ in erasure.remove(folder, b"v"):
        pass
    assert os.listdir(folder) == []
    assert list(erasure.remove(folder, b"v")) == [], "what is gone is no error"


def test_directories_that_are_named_like_those_that_were_moved_are_kept_apart(
    folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 1)
    os.mkdir("v", dir_fd=folder)
    for number in range(1, 6):
        os.makedirs(f"/proc/self/fd/{folder}/v/{number}/{number}/{number}/{number}")
        os.close(os.open(f"v/{number}/file", os.O_CREAT, dir_fd=folder))
    for _ in erasure.remove(folder, b"v"):
        pass
    assert os.listdir(folder) == []


@pytest.mark.case("PEER-30")
def test_parties_take_turns_whatever_each_has_left(
    folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "TURN_ENTRIES", 10)
    monkeypatch.setattr(erasure, "TURN_SECONDS", 3600.0)
    for number in range(3):
        os.close(volume(folder, f"{ONE}-{number}", files=200))
    os.close(volume(folder, f"{TWO}-0", files=15))
    gone: list[str] = []
    real = os.rmdir

    def rmdir(name: str | bytes, *, dir_fd: int) -> None:
        real(name, dir_fd=dir_fd)
        if dir_fd == folder:
            gone.append(os.fsdecode(name))

    monkeypatch.setattr(os, "rmdir", rmdir)
    done = erasure.work(folder, 600)
    assert gone == [f"{TWO}-0", f"{ONE}-0", f"{ONE}-1", f"{ONE}-2"]
    assert (done.is_over, done.problem) == (True, None)
    assert done.removed >= 615


def test_a_round_ends_with_its_time_and_says_that_something_is_left(folder: int) -> None:
    os.close(volume(folder, f"{ONE}-0", files=3))
    done = erasure.work(folder, -1.0)
    assert (done.removed, done.is_over, done.problem) == (0, False, None)
    assert erasure.work(folder, 600).is_over  # the control


def test_a_volume_that_cannot_be_erased_keeps_no_other_from_it(
    folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (f"{ONE}-0", f"{ONE}-1", f"{TWO}-0"):
        os.close(volume(folder, name, files=3))
    real = os.unlink
    broken = os.stat(f"{ONE}-0/workspace", dir_fd=folder).st_ino

    def unlink(name: str, *, dir_fd: int) -> None:
        if os.fstat(dir_fd).st_ino == broken:
            raise OSError(errno.EIO, "a broken disk")
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    done = erasure.work(folder, 600)
    assert os.listdir(folder) == [f"{ONE}-0"]
    assert not done.is_over
    assert done.problem is not None
    assert done.problem.errno == errno.EIO
    monkeypatch.setattr(os, "unlink", real)
    assert erasure.work(folder, 600).is_over  # the control


@pytest.mark.case("FS-12")
@pytest.mark.needs("root")
def test_a_tree_of_any_depth_is_emptied_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (tmp_path / "v").mkdir()
    directory = os.open(tmp_path / "v", os.O_RDONLY)
    for depth in range(1500):
        for name in ("a", "1", "2"):
            os.mkdir(name, dir_fd=directory)
        os.symlink(outside, "link", dir_fd=directory)
        os.chmod("1", 0, dir_fd=directory)
        if depth % 100 == 0:
            os.mkfifo("fifo", dir_fd=directory)
        below = os.open("a", os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = below
    os.close(directory)
    volumes = os.open(tmp_path, os.O_RDONLY)
    for _ in erasure.remove(volumes, b"v"):
        pass
    os.close(volumes)
    assert os.listdir(tmp_path) == ["outside"]
    assert (outside / "kept").read_text() == "x"


# --- the helper -------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with a dead volume that others' files are in."""
    monkeypatch.setattr(hostpaths, "STATE_DIRECTORY", str(tmp_path))
    volumes = os.open(tmp_path, os.O_RDONLY)
    os.mkdir("volumes", 0o700, dir_fd=volumes)
    os.mkdir("volumes/erasing", 0o700, dir_fd=volumes)
    os.close(volumes)
    folder = os.open(tmp_path / "volumes" / "erasing", os.O_RDONLY)
    workspace = volume(folder, f"{ONE}-0", files=20)
    os.mkdir("sealed", dir_fd=workspace)
    os.mkdir("sealed/below", dir_fd=workspace)
    for name in ("sealed/below", "sealed", "f1"):
        os.chown(name, 10001, 10001, dir_fd=workspace)
    os.chmod("sealed", 0o1000, dir_fd=workspace)
    os.close(workspace)
    os.close(folder)
    return tmp_path


def outcome(work: helpers.Work) -> helpers.Report | None:
    """What a helper that does this reports."""
    helper = helpers.fork(work, ticket=1, deadline=0.0)
    helper.channel.setblocking(True)
    try:
        result = helper.result()
    finally:
        helper.close()
        os.waitpid(helper.pid, 0)
    return None if result is None else result[0]


@pytest.mark.needs("root")
def test_the_helper_erases_files_of_every_owner_while_it_is_confined(state: Path) -> None:
    programs = filters.load()
    report = outcome(lambda: erase.erase(programs))
    assert report is not None
    assert isinstance(report.reply, Acknowledged)
    assert not report.is_erasing
    assert os.listdir(state / "volumes" / "erasing") == []


@pytest.mark.case("DMN-15")
@pytest.mark.needs("root")
@pytest.mark.parametrize("is_confined", [True, False])
def test_the_helper_reaches_nothing_but_the_folder(state: Path, *, is_confined: bool) -> None:
    """Were its process taken over: no program, no socket, no other file, no other owner."""
    programs = filters.load()
    outside = str(state.parent)

    def attempts() -> Iterator[bool]:
        tries: tuple[Callable[[], object], ...] = (
            lambda: os.close(os.open(outside, os.O_RDONLY)),
            lambda: os.stat(outside),
            lambda: os.chown(outside, 0, 0),
            lambda: os.kill(os.getppid(), 0),
            lambda: os.setgroups([]),
        )
        for attempt in tries:
            try:
                attempt()
            except OSError:
                yield False
            else:
                yield True

    def work() -> helpers.Outcome:
        if is_confined:
            folder = hostpaths.private_directory(hostpaths.erasing_directory())
            erase._confine(folder, programs.steward)
        reached = sum(1 << number for number, did in enumerate(attempts()) if did)
        return helpers.Outcome(helpers.Report(reply=Acknowledged(ticket=1), init_pid=reached))

    report = outcome(work)
    assert report is not None
    assert report.init_pid == (0 if is_confined else 0b11111)
