"""The semantics of the workspace port, the same for every mechanism (S1)."""

import pytest
from trio.testing import MockClock

from sbxd.port.errors import (
    ExecutionRejected,
    RejectedCode,
    SandboxEscapeSuspected,
)
from sbxd.port.ids import TenantId
from sbxd.port.workspace import WorkspaceProvenance
from tests.contract.subjects import Subject, with_handle

Clock = MockClock | None


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


async def test_a_handle_that_is_not_right_opens_no_file(subject: Subject, clock: Clock) -> None:
    handle = await subject.environment.provision(subject.specification())
    await subject.workspace(handle).write("file", b"x")
    with pytest.raises(SandboxEscapeSuspected):
        await subject.workspace(with_handle(handle, tenant_id=TenantId("other"))).read("file")
    with pytest.raises(ExecutionRejected) as caught:
        await subject.workspace(handle).read("file")
    assert caught.value.code is RejectedCode.ENVIRONMENT_GONE
