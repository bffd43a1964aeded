"""What one command does and what is reported of it, the same for every mechanism (S1).

Nothing here is about isolation: that is the gates' and the red team's.
"""

import pytest
from trio.testing import MockClock

from sbxd.policy import child_environment
from sbxd.port.command import ChangeKind, FileChange, KillReason
from sbxd.port.errors import (
    ExecutionRejected,
    RejectedCode,
)
from sbxd.port.limits import MIB
from sbxd.wire.messages import OutputStream
from tests.contract.subjects import LIMITS, Subject, created, sha256

Clock = MockClock | None

SIGTERM = 15
SIGSEGV = 11


# --- execute: output and ends -----------------------------------------------------------------


async def test_output_and_exit_code_are_the_commands_own(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        argv = subject.commands.write(stdout="hello\n", stderr="oh\n", exit_code=3)
        result = await subject.run(handle, argv)
    assert result.stdout == b"hello\n"
    assert result.stderr == b"oh\n"
    assert result.exit_code == 3
    assert result.killed_by is None
    assert result.signal is None
    assert not result.timed_out
    assert not result.stdout_truncated
    assert not result.stderr_truncated
    assert result.files_changed == ()
    assert result.duration_ms >= 0


async def test_output_is_told_while_the_command_runs(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        await subject.run(handle, subject.commands.write(stdout="out", stderr="err"))
    assert subject.told.of(OutputStream.STDOUT) == b"out"
    assert subject.told.of(OutputStream.STDERR) == b"err"


@pytest.mark.parametrize("signal", [SIGTERM, SIGSEGV])
async def test_a_command_that_dies_of_a_signal_is_no_kill(
    subject: Subject, clock: Clock, signal: int
) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.die_of(signal))
    assert result.signal == signal
    assert result.exit_code == 128 + signal
    assert result.killed_by is None


async def test_an_exit_code_above_128_is_no_signal(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.write(exit_code=137))
    assert result.exit_code == 137
    assert result.signal is None


async def test_a_timeout_sets_both_flags_and_keeps_the_output(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        argv = subject.commands.write_then_sleep("before", 3000)
        result = await subject.run(handle, argv, timeout_seconds=3)
        assert result.timed_out
        assert result.killed_by is KillReason.TIMEOUT
        assert result.exit_code is None
        assert result.signal is None
        assert result.stdout == b"before"
        assert result.duration_ms >= 3000
        assert result.evidence.effective_timeout_ms == 3000
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_a_command_that_ends_in_time_is_not_timed_out(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        argv = subject.commands.write_then_sleep("x", 0.1)
        result = await subject.run(handle, argv, timeout_seconds=20)
    assert result.exit_code == 0
    assert not result.timed_out


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output_beyond_the_cap_kills_and_sets_that_streams_flag(
    subject: Subject, clock: Clock, stream: str
) -> None:
    async with subject.provisioned() as handle:
        argv = subject.commands.write_bytes(3 * MIB, stream=stream)
        result = await subject.run(handle, argv, maximum_output_bytes=2 * MIB)
    assert result.killed_by is KillReason.OUTPUT_LIMIT
    assert result.exit_code is None
    assert not result.timed_out
    assert result.stdout_truncated == (stream == "stdout")
    assert result.stderr_truncated == (stream == "stderr")
    assert len(result.stdout if stream == "stdout" else result.stderr) == 2 * MIB


async def test_output_of_exactly_the_cap_is_whole(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        argv = subject.commands.write_bytes(2 * MIB)
        result = await subject.run(handle, argv, maximum_output_bytes=2 * MIB)
    assert result.killed_by is None
    assert result.exit_code == 0
    assert len(result.stdout) == 2 * MIB
    assert not result.stdout_truncated


# --- execute: what goes in --------------------------------------------------------------------


@pytest.mark.parametrize("stdin", [None, b""])
async def test_no_stdin_is_an_immediate_end_of_file(
    subject: Subject, clock: Clock, stdin: bytes | None
) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.count_stdin(), stdin=stdin)
    assert result.stdout == b"0"


async def test_stdin_reaches_the_command(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.echo_stdin(), stdin=b"a\0\xff")
    assert result.stdout == b"a\0\xff"


async def test_stdin_and_output_larger_than_any_pipe_do_not_deadlock(
    subject: Subject, clock: Clock
) -> None:
    stdin = bytes(range(256)) * (3 * MIB // 256)
    async with subject.provisioned() as handle:
        result = await subject.run(
            handle, subject.commands.echo_stdin(), stdin=stdin, maximum_output_bytes=4 * MIB
        )
    assert result.stdout == stdin


async def test_stdin_that_nobody_reads_is_no_error(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.write(stdout="done"), stdin=b"x" * MIB)
    assert result.exit_code == 0
    assert result.stdout == b"done"


async def test_arguments_arrive_byte_for_byte(subject: Subject, clock: Clock) -> None:
    arguments = ("", "two words", "$HOME `x` 'q'", "\n", "ü", "\udcff\udcfe")
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.print_arguments(*arguments))
    assert result.stdout == b"\0".join(a.encode("utf-8", "surrogateescape") for a in arguments)


async def test_the_process_environment_is_exactly_what_is_built(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.print_environment())
    found = dict(pair.split("=", 1) for pair in result.stdout.decode().split("\0") if pair)
    assert found == child_environment.build({}, ())


async def test_the_working_directory_is_the_workspace_or_below_it(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        await subject.run(handle, subject.commands.write_file("sub/dir/file", ""))
        root = await subject.run(handle, subject.commands.print_directory())
        below = await subject.run(
            handle, subject.commands.print_directory(), working_directory="sub/dir"
        )
    assert root.stdout == b"/workspace"
    assert below.stdout == b"/workspace/sub/dir"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ((), RejectedCode.INVALID_COMMAND),
        (("",), RejectedCode.INVALID_COMMAND),
        (("true", "a\0b"), RejectedCode.INVALID_COMMAND),
        (("./script",), RejectedCode.INVALID_COMMAND),
        (("sub/script",), RejectedCode.INVALID_COMMAND),
        (("true", "x" * (64 * 1024 + 1)), RejectedCode.INVALID_COMMAND),
        (("no-such-program-anywhere",), RejectedCode.COMMAND_NOT_FOUND),
        (("/no/such/program",), RejectedCode.COMMAND_NOT_FOUND),
    ],
    ids=["empty", "blank", "NUL", "dot", "relative", "long", "unknown name", "unknown path"],
)
async def test_a_bad_argv_is_a_typed_refusal_and_the_environment_lives(
    subject: Subject, clock: Clock, argv: tuple[str, ...], code: RejectedCode
) -> None:
    async with subject.provisioned() as handle:
        with pytest.raises(ExecutionRejected) as caught:
            await subject.run(handle, argv)
        assert caught.value.code is code
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_a_program_in_the_workspace_does_not_shadow_the_images(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        await subject.workspace(handle).write("no-such-program-anywhere", b"#!/bin/sh\n")
        with pytest.raises(ExecutionRejected) as caught:
            await subject.run(handle, ("no-such-program-anywhere",))
    assert caught.value.code is RejectedCode.COMMAND_NOT_FOUND


@pytest.mark.parametrize(
    ("directory", "code"),
    [
        ("missing", RejectedCode.WORKING_DIRECTORY_NOT_FOUND),
        ("file", RejectedCode.WORKING_DIRECTORY_NOT_FOUND),
        ("..", RejectedCode.INVALID_COMMAND),
        ("/tmp", RejectedCode.INVALID_COMMAND),
        ("a/../b", RejectedCode.INVALID_COMMAND),
        ("", RejectedCode.INVALID_COMMAND),
    ],
)
async def test_a_bad_working_directory_is_a_typed_refusal(
    subject: Subject, clock: Clock, directory: str, code: RejectedCode
) -> None:
    async with subject.provisioned() as handle:
        await subject.workspace(handle).write("file", b"")
        with pytest.raises(ExecutionRejected) as caught:
            await subject.run(handle, subject.commands.write(), working_directory=directory)
    assert caught.value.code is code
    assert caught.value.field == "working_directory"


# --- execute: what comes of the workspace -----------------------------------------------------


async def test_files_changed_reports_what_a_command_did_and_not_what_was_there(
    subject: Subject, clock: Clock
) -> None:
    commands = subject.commands
    async with subject.provisioned() as handle:
        for name in ("kept", "modified", "deleted"):
            await subject.run(handle, commands.write_file(name, name))
        result = await subject.run(
            handle, commands.change_files(create="new", modify="modified", delete="deleted")
        )
        nothing = await subject.run(handle, commands.write())
    assert {change.path: change for change in result.files_changed} == {
        "new": created("new", "created"),
        "modified": FileChange(
            path="modified",
            change=ChangeKind.MODIFIED,
            size_bytes=len("modified-modified"),
            sha256=sha256("modified-modified"),
        ),
        "deleted": FileChange(
            path="deleted", change=ChangeKind.DELETED, size_bytes=len("deleted"), sha256=None
        ),
    }
    assert not result.files_changed_truncated
    assert nothing.files_changed == ()


async def test_a_created_directory_is_a_change_without_a_digest(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.write_file("a/b", "x"))
    changes = {change.path: change for change in result.files_changed}
    assert set(changes) == {"a", "a/b"}
    assert changes["a"].change is ChangeKind.CREATED
    assert changes["a"].sha256 is None
    assert changes["a/b"] == created("a/b", "x")


async def test_a_name_that_is_not_utf_8_comes_back_as_it_is(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.write_file("b\udcffd", "x"))
    assert result.files_changed == (created("b\udcffd", "x"),)


async def test_too_many_changes_are_cut_and_flagged(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.write_files(1001))
    assert result.exit_code == 0
    assert result.files_changed_truncated
    assert len(result.files_changed) == 1000


async def test_what_a_killed_command_wrote_is_reported(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        await subject.run(handle, subject.commands.write_file("before", "1"))
        result = await subject.run(
            handle, subject.commands.write_bytes(3 * MIB), maximum_output_bytes=MIB
        )
        after = await subject.run(handle, subject.commands.read_file("before"))
    assert result.killed_by is KillReason.OUTPUT_LIMIT
    assert result.files_changed == ()
    assert after.stdout == b"1"


async def test_more_files_than_the_volume_takes_is_disk(subject: Subject, clock: Clock) -> None:
    async with subject.provisioned() as handle:
        result = await subject.run(handle, subject.commands.write_files(LIMITS.inodes_max + 100))
        after = await subject.run(handle, subject.commands.write(stdout="alive"))
    assert result.killed_by is KillReason.DISK
    assert result.exit_code is None
    assert result.evidence.workspace_inodes_left == 0
    assert result.evidence.workspace_bytes_left is not None
    assert result.evidence.workspace_bytes_left > 0
    assert after.stdout == b"alive"
