"""What only a plain directory can show: races, second names, and a kernel without openat2."""

import ctypes
import errno
import os
import socket
import threading
from pathlib import Path

import pytest
import trio

from sbxd.client import beneath
from sbxd.client.beneath import ContainmentUnavailable
from sbxd.client.local_workspace import LocalWorkspace, open_local_workspace
from sbxd.port.errors import WorkspaceCode, WorkspaceError, WorkspaceEscape
from sbxd.port.workspace import WorkspaceProvenance
from tests.artifacts.world import run

SWAPS = 3000


async def code_of(workspace: LocalWorkspace, path: str) -> WorkspaceCode:
    with pytest.raises(WorkspaceError) as caught:
        await workspace.read(path)
    return caught.value.code


@pytest.mark.case("FS-06")
async def test_what_is_no_file_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    (tmp_path / "device").symlink_to("/dev/zero")
    with trio.fail_after(60):
        async with open_local_workspace(tmp_path) as workspace:
            assert await code_of(workspace, "fifo") is WorkspaceCode.NOT_A_FILE
            assert await code_of(workspace, "socket") is WorkspaceCode.NOT_A_FILE
            with pytest.raises(WorkspaceEscape):
                await workspace.read("device")


@pytest.mark.case("EXP-02")
async def test_a_second_name_is_neither_read_nor_written(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "root"
    outside.write_text("a file of the host")
    inside.mkdir()
    os.link(outside, inside / "file")
    async with open_local_workspace(inside) as workspace:
        assert await code_of(workspace, "file") is WorkspaceCode.HARD_LINKED
        with pytest.raises(WorkspaceError):
            await workspace.write("file", b"mine")
        outside_text = outside.read_text()
        outside.unlink()
        assert await workspace.read("file") == b"a file of the host"
    assert outside_text == "a file of the host"


@pytest.mark.case("FS-08", "EXP-04")
@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite", "replace"])
async def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    data = bytes(1024 * 1024)
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "still").write_bytes(data)

    async def read() -> bytes:
        received = bytearray()
        async with workspace.read_stream("file", maximum_bytes=2**30) as content:
            async for piece in content:
                if not received:
                    alter(tmp_path / "file", change)
                received += piece
        return bytes(received)

    async with open_local_workspace(tmp_path) as workspace:
        assert await workspace.read("still") == data
        with pytest.raises(WorkspaceError) as caught:
            await read()
        assert caught.value.code is WorkspaceCode.CHANGED_DURING_READ


def alter(file: Path, change: str) -> None:
    match change:
        case "grow":
            with file.open("ab") as opened:
                opened.write(b"more")
        case "shrink":
            os.truncate(file, 10)
        case "rewrite":
            status = file.stat()
            with file.open("r+b") as opened:
                opened.seek(600_000)
                opened.write(b"changed")
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        case _:
            other = file.with_name("other")
            other.write_bytes(b"another file")
            other.rename(file)


@pytest.mark.case("FS-03")
def test_a_directory_that_turns_into_a_link_leads_nowhere(tmp_path: Path, backend: str) -> None:
    """A thread swaps a directory and a link to the outside under one name all the while."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (outside / "file").write_bytes(b"outside")
    (root / "real").mkdir(parents=True)
    (root / "real" / "file").write_bytes(b"inside")
    (root / "link").symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        one, other = os.fsencode(root / "real"), os.fsencode(root / "link")
        while not stop.is_set():
            libc.renameat2(-100, one, -100, other, 2)

    answers = {"inside": 0, "escape": 0, "other": 0}

    async def main() -> None:
        async with open_local_workspace(root) as workspace:
            for attempt in range(SWAPS):
                try:
                    if attempt % 2:
                        await workspace.write("real/new", b"new")
                    elif await workspace.read("real/file") == b"inside":
                        answers["inside"] += 1
                    else:
                        raise AssertionError("read outside")
                except WorkspaceEscape:
                    answers["escape"] += 1
                except WorkspaceError:
                    answers["other"] += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        run(backend, main)
    finally:
        stop.set()
        thread.join()
    assert sorted(os.listdir(outside)) == ["file"]
    assert (outside / "file").read_bytes() == b"outside"
    assert answers["inside"]
    assert answers["escape"]


@pytest.mark.case("FS-09")
async def test_what_another_writes_over_a_tools_file_is_unknown(tmp_path: Path) -> None:
    async with open_local_workspace(tmp_path) as workspace:
        for change in ("rewrite in place", "rename over", "remove"):
            await workspace.write("file", b"by a tool")
            assert await workspace.provenance("file") is WorkspaceProvenance.TOOL_WRITTEN
            if change == "rewrite in place":
                (tmp_path / "file").write_bytes(b"by a user")
            elif change == "rename over":
                (tmp_path / "new").write_bytes(b"by a tool")
                (tmp_path / "new").rename(tmp_path / "file")
            else:
                (tmp_path / "file").unlink()
            assert await workspace.provenance("file") is WorkspaceProvenance.UNKNOWN
        (tmp_path / "link").symlink_to("file")
        assert await workspace.provenance("link") is WorkspaceProvenance.UNKNOWN


async def test_the_record_dies_with_the_workspace(tmp_path: Path) -> None:
    async with open_local_workspace(tmp_path) as workspace:
        await workspace.write("file", b"x")
    async with open_local_workspace(tmp_path) as workspace:
        assert await workspace.provenance("file") is WorkspaceProvenance.UNKNOWN


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
async def test_without_openat2_no_directory_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The kernel's answer, and that of a filter of system calls, in openat2's place."""

    class Without:
        def syscall(self, *arguments: object) -> int:
            ctypes.set_errno(number)
            return -1

    async with open_local_workspace(tmp_path):
        pass  # the positive control
    monkeypatch.setattr(beneath, "_LIBC", Without())
    with pytest.raises(ContainmentUnavailable, match="openat2"):
        async with open_local_workspace(tmp_path):
            pass


async def test_replacing_keeps_the_mode_and_leaves_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("old")
    (tmp_path / "script").chmod(0o755)
    async with open_local_workspace(tmp_path) as workspace:
        await workspace.write("script", b"new")
        await workspace.write("d/e/file", b"")
    assert os.listdir(tmp_path / "d" / "e") == ["file"]
    assert (tmp_path / "script").stat().st_mode & 0o777 == 0o755
    assert sorted(os.listdir(tmp_path)) == ["d", "script"]


async def test_a_directory_of_the_write_that_is_moved_out_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening of the parent and the rename, the parent leaves the workspace."""
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    rename = os.rename

    def moving(old: object, new: object, **keywords: int) -> None:
        if (root / "d").exists():
            rename(root / "d", tmp_path / "gone")
        rename(old, new, **keywords)  # type: ignore[arg-type]

    async with open_local_workspace(root) as workspace:
        monkeypatch.setattr(os, "rename", moving)
        with pytest.raises(WorkspaceError) as caught:
            await workspace.write("d/file", b"x")
    assert caught.value.code is WorkspaceCode.REFUSED
    assert os.listdir(tmp_path / "gone") == []
    assert os.listdir(root) == []
