"""files_changed: what the steward says a command did, against what was done."""

import hashlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.port.command import ChangeKind, FileChange, change_bytes, changes_bytes_max
from sbxd.steward.changes import PATHS_BYTES_MAX
from sbxd.steward.tree import Clock, kernel_clock
from tests.kernel.steward_bench import listing, once, paths, steward

HOSTILE_NAMES = (
    b"new\nline",
    b"tab\tquote'\"",
    b"-rf",
    b"\xff\xfe",
    b"esc\x1b[31m",
    "bidi\u202e".encode(),
    b"n" * 255,
    b" ",
    b"%2e%2e",
)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def by_path(entries: tuple[FileChange, ...]) -> dict[str, FileChange]:
    return {entry.path: entry for entry in entries}


async def test_a_command_that_does_nothing_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    async with steward(tmp_path) as client:
        for _ in range(3):
            await client.snapshot()
            changes = await client.changes(10)
            assert changes.entries == ()
            assert not changes.truncated
    assert os.listdir(tmp_path) == ["kept"]


async def test_created_modified_and_deleted_are_told_with_size_and_digest(tmp_path: Path) -> None:
    (tmp_path / "modified").write_bytes(b"before")
    (tmp_path / "deleted").write_bytes(b"gone")
    (tmp_path / "kept").write_bytes(b"kept")
    async with steward(tmp_path) as client:
        await client.snapshot()
        (tmp_path / "modified").write_bytes(b"after!!")
        (tmp_path / "deleted").unlink()
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "created").write_bytes(b"new")
        changes = await client.changes(10)
    assert changes.entries == (
        FileChange(path="deleted", change=ChangeKind.DELETED, size_bytes=4, sha256=None),
        FileChange(
            path="modified", change=ChangeKind.MODIFIED, size_bytes=7, sha256=sha(b"after!!")
        ),
        FileChange(path="sub", change=ChangeKind.CREATED, size_bytes=0, sha256=None),
        FileChange(path="sub/created", change=ChangeKind.CREATED, size_bytes=3, sha256=sha(b"new")),
    )
    assert changes.workspace_bytes > 0
    assert changes.workspace_inodes > 0


async def test_each_comparison_starts_where_the_last_one_ended(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        for name in ("first", "second", "third"):
            await client.snapshot()
            (tmp_path / name).write_text(name)
            assert paths((await client.changes(10)).entries) == [("CREATED", name)]


async def test_names_of_any_bytes_come_back_as_they_are(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        await client.snapshot()
        for name in HOSTILE_NAMES:
            (tmp_path / os.fsdecode(name)).write_bytes(name)
        changes = await client.changes(100)
        listed = await listing(client, b".")
    expected = [
        (name.decode("utf-8", "surrogateescape"), sha(name)) for name in sorted(HOSTILE_NAMES)
    ]
    assert [(entry.path, entry.sha256) for entry in changes.entries] == expected
    assert [(entry.path, entry.sha256) for entry in listed] == expected


async def test_fifos_and_sockets_are_told_and_never_opened(tmp_path: Path) -> None:
    """Opening the FIFO for reading would block for ever: the test's end is the proof."""
    async with steward(tmp_path) as client:
        await client.snapshot()
        os.mkfifo(tmp_path / "fifo")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "socket"))
        (tmp_path / "file").write_bytes(b"read")
        entries = by_path((await client.changes(10)).entries)
    assert entries["fifo"].sha256 is None
    assert entries["socket"].sha256 is None
    assert entries["file"].sha256 == sha(b"read")


async def test_links_are_told_as_links_with_the_digest_of_their_target(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"host secret")
    root = tmp_path / "workspace"
    root.mkdir()
    async with steward(root) as client:
        await client.snapshot()
        os.symlink(secret, root / "outward")
        os.symlink(b"\xff", os.fsencode(root) + b"/not-utf-8")
        os.symlink("loop", root / "loop")
        entries = by_path((await client.changes(10)).entries)
    assert entries["outward"].sha256 == sha(os.fsencode(secret))
    assert entries["outward"].sha256 != sha(b"host secret")
    assert entries["not-utf-8"].sha256 == sha(b"\xff")
    assert entries["loop"].sha256 == sha(b"loop")


async def test_a_file_that_becomes_a_link_is_modified_and_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "swapped").write_text("file")
    async with steward(tmp_path) as client:
        await client.snapshot()
        (tmp_path / "swapped").unlink()
        os.symlink("/etc/passwd", tmp_path / "swapped")
        assert paths((await client.changes(10)).entries) == [("MODIFIED", "swapped")]


