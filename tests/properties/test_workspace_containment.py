"""gate.sandbox.workspace_containment, the part that needs a file system, on both adapters.

Trees of directories, files and links of every kind are generated, and paths into them. What an
oracle reaches by walking component by component with lstat, and never through a link, is what may
be read and written; for everything else the answer is a refusal, and a canary beside the workspace
is neither read nor changed.
"""

import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sbxd.client.channel import chunks_of
from sbxd.client.local_workspace import open_local_workspace
from sbxd.mechanism.steward_client import StewardClient
from sbxd.policy.containment import relative_bytes
from sbxd.port.errors import WorkspaceCode, WorkspaceError, WorkspaceEscape
from tests.kernel.steward_bench import steward

pytestmark = pytest.mark.gate("gate.sandbox.workspace_containment")

CANARY = b"canary: nobody may read this"
NAMES = st.sampled_from(["a", "b", "c", "l", "é", "bad-\udcff"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
TARGETS = st.sampled_from(
    [
        "..", "../canary", "../../canary", "a", "b", ".", "a/b", "l", "/", "/etc/passwd",
        "/proc/self/root", "/proc/self/cwd", "a/../../canary", "c/../l",
    ]
)  # fmt: skip
STEPS = st.lists(
    st.tuples(st.just("file"), PATHS)
    | st.tuples(st.just("directory"), PATHS)
    | st.tuples(st.just("fifo"), PATHS)
    | st.tuples(st.just("link"), PATHS, TARGETS)
    | st.tuples(st.just("absolute"), PATHS)
    | st.tuples(st.just("hard"), PATHS),
    max_size=8,
)


class Adapter(Protocol):
    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def listdir(self, path: str) -> object: ...


class Volume:
    """The daemon's half: what it asks of the steward, after the lexical check."""

    def __init__(self, client: StewardClient) -> None:
        self._client = client

    async def read(self, path: str) -> bytes:
        pieces = await self._client.read(relative_bytes(path), 1000)
        return b"".join([piece async for piece in pieces])

    async def write(self, path: str, data: bytes) -> None:
        await self._client.write(relative_bytes(path), len(data), chunks_of(data))

    async def listdir(self, path: str) -> object:
        return await self._client.list_page(
            relative_bytes(path), after=b"", maximum=1000, hash_bytes_max=2**26
        )


@asynccontextmanager
async def volume(root: Path) -> AsyncIterator[Adapter]:
    async with steward(root) as client:
        yield Volume(client)


@asynccontextmanager
async def local(root: Path) -> AsyncIterator[Adapter]:
    async with open_local_workspace(root) as workspace:
        yield workspace


ADAPTERS = {"volume": volume, "local-directory": local}


def build(root: Path, steps: list[tuple[str, ...]]) -> None:
    """Make what the steps say; a step that cannot be is left out."""
    canary = root.parent / "canary"
    for kind, path, *target in steps:
        place = os.fsencode(root) + b"/" + os.fsencode(path)
        try:
            parent = os.path.dirname(place)
            if not stat.S_ISDIR(os.lstat(parent).st_mode):
                continue
            match kind:
                case "file":
                    descriptor = os.open(
                        place, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
                    )
                    os.write(descriptor, b"inside " + os.fsencode(path))
                    os.close(descriptor)
                case "directory":
                    os.mkdir(place)
                case "fifo":
                    os.mkfifo(place)
                case "link":
                    os.symlink(target[0], place)
                case "absolute":
                    os.symlink(canary, place)
                case _:
                    os.link(canary, place)
        except OSError:
            continue


def oracle(root: Path, path: str) -> str:
    """What is at the path, reached through no link: its kind, or why there is nothing."""
    place = os.fsencode(root)
    found = "directory"
    for component in os.fsencode(path).split(b"/"):
        if found != "directory":
            return "link" if found == "link" else "nothing"
        place += b"/" + component
        try:
            status = os.lstat(place)
        except FileNotFoundError:
            return "nothing"
        mode = status.st_mode
        if stat.S_ISLNK(mode):
            found = "link"
        elif stat.S_ISDIR(mode):
            found = "directory"
        elif stat.S_ISREG(mode):
            found = "file" if status.st_nlink == 1 else "hard"
        else:
            found = "other"
    return found


def bounded(main: Callable[[], Awaitable[None]]) -> None:
    async def inner() -> None:
        with trio.fail_after(120):
            await main()

    trio.run(inner)


@pytest.mark.case("FS-02", "FS-05", "EXP-01", "EXP-03")
@pytest.mark.parametrize("adapter", ADAPTERS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS, paths=st.lists(PATHS, min_size=1, max_size=4))
@example(steps=[("absolute", "a")], paths=["a"])
@example(steps=[("link", "a", ".."), ("hard", "b")], paths=["a/canary", "b"])
@example(steps=[("directory", "a"), ("link", "a/b", "../../canary")], paths=["a/b"])
@example(
    steps=[("file", "a"), ("link", "b", "a"), ("link", "l", "b")], paths=["a", "b", "l", "b/a"]
)
def test_what_is_read_and_written_lies_beneath_the_root_or_is_refused(
    adapter: str, steps: list[tuple[str, ...]], paths: list[str]
) -> None:
    async def main() -> None:
        with TemporaryDirectory() as folder:
            root = Path(folder) / "root"
            root.mkdir()
            canary = root.parent / "canary"
            canary.write_bytes(CANARY)
            build(root, steps)
            async with ADAPTERS[adapter](root) as workspace:
                for path in paths:
                    await check(workspace, root, path)
            assert canary.read_bytes() == CANARY
            assert sorted(os.listdir(folder)) == ["canary", "root"]

    bounded(main)


async def check(workspace: Adapter, root: Path, path: str) -> None:
    """Read, list and write one path, against what the oracle says before each."""
    there = oracle(root, path)
    data = await answer(workspace.read(path))
    assert isinstance(data, bytes) is (there == "file"), (there, data)
    if isinstance(data, bytes):
        assert data.startswith((b"inside ", b"written "))
    elif there == "link":
        assert isinstance(data, WorkspaceEscape)
    listed = await answer(workspace.listdir(path))
    assert isinstance(listed, WorkspaceError | WorkspaceEscape) is (there != "directory")
    new = b"written " + os.fsencode(path)
    refused = await answer(workspace.write(path, new))
    if refused is None:
        assert there in ("file", "nothing")
        assert oracle(root, path) == "file"
        assert content(root, path) == new
    else:
        # A file in the way of a path below it is "nothing" to the oracle.
        assert there != "file", refused
        assert oracle(root, path) == there


async def answer(asked: Awaitable[object]) -> object:
    """What a call gave, or the refusal that it raised."""
    try:
        return await asked
    except (WorkspaceError, WorkspaceEscape) as refused:
        return refused


def content(root: Path, path: str) -> bytes:
    with open(os.fsencode(root) + b"/" + os.fsencode(path), "rb") as file:
        return file.read()


def test_control_the_oracle_tells_a_link_and_the_canary_can_be_reached_through_one(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "canary").write_bytes(CANARY)
    build(root, [("absolute", "l"), ("link", "a", ".."), ("hard", "b"), ("file", "c")])
    assert [oracle(root, path) for path in ("l", "a", "a/canary", "b", "c", "c/x", "no")] == [
        "link", "link", "link", "hard", "file", "nothing", "nothing",
    ]  # fmt: skip
    assert (root / "l").read_bytes() == CANARY
    assert (root / "a" / "canary").read_bytes() == CANARY


async def test_control_a_refusal_of_the_kernel_is_told_apart_from_nothing_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "l").symlink_to("/etc/passwd")
    async with open_local_workspace(tmp_path) as workspace:
        with pytest.raises(WorkspaceEscape):
            await workspace.read("l")
        with pytest.raises(WorkspaceError) as caught:
            await workspace.read("no")
    assert caught.value.code is WorkspaceCode.NOT_FOUND
