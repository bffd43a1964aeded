"""Reading, writing and listing through a steward; what it refuses; whose a file is."""

import ctypes
import mmap
import os
import socket
import stat
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sbxd.port.errors import WorkspaceCode, WorkspaceError, WorkspaceEscape
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.steward.frames import DATA_BYTES_MAX
from tests.kernel.steward_bench import collect, listing, once, paths, steward

LIBC = ctypes.CDLL(None)
RENAME_EXCHANGE = 2
MIB = 1024 * 1024
ROUNDS = 3500  # a read, a write and a listing each: 10,500 attempts


async def read(client: object, path: bytes, maximum: int = MIB) -> bytes:
    return await collect(await client.read(path, maximum))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "size", [0, 1, DATA_BYTES_MAX - 1, DATA_BYTES_MAX, DATA_BYTES_MAX + 1, 4 * DATA_BYTES_MAX + 3]
)
async def test_what_is_written_is_read(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    async with steward(tmp_path) as client:
        await client.write(b"a/b/file", size, once(content[:1], b"", content[1:]))
        assert await read(client, b"a/b/file", size) == content
    assert (tmp_path / "a" / "b" / "file").read_bytes() == content
    assert stat.S_IMODE((tmp_path / "a" / "b" / "file").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o755


async def test_replacing_a_file_keeps_its_mode_and_leaves_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("old and longer")
    (tmp_path / "script").chmod(0o755)
    async with steward(tmp_path) as client:
        await client.write(b"script", 3, once(b"new"))
    assert os.listdir(tmp_path) == ["script"]
    assert (tmp_path / "script").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "script").stat().st_mode) == 0o755


@pytest.mark.parametrize("chunks", [(b"12",), (b"12345",), (b"1234", b"")])
async def test_a_file_of_another_size_than_announced_does_not_come(
    tmp_path: Path, chunks: tuple[bytes, ...]
) -> None:
    fits = b"".join(chunks) == b"1234"
    async with steward(tmp_path) as client:
        if fits:  # the positive control
            await client.write(b"d/f", 4, once(*chunks))
        else:
            with pytest.raises(WorkspaceError) as refused:
                await client.write(b"d/f", 4, once(*chunks))
            assert refused.value.code is WorkspaceCode.REFUSED
        await client.usage()  # what was left of it goes with the next request
    assert os.listdir(tmp_path) == (["d"] if fits else [])


