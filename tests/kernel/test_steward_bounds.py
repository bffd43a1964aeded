"""A walk of the steward ends within its bounds, and says so, whatever the tree is."""

import os
import subprocess
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from sbxd.steward import origins as origins_module
from sbxd.steward import tree as tree_module
from sbxd.steward.changes import Collector, compare
from sbxd.steward.digest import Digester
from sbxd.steward.files import open_beneath
from sbxd.steward.frames import PATH_BYTES_MAX, Origin
from sbxd.steward.history import History
from sbxd.steward.nodes import EMPTY, SPLIT_ENTRIES
from sbxd.steward.origins import Origins
from sbxd.steward.tree import Bounds, Walk, Walker, kernel_clock
from tests.kernel.steward_bench import paths, steward

ENTRIES = 8_000
MIB = 1024 * 1024


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in memory, that is removed however deep it is."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="steward-"))
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def fill(root: Path, count: int, folders: int = 1) -> None:
    for number in range(count):
        folder = root / f"d{number % folders}"
        if number < folders:
            folder.mkdir()
        os.close(os.open(folder / f"f{number:08}", os.O_CREAT | os.O_WRONLY))


def chain(root: Path, name: str, depth: int) -> None:
    """Directories in each other, with a file in each."""
    directory = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=directory)
        below = os.open(name, os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = below
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=directory))
    os.close(directory)


def walk(root: Path, bounds: Bounds | None = None, old: Walk | None = None) -> Walk:
    descriptor = os.open(root, os.O_RDONLY)
    try:
        return Walker(descriptor, kernel_clock(), set(), bounds).walk(old or Walk(), lambda: None)
    finally:
        os.close(descriptor)


def differences(old: Walk, new: Walk) -> list[bytes]:
    into = Collector(10 * ENTRIES)
    compare(old.root, new.root, into)
    return [change.path for change in into.first()]


@pytest.mark.parametrize("folders", [1, 40])
def test_an_entry_costs_its_name_and_less_than_sixty_bytes(root: Path, folders: int) -> None:
    fill(root, ENTRIES, folders)
    tracemalloc.start()
    try:
        found = walk(root)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.complete
    assert held < 60 * ENTRIES
    assert peak < 120 * ENTRIES + MIB * 2
    assert found.tree_bytes <= 60 * ENTRIES


def test_what_is_the_same_is_shared_and_what_is_not_is_found_in_a_large_directory(
    root: Path,
) -> None:
    fill(root, 2 * SPLIT_ENTRIES)
    first = walk(root)
    assert walk(root, old=first).root is first.root
    (root / "d0" / "f00000007").write_text("x")
    (root / "d0" / "f00000008").unlink()
    (root / "d0" / "new").mkdir()
    second = walk(root, old=first)
    assert differences(first, second) == [b"d0/f00000007", b"d0/f00000008", b"d0/new"]
    assert walk(root, old=second).root is second.root


@pytest.mark.parametrize("count", [SPLIT_ENTRIES - 1, SPLIT_ENTRIES, SPLIT_ENTRIES + 1])
def test_a_directory_that_grows_over_a_block_has_one_change(root: Path, count: int) -> None:
    fill(root, count)
    first = walk(root)
    (root / "d0" / "one-more").touch()
    second = walk(root, old=first)
    assert differences(first, second) == [b"d0/one-more"]
    (root / "d0" / "one-more").unlink()
    assert differences(second, walk(root, old=second)) == [b"d0/one-more"]


def ticking() -> Callable[[], float]:
    """A second for each look at the clock."""
    seconds = iter(range(10**9))
    return lambda: float(next(seconds))


@pytest.mark.case("RES-21")
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(entries=500),
        Bounds(tree_bytes=20_000),
        Bounds(seconds=5.0, monotonic=ticking()),
    ],
    ids=["entries", "bytes", "seconds"],
)
async def test_each_bound_ends_in_a_truncated_result_and_in_no_false_change(
    root: Path, bounds: Bounds
) -> None:
    fill(root, 2000, folders=20)
    async with steward(root, bounds=bounds) as client:
        for number in range(2):
            await client.snapshot()
            (root / f"a{number}").touch()
            changes = await client.changes(10_000)
            assert changes.truncated
            assert set(paths(changes.entries)) <= {("CREATED", f"a{number}")}
        page = await client.list_page(b".", after=b"", maximum=100, hash_bytes_max=0)
        assert page.entries


@pytest.mark.case("FS-20")
@pytest.mark.parametrize(("name", "depth", "opened_max"), [("x" * 255, 200, 16), ("d", 4000, 2048)])
async def test_no_directory_is_opened_that_cannot_be_named(
    root: Path, name: str, depth: int, opened_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the first walk of the steward, and once for each comparison."""
    opened = []

    def counting(directory: int, path: bytes, flags: int, mode: int = 0) -> int:
        opened.append(directory)
        return open_beneath(directory, path, flags, mode)

    monkeypatch.setattr(tree_module, "open_beneath", counting)
    async with steward(root) as client:
        await client.snapshot()
        chain(root, name, depth)
        (root / "z").touch()
        first = await client.changes(10_000)
        await client.snapshot()
        (root / "z").unlink()
        second = await client.changes(10_000)
    assert len(opened) <= 2 * opened_max
    assert max(opened) < 256
    assert first.truncated
    assert max(len(entry.path) for entry in first.entries) <= PATH_BYTES_MAX
    assert paths(second.entries) == [("DELETED", "z")]
    assert second.truncated


def test_a_walk_that_found_no_room_recovers_with_the_next(root: Path) -> None:
    """A tree that is changed whole does not fit beside the old one; alone it does."""
    fill(root, 2000, folders=20)
    bounds = Bounds(tree_bytes=130_000)
    first = walk(root, bounds)
    assert first.complete
    for path in root.glob("*/*"):
        path.chmod(0o600)
    second = walk(root, bounds, first)
    assert not second.complete
    third = walk(root, bounds, second)
    assert third.complete
    assert walk(root, bounds, third).root is third.root


def test_what_is_remembered_of_the_hosts_writes_is_bounded_in_bytes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest record goes first, and its file is then the sandbox's."""
    monkeypatch.setattr(origins_module, "RECORDS_BYTES_MAX", 3000)
    (root / "f").touch()
    descriptor = os.open(root, os.O_RDONLY)
    try:
        clock, digester = kernel_clock(), Digester(descriptor)
        history = History(Walker(descriptor, clock, set()), digester, clock, lambda _: None)
        origins = Origins(descriptor, digester, clock, EMPTY, history)
        for number in range(100):
            name = b"n%03d" % number + b"x" * 96
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
            origins.enter(name, os.stat(name, dir_fd=descriptor), sha256().digest())
        found = [
            origins.origin(b"n%03d" % number + b"x" * 96, lambda: None) for number in range(100)
        ]
    finally:
        os.close(descriptor)
    assert found.count(Origin.TOOL_WRITTEN) == 6
    assert set(found[-6:]) == {Origin.TOOL_WRITTEN}