async def test_a_directory_that_becomes_a_link_loses_what_was_in_it(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f").write_text("x")
    async with steward(tmp_path) as client:
        await client.snapshot()
        (tmp_path / "d").rename(tmp_path / "elsewhere")
        os.symlink("elsewhere", tmp_path / "d")
        assert paths((await client.changes(10)).entries) == [
            ("MODIFIED", "d"),
            ("DELETED", "d/e"),
            ("DELETED", "d/e/f"),
            ("CREATED", "elsewhere"),
            ("CREATED", "elsewhere/e"),
            ("CREATED", "elsewhere/e/f"),
        ]


async def test_a_directory_is_modified_by_its_mode_and_not_by_its_entries(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o755)
    async with steward(tmp_path) as client:
        await client.snapshot()
        (tmp_path / "d" / "f").write_text("x")
        assert paths((await client.changes(10)).entries) == [("CREATED", "d/f")]
        await client.snapshot()
        (tmp_path / "d").chmod(0o700)
        assert paths((await client.changes(10)).entries) == [("MODIFIED", "d")]


async def test_a_changed_mode_is_a_modification(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    async with steward(tmp_path) as client:
        await client.snapshot()
        (tmp_path / "f").chmod(0o755)
        assert paths((await client.changes(10)).entries) == [("MODIFIED", "f")]


async def test_setting_the_times_back_hides_nothing(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("before")
    before = file.stat()
    async with steward(tmp_path) as client:
        await client.snapshot()
        file.write_text("AFTER!")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_mtime_ns == before.st_mtime_ns
        entries = (await client.changes(10)).entries
    assert [(entry.path, entry.sha256) for entry in entries] == [("f", sha(b"AFTER!"))]


def coarse(tick_ns: int, *, counted_ns: int) -> Clock:
    """A kernel whose ctimes move once in `tick_ns`, and a steward that counts `counted_ns`."""
    return Clock(granularity_ns=counted_ns, coarsen=lambda ctime: ctime - ctime % tick_ns)


@pytest.mark.parametrize(("counted_ns", "seen"), [(10**15, True), (0, False)])
async def test_a_change_within_one_tick_is_found_by_its_content(
    tmp_path: Path, counted_ns: int, seen: bool
) -> None:
    """With a steward that does not count the tick (the negative control) it goes unseen."""
    file = tmp_path / "f"
    file.write_text("before")
    async with steward(tmp_path, coarse(10**15, counted_ns=counted_ns)) as client:
        await client.snapshot()
        with file.open("r+") as same:
            same.write("AFTER!")
        first = (await client.changes(10)).entries
        await client.snapshot()
        with file.open("r+") as same:
            same.write("again!")
        second = (await client.changes(10)).entries
        await client.snapshot()
        third = (await client.changes(10)).entries
    expected = [("MODIFIED", "f")] if seen else []
    assert paths(first) == expected
    assert paths(second) == expected
    assert third == ()


async def test_much_that_is_young_is_waited_out_instead_of_read(tmp_path: Path) -> None:
    """A clock of 20 ms: the snapshot comes after the tick, and then ctimes are proof."""
    async with steward(tmp_path, Clock(granularity_ns=20_000_000)) as client:
        await client.snapshot()
        with (tmp_path / "large").open("wb") as file:
            file.write(bytes(5 * 1024 * 1024))
        assert paths((await client.changes(10)).entries) == [("CREATED", "large")]
        begin = os.stat(tmp_path / "large").st_ctime_ns
        await client.snapshot()
        assert kernel_clock().now_ns() - begin >= 40_000_000
        assert (await client.changes(10)).entries == ()


async def test_the_listing_is_the_first_of_the_paths_and_says_that_there_was_more(
    tmp_path: Path,
) -> None:
    async with steward(tmp_path) as client:
        await client.snapshot()
        for number in range(30):
            (tmp_path / f"f{number:02}").touch()
        whole = await client.changes(30)
        assert not whole.truncated
        await client.snapshot()
        for number in range(30):
            (tmp_path / f"f{number:02}").write_text("x")
        part = await client.changes(7)
    assert [entry.path for entry in part.entries] == [f"f{number:02}" for number in range(7)]
    assert part.truncated


async def test_a_sparse_tebibyte_is_told_by_its_size_and_not_read(tmp_path: Path) -> None:
    async with steward(tmp_path, hash_bytes_max=2**20) as client:
        await client.snapshot()
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(2**40)
        (tmp_path / "tail").write_bytes(b"read all the same")
        entries = by_path((await client.changes(10)).entries)
    assert (entries["sparse"].size_bytes, entries["sparse"].sha256) == (2**40, None)
    assert entries["tail"].sha256 == sha(b"read all the same")


async def test_hard_links_are_each_told(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        await client.snapshot()
        (tmp_path / "one").write_text("x")
        os.link(tmp_path / "one", tmp_path / "two")
        assert paths((await client.changes(10)).entries) == [("CREATED", "one"), ("CREATED", "two")]


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder for trees that are too large for a disk in a test, or too deep for rmtree."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="steward-"))
    yield root
    subprocess.run(["rm", "-rf", str(root)], check=True)


async def test_depth_exhausts_nothing(in_memory: Path) -> None:
    """Deeper than descriptors, recursion and path lengths go; on the way back there are files."""
    root = in_memory
    depth = 2500
    directory = os.open(root, os.O_RDONLY)
    async with steward(root) as client:
        await client.snapshot()
        for _ in range(depth):
            for name in ("a", "z"):
                os.mkdir(name, dir_fd=directory)
            below = os.open("a", os.O_RDONLY, dir_fd=directory)
            os.close(directory)
            directory = below
        os.close(directory)
        changes = await client.changes(100_000, 2**30)
        assert changes.truncated  # what is too deep to be named
        listed = [entry.path for entry in changes.entries]
        assert listed[:3] == ["a", "a/a", "a/a/a"]
        assert PATHS_BYTES_MAX - 4096 <= sum(map(len, listed)) <= PATHS_BYTES_MAX
        await client.snapshot()
        (root / "a" / "z" / "late").touch()
        second = await client.changes(100)
    assert paths(second.entries) == [("CREATED", "a/z/late")]
    assert second.truncated


async def test_many_files_are_told_up_to_the_maximum(in_memory: Path) -> None:
    directory = os.open(in_memory, os.O_RDONLY)
    async with steward(in_memory) as client:
        await client.snapshot()
        for number in range(50_000):
            os.close(os.open(f"{number:05}", os.O_CREAT | os.O_WRONLY, dir_fd=directory))
        changes = await client.changes(1000)
        assert changes.truncated
        assert [entry.path for entry in changes.entries] == [f"{n:05}" for n in range(1000)]
        await client.snapshot()
        (in_memory / "00007").write_text("x")
        assert paths((await client.changes(1000)).entries) == [("MODIFIED", "00007")]
    os.close(directory)


async def test_changes_with_long_paths_are_told_up_to_their_bytes(tmp_path: Path) -> None:
    folder = "d" * 200
    async with steward(tmp_path) as client:
        await client.snapshot()
        deep = Path(*[folder] * 8)
        (tmp_path / deep).mkdir(parents=True)
        for number in range(100):
            (tmp_path / deep / f"{number:03}").touch()
        few = await client.changes(20)
        assert few.truncated
        assert sum(change_bytes(each) for each in few.entries) <= changes_bytes_max(20)
        assert 8 < len(few.entries) < 20  # the folders, and what fits of the files
        await client.snapshot()
        for number in range(100):
            (tmp_path / deep / f"{number:03}").write_text("x")
        everything = await client.changes(1000)
    assert not everything.truncated
    assert len(everything.entries) == 100


async def test_what_the_host_writes_is_no_change_of_the_command(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        await client.write(b"in/before", 1, once(b"x"))
        await client.snapshot()
        await client.write(b"in/during", 1, once(b"x"))
        (tmp_path / "out").write_text("x")
        assert paths((await client.changes(10)).entries) == [("CREATED", "out")]
        await client.write(b"in/between", 1, once(b"x"))
        await client.snapshot()
        (tmp_path / "in" / "during").write_text("y")
        (tmp_path / "in" / "between").unlink()
        assert paths((await client.changes(10)).entries) == [
            ("DELETED", "in/between"),
            ("MODIFIED", "in/during"),
        ]


@pytest.mark.needs("root")
async def test_what_nobody_may_read_is_read(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        await client.snapshot()
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "f").write_bytes(b"hidden")
        (tmp_path / "d" / "f").chmod(0)
        (tmp_path / "d").chmod(0)
        entries = by_path((await client.changes(10)).entries)
    assert entries["d/f"].sha256 == sha(b"hidden")
