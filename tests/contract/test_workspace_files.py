"""The workspace port without commands: the same for every adapter, a plain directory too (S1)."""

import hashlib
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import PurePosixPath

import pytest
import trio
from trio.testing import MockClock

from sbxd.port.errors import WorkspaceCode, WorkspaceError, WorkspaceEscape
from sbxd.port.limits import MIB
from sbxd.port.workspace import StreamingWorkspace, WorkspaceProvenance
from tests.contract.subjects import LIMITS

Clock = MockClock | None

ESCAPES = ["", "..", "../x", "a/../b", "./a", "a//b", "/etc/passwd", "a\0b", "x" * 256]
NAMES = ["plain", "sub/dir/file", "ünïcode", "bad-\udcff-bytes", "with space\nand line", "-rf"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_what_is_written_is_read_back(
    files: StreamingWorkspace, clock: Clock, name: str
) -> None:
    await files.write(name, b"content \0\xff")
    assert await files.read(name) == b"content \0\xff"
    await files.write(name, b"")
    assert await files.read(name) == b""


async def test_a_file_larger_than_all_credit_is_read_back(
    files: StreamingWorkspace, clock: Clock
) -> None:
    content = bytes(range(256)) * (5 * MIB // 256)
    await files.write("large", content)
    assert await files.read("large") == content


async def test_a_listing_names_the_entries_of_one_directory(
    files: StreamingWorkspace, clock: Clock
) -> None:
    await files.write("top", b"123")
    await files.write("sub/\udcff", b"12345")
    await files.write("sub/deep/er", b"")
    root = {entry.path: entry.size_bytes for entry in await files.listdir(".")}
    below = {entry.path: entry.size_bytes for entry in await files.listdir("sub")}
    assert set(root) == {"top", "sub"}
    assert root["top"] == 3
    assert set(below) == {"sub/\udcff", "sub/deep"}
    assert below["sub/\udcff"] == 5


@pytest.mark.case("PEER-10")
async def test_a_listing_says_that_it_is_whole(files: StreamingWorkspace, clock: Clock) -> None:
    names = sorted(f"many/{number}" for number in range(20))
    for name in names:
        await files.write(name, b"x")
    listed = await files.listdir("many")
    assert [entry.path for entry in listed] == names
    assert all(entry.sha256 == hashlib.sha256(b"x").hexdigest() for entry in listed)
    assert not listed.truncated


@pytest.mark.parametrize("path", ESCAPES, ids=ascii)
async def test_a_path_that_leaves_the_workspace_is_an_escape_for_every_verb(
    files: StreamingWorkspace, clock: Clock, path: str
) -> None:
    with pytest.raises(WorkspaceEscape):
        files.resolve(path)
    with pytest.raises(WorkspaceEscape):
        await files.read(path)
    with pytest.raises(WorkspaceEscape):
        await files.write(path, b"")
    with pytest.raises(WorkspaceEscape):
        await files.listdir(path)
    with pytest.raises(WorkspaceEscape):
        await files.provenance(path)


async def test_resolve_gives_the_path_inside_the_environment(
    files: StreamingWorkspace, clock: Clock
) -> None:
    assert files.root == PurePosixPath("/workspace")
    assert files.resolve("a/b") == PurePosixPath("/workspace/a/b")
    assert files.resolve(".") == files.root


async def test_refusals_of_the_file_system_are_typed(
    files: StreamingWorkspace, clock: Clock
) -> None:
    await files.write("dir/file", b"x")

    async def refused(code: WorkspaceCode, verb: str, *arguments: object) -> None:
        with pytest.raises(WorkspaceError) as caught:
            await getattr(files, verb)(*arguments)
        assert caught.value.code is code

    await refused(WorkspaceCode.NOT_FOUND, "read", "missing")
    await refused(WorkspaceCode.IS_A_DIRECTORY, "read", "dir")
    await refused(WorkspaceCode.NOT_FOUND, "listdir", "missing")
    await refused(WorkspaceCode.NOT_A_DIRECTORY, "listdir", "dir/file")
    await refused(WorkspaceCode.IS_A_DIRECTORY, "write", "dir", b"")
    await refused(WorkspaceCode.NOT_A_DIRECTORY, "write", "dir/file/below", b"")
    assert await files.read("dir/file") == b"x"


async def test_a_write_that_does_not_fit_is_refused_and_leaves_the_old_file(
    files: StreamingWorkspace, clock: Clock
) -> None:
    await files.write("file", b"old")
    with pytest.raises(WorkspaceError) as caught:
        await files.write("file", bytes(LIMITS.workspace_bytes + MIB))
    assert caught.value.code is WorkspaceCode.NO_SPACE
    assert await files.read("file") == b"old"


class Pieces(AsyncIterator[bytes]):
    """No generator: an upload may end before it does."""

    def __init__(self, *data: bytes) -> None:
        self._left = list(data)

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop(0)


async def test_what_a_tool_wrote_is_known_and_the_rest_is_not(
    files: StreamingWorkspace, clock: Clock
) -> None:
    await files.write("d/tool", b"1")
    assert await files.provenance("d/tool") is WorkspaceProvenance.TOOL_WRITTEN
    assert await files.provenance("never") is WorkspaceProvenance.UNKNOWN
    assert await files.provenance("d") is WorkspaceProvenance.UNKNOWN
    await files.write("d/tool", b"2")
    assert await files.provenance("d/tool") is WorkspaceProvenance.TOOL_WRITTEN


async def test_a_stream_ends_with_the_services_own_digest_and_not_before(
    files: StreamingWorkspace, clock: Clock
) -> None:
    data = bytes(range(256)) * 4096 * 3
    half = len(data) // 2
    await files.write_stream("d/large", size_bytes=len(data), data=Pieces(data[:half], data[half:]))
    received = bytearray()
    async with files.read_stream("d/large", maximum_bytes=len(data)) as content:
        async for piece in content:
            with pytest.raises(ValueError, match="not ended"):
                content.digest()
            received += piece
        digest = content.digest()
    assert received == data
    assert digest.size_bytes == len(data)
    assert digest.sha256 == hashlib.sha256(data).hexdigest()


async def test_an_empty_file_has_a_digest_too(files: StreamingWorkspace, clock: Clock) -> None:
    await files.write("empty", b"")
    async with files.read_stream("empty", maximum_bytes=1) as content:
        assert [piece async for piece in content] == []
        assert content.digest().sha256 == hashlib.sha256(b"").hexdigest()


async def test_a_file_above_the_maximum_is_too_large(
    files: StreamingWorkspace, clock: Clock
) -> None:
    async def read(maximum_bytes: int) -> bytes:
        async with files.read_stream("file", maximum_bytes=maximum_bytes) as content:
            return b"".join([piece async for piece in content])

    await files.write("file", b"12345")
    with pytest.raises(WorkspaceError) as caught:
        await read(4)
    assert caught.value.code is WorkspaceCode.TOO_LARGE
    assert await read(5) == b"12345"


@pytest.mark.parametrize("given", [(b"12",), (b"12", b"345"), ()], ids=["fewer", "more", "none"])
async def test_a_stream_of_another_size_leaves_the_old_file(
    files: StreamingWorkspace, clock: Clock, given: tuple[bytes, ...]
) -> None:
    await files.write("file", b"old")
    with pytest.raises(ValueError, match="bytes were given"):
        await files.write_stream("file", size_bytes=4, data=Pieces(*given))
    assert await files.read("file") == b"old"
    assert [entry.path for entry in await files.listdir(".")] == ["file"]


async def test_a_cancelled_write_leaves_the_old_file(
    files: StreamingWorkspace, clock: Clock
) -> None:
    await files.write("file", b"old")
    with trio.CancelScope() as scope:

        async def endless() -> AsyncIterator[bytes]:
            yield b"12"
            scope.cancel()
            await trio.sleep_forever()

        await files.write_stream("file", size_bytes=4, data=endless())
    assert scope.cancelled_caught
    assert await files.read("file") == b"old"
    assert [entry.path for entry in await files.listdir(".")] == ["file"]


async def test_a_stream_that_is_left_early_leaves_the_workspace_usable(
    files: StreamingWorkspace, clock: Clock
) -> None:
    await files.write("file", bytes(3 * MIB))
    async with files.read_stream("file", maximum_bytes=4 * MIB) as content:
        async for _ in content:
            break
    assert len(await files.read("file")) == 3 * MIB


class Repeated(AsyncIterator[bytes]):
    """One piece, many times."""

    def __init__(self, piece: bytes, times: int) -> None:
        self._piece = piece
        self._left = times

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._left:
            raise StopAsyncIteration
        self._left -= 1
        return self._piece


async def test_a_large_file_passes_through_little_memory(
    kind: str, files: StreamingWorkspace, clock: Clock
) -> None:
    piece, times = bytes(range(256)) * 1024, 160  # 40 MiB
    size = len(piece) * times
    whole = hashlib.sha256()
    for _ in range(times):
        whole.update(piece)
    tracemalloc.start()
    try:
        await files.write_stream("large", size_bytes=size, data=Repeated(piece, times))
        async with files.read_stream("large", maximum_bytes=size) as content:
            async for _ in content:
                pass
            digest = content.digest()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (digest.size_bytes, digest.sha256) == (size, whole.hexdigest())
    if kind not in ("fake", "fake-daemon"):  # those are memory
        assert peak < 16 * MIB
    else:  # the control: what holds the file is seen to
        assert peak > size