async def test_an_unfinished_file_is_in_no_listing(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        seen: list[object] = []

        async def chunks() -> AsyncIterator[bytes]:
            yield b"half"
            assert len(os.listdir(tmp_path)) == 1
            seen.append(await listing(client, b"."))
            await client.snapshot()
            seen.append((await client.changes(10)).entries)
            yield b"half"

        await client.write(b"f", 8, chunks())
        assert seen == [(), ()]
        assert [entry.path for entry in await listing(client, b".")] == ["f"]


async def test_a_file_larger_than_the_volume_is_refused_before_its_bytes(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        with pytest.raises(WorkspaceError) as refused:
            await client.write(b"f", 2**48, once())
    assert refused.value.code is WorkspaceCode.NO_SPACE
    assert os.listdir(tmp_path) == []


async def test_reading_says_what_is_there_instead_of_a_file(tmp_path: Path) -> None:
    """None of it may take the steward's time: a FIFO that is opened would stop it for ever."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "d").mkdir()
    (tmp_path / "f").write_text("x" * 10)
    (tmp_path / "one").write_text("x")
    os.link(tmp_path / "one", tmp_path / "two")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    expected = {
        b"fifo": WorkspaceCode.NOT_A_FILE,
        b"socket": WorkspaceCode.NOT_A_FILE,
        b"d": WorkspaceCode.IS_A_DIRECTORY,
        b"none": WorkspaceCode.NOT_FOUND,
        b"f/x": WorkspaceCode.NOT_FOUND,
        b"f": WorkspaceCode.TOO_LARGE,
        b"one": WorkspaceCode.HARD_LINKED,
        b"two": WorkspaceCode.HARD_LINKED,
    }
    async with steward(tmp_path) as client:
        for path, code in expected.items():
            with pytest.raises(WorkspaceError) as refused:
                await read(client, path, 9)
            assert refused.value.code is code, path
        assert await read(client, b"f", 10) == b"x" * 10


@pytest.mark.case("FS-06")
@pytest.mark.needs("root")
async def test_a_device_is_never_opened(tmp_path: Path) -> None:
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    async with steward(tmp_path) as client:
        with pytest.raises(WorkspaceError) as refused:
            await read(client, b"null")
    assert refused.value.code is WorkspaceCode.NOT_A_FILE


async def test_writing_says_what_is_in_the_way(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "d").mkdir()
    (tmp_path / "f").write_text("x")
    (tmp_path / "one").write_text("kept")
    os.link(tmp_path / "one", tmp_path / "two")
    expected = {
        b"fifo": WorkspaceCode.NOT_A_FILE,
        b"d": WorkspaceCode.IS_A_DIRECTORY,
        b".": WorkspaceCode.IS_A_DIRECTORY,
        b"f/x": WorkspaceCode.NOT_A_DIRECTORY,
        b"f/x/y": WorkspaceCode.NOT_A_DIRECTORY,
        b"one": WorkspaceCode.HARD_LINKED,
    }
    async with steward(tmp_path) as client:
        for path, code in expected.items():
            with pytest.raises(WorkspaceError) as refused:
                await client.write(path, 1, once(b"y"))
            assert refused.value.code is code, path
    assert (tmp_path / "two").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["d", "f", "fifo", "one", "two"]


@pytest.mark.case("FS-02", "FS-04")
async def test_no_link_is_followed_out_of_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "secret").write_text("secret")
    root = tmp_path / "workspace"
    root.mkdir()
    (root / "inside").mkdir()
    (root / "inside" / "secret").write_text("not secret")
    os.symlink(tmp_path / "host" / "secret", root / "absolute")
    os.symlink("../host/secret", root / "relative")
    os.symlink(tmp_path / "host", root / "directory")
    os.symlink("/proc/self/fd", root / "magic")
    async with steward(root) as client:
        for path in (b"absolute", b"relative", b"directory/secret", b"magic/0", b"magic/3"):
            with pytest.raises(WorkspaceEscape):
                await read(client, path)
            with pytest.raises(WorkspaceEscape):
                await client.write(path, 1, once(b"y"))
            with pytest.raises(WorkspaceEscape):
                await client.provenance(path)
        for path in (b"directory", b"magic", b"absolute"):
            with pytest.raises(WorkspaceEscape):
                await listing(client, path)
        assert await read(client, b"inside/secret") == b"not secret"
    assert (tmp_path / "host" / "secret").read_text() == "secret"
    assert os.listdir(tmp_path / "host") == ["secret"]
    assert stat.S_ISLNK((root / "absolute").lstat().st_mode)


@pytest.mark.parametrize(
    "path", [b"", b"/etc/passwd", b"../x", b"a/../b", b"a//b", b"./a", b"a\0b"]
)
async def test_a_path_that_is_none_never_reaches_the_steward(tmp_path: Path, path: bytes) -> None:
    async with steward(tmp_path) as client:
        with pytest.raises(WorkspaceEscape):
            await read(client, path)
        with pytest.raises(WorkspaceEscape):
            await client.write(path, 1, once(b"x"))
        assert await listing(client, b".") == ()


@pytest.mark.case("FS-03")
async def test_a_directory_swapped_for_a_link_lets_nothing_escape(tmp_path: Path) -> None:
    """The workload swaps as fast as it can; each try gets the real file or a refusal."""
    host = tmp_path / "host"
    host.mkdir()
    (host / "f").write_text("HOST")
    (host / "g").touch()
    root = tmp_path / "workspace"
    (root / "d").mkdir(parents=True)
    (root / "d" / "f").write_text("mine")
    os.symlink(host, root / "link")
    stop = threading.Event()

    def swap() -> None:
        directory, link = os.fsencode(root / "d"), os.fsencode(root / "link")
        while not stop.is_set():
            assert LIBC.renameat2(-100, directory, -100, link, RENAME_EXCHANGE) == 0

    swapping = threading.Thread(target=swap)
    swapping.start()

    def attempts(client: Any) -> dict[str, Callable[[], Awaitable[object]]]:
        async def listed() -> list[str]:
            return [entry.path for entry in await listing(client, b"d")]

        return {
            "read": lambda: read(client, b"d/f"),
            "write": lambda: client.write(b"d/f", 4, once(b"tool")),
            "list": listed,
        }

    inside = {"read": (b"mine", b"tool"), "write": (None,), "list": (["f"],)}
    outcomes: Counter[str] = Counter()
    try:
        async with steward(root) as client:
            for _ in range(ROUNDS):
                for verb, attempt in attempts(client).items():
                    try:
                        assert await attempt() in inside[verb]
                        outcome = f"{verb} done"
                    except WorkspaceEscape:
                        outcome = f"{verb} escape"
                    except WorkspaceError as problem:
                        outcome = f"{verb} {problem.code}"
                    outcomes[outcome] += 1
    finally:
        stop.set()
        swapping.join()
    assert (host / "f").read_text() == "HOST"
    assert sorted(os.listdir(host)) == ["f", "g"]
    assert outcomes.total() == 3 * ROUNDS
    for verb in inside:
        assert outcomes[f"{verb} done"] > 0, outcomes
        assert outcomes[f"{verb} escape"] > 0, outcomes


@pytest.mark.case("FS-08")
async def test_a_file_that_changes_while_it_is_read_is_said_to(tmp_path: Path) -> None:
    size = 12 * DATA_BYTES_MAX
    for change in ("grow", "shrink", "touch", "replace", "link"):
        (tmp_path / "f").write_bytes(bytes(size))
        async with steward(tmp_path) as client:
            pieces = await client.read(b"f", 2 * size)
            assert len(await anext(pieces)) == DATA_BYTES_MAX
            match change:
                case "grow":
                    os.truncate(tmp_path / "f", size + 1)
                case "shrink":
                    os.truncate(tmp_path / "f", size - 1)
                case "touch":
                    os.utime(tmp_path / "f")
                case "replace":
                    (tmp_path / "f2").write_bytes(bytes(size))
                    os.rename(tmp_path / "f2", tmp_path / "f")
                case "link":
                    os.link(tmp_path / "f", tmp_path / "f2")
            with pytest.raises(WorkspaceError) as refused:
                await collect(pieces)
            late = {WorkspaceCode.HARD_LINKED} if change == "link" else set()
            assert refused.value.code in late | {WorkspaceCode.CHANGED_DURING_READ}, change


async def test_a_listing_tells_one_directory_by_name(tmp_path: Path) -> None:
    (tmp_path / "d" / "below").mkdir(parents=True)
    (tmp_path / "d" / "below" / "not told").touch()
    (tmp_path / "d" / "a").write_text("x")
    os.symlink("a", tmp_path / "d" / "link")
    async with steward(tmp_path) as client:
        assert [entry.path for entry in await listing(client, b"d")] == [
            "a",
            "below",
            "link",
        ]
        assert [entry.path for entry in await listing(client, b".")] == ["d"]
        for path, code in (
            (b"none", WorkspaceCode.NOT_FOUND),
            (b"d/a", WorkspaceCode.NOT_A_DIRECTORY),
        ):
            with pytest.raises(WorkspaceError) as refused:
                await listing(client, path)
            assert refused.value.code is code


@pytest.mark.case("PEER-10")
async def test_a_directory_is_told_to_its_end_page_by_page(tmp_path: Path) -> None:
    names = sorted(f"{number:02}" + "é" * (number % 3) for number in range(25))
    for name in names:
        (tmp_path / name).write_text(name)
    async with steward(tmp_path) as client:
        for maximum in (1, 7, 24, 25, 26):
            told: list[str] = []
            hash_left = 60
            while True:
                after = told[-1].encode() if told else b""
                page = await client.list_page(
                    b".", after=after, maximum=maximum, hash_bytes_max=hash_left
                )
                assert len(page.entries) == min(maximum, len(names) - len(told))
                told += [entry.path for entry in page.entries]
                hash_left -= page.hashed_bytes
                if not page.more:
                    break
            assert told == names
            assert 0 <= hash_left < 6  # a budget of the whole listing, not of each page
            assert not page.omitted
        assert (
            await client.list_page(b".", after=b"99", maximum=9, hash_bytes_max=0)
        ).entries == ()


async def test_a_listing_says_that_a_name_is_too_long_to_be_a_path(tmp_path: Path) -> None:
    deep = Path(*["d" * 250] * 16)  # 4015 bytes
    directory = os.open(tmp_path, os.O_RDONLY)
    for part in deep.parts:
        os.mkdir(part, dir_fd=directory)
        below = os.open(part, os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = below
    for name in ("short", "n" * 200):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=directory))
    os.close(directory)
    async with steward(tmp_path) as client:
        page = await client.list_page(bytes(deep), after=b"", maximum=9, hash_bytes_max=0)
    assert [entry.path for entry in page.entries] == ["short"]
    assert (page.more, page.omitted) == (False, True)


TOOL, SANDBOX, UNKNOWN = (
    WorkspaceProvenance.TOOL_WRITTEN,
    WorkspaceProvenance.SANDBOX_WRITTEN,
    WorkspaceProvenance.UNKNOWN,
)


@pytest.mark.case("FS-09")
async def test_provenance_is_what_last_gave_the_file_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "before").write_text("was there")
    async with steward(tmp_path) as client:
        assert await client.provenance(b"none") is UNKNOWN
        assert await client.provenance(b"before") is UNKNOWN
        (tmp_path / "made").write_text("x")
        assert await client.provenance(b"made") is SANDBOX
        await client.write(b"made", 1, once(b"y"))
        assert await client.provenance(b"made") is TOOL
        (tmp_path / "made").chmod(0o600)
        assert await client.provenance(b"made") is TOOL  # the bytes are still the tool's
        (tmp_path / "made").write_text("z")
        assert await client.provenance(b"made") is SANDBOX
        (tmp_path / "made").write_text("y")
        assert await client.provenance(b"made") is SANDBOX  # laundering does not work
        (tmp_path / "before").write_text("changed")
        assert await client.provenance(b"before") is SANDBOX


@pytest.mark.case("FS-09")
async def test_renaming_another_file_over_it_ends_the_tools_claim(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        await client.write(b"f", 4, once(b"same"))
        (tmp_path / "other").write_text("same")
        os.rename(tmp_path / "other", tmp_path / "f")
        assert await client.provenance(b"f") is SANDBOX
        await client.write(b"g", 4, once(b"same"))
        os.rename(tmp_path / "g", tmp_path / "moved")
        assert await client.provenance(b"moved") is SANDBOX
        assert await client.provenance(b"g") is UNKNOWN


async def test_a_change_in_the_tick_of_the_write_ends_the_tools_claim(tmp_path: Path) -> None:
    """The same inode and, on a coarse clock, the same ctime: the digest tells."""
    from sbxd.steward.tree import Clock

    clock = Clock(granularity_ns=10**15, coarsen=lambda ctime: ctime - ctime % 10**15)
    async with steward(tmp_path, clock) as client:
        await client.write(b"f", 4, once(b"tool"))
        assert await client.provenance(b"f") is TOOL
        await client.snapshot()
        assert await client.provenance(b"f") is TOOL
        with (tmp_path / "f").open("r+") as same:
            same.write("evil")
        assert await client.provenance(b"f") is SANDBOX


@pytest.mark.case("FS-09")
async def test_a_mapped_page_that_changes_unseen_ends_the_tools_claim(tmp_path: Path) -> None:
    """A dirty mapped page is written without moving the ctime; the digest tells."""
    async with steward(tmp_path) as client:
        await client.write(b"f", 4096, once(b"t" * 4096))
        await client.snapshot()
        with (tmp_path / "f").open("r+b") as file, mmap.mmap(file.fileno(), 4096) as pages:
            pages[0:1] = b"t"
            assert await client.provenance(b"f") is TOOL
            before = (tmp_path / "f").stat().st_ctime_ns
            pages[0:1] = b"e"
            assert (tmp_path / "f").stat().st_ctime_ns == before  # the premise
        await client.changes(10)
        assert await client.provenance(b"f") is SANDBOX


@pytest.mark.needs("root")
async def test_what_nobody_may_read_is_read_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"hidden")
    (tmp_path / "d" / "f").chmod(0)
    (tmp_path / "d").chmod(0)
    async with steward(tmp_path) as client:
        assert await read(client, b"d/f") == b"hidden"
        await client.write(b"d/f", 3, once(b"new"))
        assert await read(client, b"d/f") == b"new"


async def test_usage_counts(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        used, inodes = await client.usage()
        assert used > 0
        assert inodes > 0
        assert paths((await client.changes(1)).entries) == []
