"""The semantics of the workspace port, the same for every mechanism (S1)."""

from pathlib import PurePosixPath

import pytest
from trio.testing import MockClock

from sbxd.port.errors import (
    ExecutionRejected,
    RejectedCode,
    SandboxEscapeSuspected,
    WorkspaceCode,
    WorkspaceError,
    WorkspaceEscape,
)
from sbxd.port.ids import TenantId
from sbxd.port.limits import MIB
from sbxd.port.workspace import WorkspaceProvenance
from tests.contract.subjects import LIMITS, Subject, with_handle

Clock = MockClock | None

ESCAPES = ["", "..", "../x", "a/../b", "./a", "a//b", "/etc/passwd", "a\0b", "x" * 256]
NAMES = ["plain", "sub/dir/file", "ünïcode", "bad-\udcff-bytes", "with space\nand line", "-rf"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_what_is_written_is_read_back(subject: Subject, clock: Clock, name: str) -> None:
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        await workspace.write(name, b"content \0\xff")
        assert await workspace.read(name) == b"content \0\xff"
        await workspace.write(name, b"")
        assert await workspace.read(name) == b""


async def test_a_file_larger_than_all_credit_is_read_back(subject: Subject, clock: Clock) -> None:
    content = bytes(range(256)) * (5 * MIB // 256)
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        await workspace.write("large", content)
        assert await workspace.read("large") == content


async def test_the_command_and_the_worker_see_the_same_files(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        await workspace.write("in", b"from the worker")
        result = await subject.run(handle, subject.commands.read_file("in"))
        assert result.stdout == b"from the worker"
        assert result.files_changed == ()
        await subject.run(handle, subject.commands.write_file("out", "from the command"))
        assert await workspace.read("out") == b"from the command"


async def test_provenance_tells_the_writer_and_unknown_for_the_rest(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        await workspace.write("tool", b"1")
        await subject.run(handle, subject.commands.write_file("sandbox", "2"))
        assert await workspace.provenance("tool") is WorkspaceProvenance.TOOL_WRITTEN
        assert await workspace.provenance("sandbox") is WorkspaceProvenance.SANDBOX_WRITTEN
        assert await workspace.provenance("never") is WorkspaceProvenance.UNKNOWN


async def test_a_command_that_rewrites_a_tools_file_makes_it_the_sandboxs(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        await workspace.write("file", b"1")
        await subject.run(handle, subject.commands.write_file("file", "2"))
        assert await workspace.provenance("file") is WorkspaceProvenance.SANDBOX_WRITTEN
        await workspace.write("file", b"3")
        assert await workspace.provenance("file") is WorkspaceProvenance.TOOL_WRITTEN


async def test_a_listing_names_the_entries_of_one_directory(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        await workspace.write("top", b"123")
        await workspace.write("sub/\udcff", b"12345")
        await workspace.write("sub/deep/er", b"")
        root = {entry.path: entry.size_bytes for entry in await workspace.listdir(".")}
        below = {entry.path: entry.size_bytes for entry in await workspace.listdir("sub")}
    assert set(root) == {"top", "sub"}
    assert root["top"] == 3
    assert set(below) == {"sub/\udcff", "sub/deep"}
    assert below["sub/\udcff"] == 5


@pytest.mark.parametrize("path", ESCAPES, ids=ascii)
async def test_a_path_that_leaves_the_workspace_is_an_escape_for_every_verb(
    subject: Subject, clock: Clock, path: str
) -> None:
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        with pytest.raises(WorkspaceEscape):
            workspace.resolve(path)
        with pytest.raises(WorkspaceEscape):
            await workspace.read(path)
        with pytest.raises(WorkspaceEscape):
            await workspace.write(path, b"")
        with pytest.raises(WorkspaceEscape):
            await workspace.listdir(path)
        with pytest.raises(WorkspaceEscape):
            await workspace.provenance(path)


async def test_resolve_gives_the_path_inside_the_environment(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        assert workspace.root == PurePosixPath("/workspace")
        assert workspace.resolve("a/b") == PurePosixPath("/workspace/a/b")
        assert workspace.resolve(".") == workspace.root


async def test_refusals_of_the_file_system_are_typed(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        await workspace.write("dir/file", b"x")

        async def refused(code: WorkspaceCode, verb: str, *arguments: object) -> None:
            with pytest.raises(WorkspaceError) as caught:
                await getattr(workspace, verb)(*arguments)
            assert caught.value.code is code

        await refused(WorkspaceCode.NOT_FOUND, "read", "missing")
        await refused(WorkspaceCode.IS_A_DIRECTORY, "read", "dir")
        await refused(WorkspaceCode.NOT_FOUND, "listdir", "missing")
        await refused(WorkspaceCode.NOT_A_DIRECTORY, "listdir", "dir/file")
        await refused(WorkspaceCode.IS_A_DIRECTORY, "write", "dir", b"")
        await refused(WorkspaceCode.NOT_A_DIRECTORY, "write", "dir/file/below", b"")
        assert await workspace.read("dir/file") == b"x"


async def test_a_write_that_does_not_fit_is_refused_and_leaves_the_old_file(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        workspace = subject.workspace(handle)
        await workspace.write("file", b"old")
        with pytest.raises(WorkspaceError) as caught:
            await workspace.write("file", bytes(LIMITS.workspace_bytes + MIB))
        assert caught.value.code is WorkspaceCode.NO_SPACE
        assert await workspace.read("file") == b"old"


async def test_a_handle_that_is_not_right_opens_no_file(subject: Subject, clock: Clock) -> None:
    handle = await subject.environment.provision(subject.specification())
    await subject.workspace(handle).write("file", b"x")
    with pytest.raises(SandboxEscapeSuspected):
        await subject.workspace(with_handle(handle, tenant_id=TenantId("other"))).read("file")
    with pytest.raises(ExecutionRejected) as caught:
        await subject.workspace(handle).read("file")
    assert caught.value.code is RejectedCode.ENVIRONMENT_GONE
