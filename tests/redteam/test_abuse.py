"""What a command does to its own environment: the next command, the service and the end still work.

Source: DESIGN 3.1, 3.2, CASES Part 2 numbers 3, 5, 12, 20, LIF-08, API-13.
"""

from contextlib import suppress
from pathlib import Path

import pytest
import trio

from sbxd.port.command import KillReason
from sbxd.port.errors import (
    ExecutionRejected,
    PortError,
    RejectedCode,
    WorkspaceCode,
    WorkspaceError,
)
from sbxd.port.limits import MIB
from tests.pacing import next_look
from tests.redteam.live import Live, admin, live, wait_process_on_the_host

pytestmark = [pytest.mark.needs("daemon"), pytest.mark.also("uml")]


async def works(environment: Live) -> None:
    """The environment runs a command and gives its output."""
    result = await environment.run("echo", "works")
    assert (result.exit_code, result.stdout) == (0, b"works\n"), result


async def test_a_kill_of_everything_reaches_only_the_own_processes() -> None:
    async with live() as environment:
        result = await environment.python(
            "import os, subprocess, time\n"
            "child = subprocess.Popen(['sleep', '600'])\n"
            "os.kill(-1, 9)\n"
            "print(child.wait())"
        )
        assert result.stdout == b"-9\n", "the control: the own child was reached"
        await works(environment)


@pytest.mark.case("RES-12")
async def test_stopped_processes_are_ended_by_the_timeout() -> None:
    async with live() as environment:
        result = await environment.run(
            "sh",
            "-c",
            "sleep 600 & kill -STOP $!; kill -STOP $$; echo not reached",
            timeout_seconds=2,
        )
        assert (result.killed_by, result.stdout) == (KillReason.TIMEOUT, b"")
        await works(environment)


@pytest.mark.case("RES-12")
async def test_a_process_that_waits_uninterruptibly_is_ended_by_the_timeout() -> None:
    """The parent of a vfork waits so until its child is gone or is another program."""
    marker = "waits-for-its-vfork"
    source = f"""
import ctypes, time
if ctypes.CDLL(None).syscall(58) == 0:
    time.sleep(600)  # {marker}
"""
    states: list[str] = []
    async with live() as environment:

        async def look() -> None:
            await wait_process_on_the_host(marker)
            with trio.fail_after(20):
                while "D" not in states:
                    await next_look()
                    states.extend(_states_in(environment.handle.environment_id))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            result = await environment.run("python3", "-c", source, marker, timeout_seconds=8)
        assert result.killed_by is KillReason.TIMEOUT
        await works(environment)
    assert "D" in states, "the control: it did wait so"


def _states_in(environment_id: str) -> list[str]:
    """The states of the processes of an environment's commands, as the host's kernel tells."""
    scope = Path(f"/sys/fs/cgroup/sbx.slice/sbx-{environment_id}.scope")
    states = []
    for file in scope.glob("box/exec-*/cgroup.procs"):
        with suppress(OSError):
            for pid in file.read_text().split():
                stat = Path(f"/proc/{pid}/stat").read_text()
                states.append(stat.rpartition(") ")[2].split()[0])
    return states


async def test_closing_all_streams_neither_ends_nor_hangs_the_command() -> None:
    async with live() as environment:
        closed = await environment.run("sh", "-c", "exec 0<&- 1>&- 2>&-; sleep 1; exit 4")
        aborted = await environment.python("import os; os.closerange(0, 3); os.abort()")
        assert (closed.exit_code, closed.killed_by) == (4, None)
        assert (aborted.exit_code, aborted.signal) == (134, 6)
        await works(environment)


async def test_input_that_nobody_reads_is_no_error() -> None:
    async with live() as environment:
        for argv in (("true",), ("sh", "-c", "exec 0<&-; sleep 1")):
            result = await environment.run(*argv, stdin=b"x" * (20 * MIB))
            assert result.exit_code == 0
        counted = await environment.run("wc", "-c", stdin=b"x" * (20 * MIB))
        assert counted.stdout.split() == [b"20971520"], "the control: one that reads gets all"


@pytest.mark.parametrize("mode", ["000", "077", "600"])
async def test_a_workspace_that_a_command_closed_is_open_to_the_next(mode: str) -> None:
    async with live() as environment:
        await environment.workspace.write("note", b"kept")
        assert (await environment.run("chmod", mode, "/workspace")).exit_code == 0
        assert await environment.workspace.read("note") == b"kept"
        await works(environment)
        seen = await environment.run("sh", "-c", "stat -c %a . && cat note")
        assert seen.stdout == f"{int(mode, 8) | 0o700:o}\nkept".encode()


async def test_another_directory_that_is_closed_is_a_refusal_and_stays_closed() -> None:
    async with live() as environment:
        await environment.run("sh", "-c", "mkdir closed open && chmod 000 closed")
        with pytest.raises(ExecutionRejected) as refused:
            await environment.run("true", directory="closed")
        assert refused.value.code is RejectedCode.WORKING_DIRECTORY_NOT_FOUND
        assert "may be entered" in refused.value.detail
        assert (await environment.run("true", directory="open")).exit_code == 0
        assert (await environment.run("stat", "-c", "%a", "closed")).stdout == b"0\n"


@pytest.mark.case("RES-04")
@pytest.mark.parametrize(
    "fill",
    [
        "n = 0\nwhile True:\n    open(f'f{n}', 'w').close(); n += 1",
        "f = open('big', 'wb', 0)\nwhile True: f.write(bytes(1 << 20))",
    ],
    ids=["inodes", "bytes"],
)
async def test_a_full_workspace_refuses_writes_by_name_and_can_be_emptied(fill: str) -> None:
    async with live() as environment:
        await environment.python(fill)
        with pytest.raises(WorkspaceError) as full:
            await environment.workspace.write("tool", b"x" * 100_000)
        assert full.value.code is WorkspaceCode.NO_SPACE
        await works(environment)
        await environment.run("sh", "-c", "find . -mindepth 1 -delete")
        await environment.workspace.write("tool", b"x" * 100_000)


async def test_a_path_longer_than_any_call_takes_is_counted_as_truncated() -> None:
    source = "import os\nfor _ in range(60):\n    os.mkdir('d' * 250); os.chdir('d' * 250)\n"
    async with live() as environment:
        deep = await environment.python(source + "open('leaf', 'w').write('x')")
        shallow = await environment.run("sh", "-c", "printf x > leaf")
        await environment.run("rm", "-rf", "d" * 250)
        after = await environment.run("sh", "-c", "printf xy > leaf")
    assert deep.files_changed_truncated
    assert all(len(change.path) <= 4096 for change in deep.files_changed)
    assert shallow.files_changed_truncated, "what is too deep to be named is not compared"
    assert [change.path for change in shallow.files_changed] == ["leaf"]
    assert not after.files_changed_truncated
    assert [change.path for change in after.files_changed] == ["leaf"]


@pytest.mark.case("RES-01")
@pytest.mark.case("LIF-08")
async def test_destroying_in_the_middle_of_a_fork_bomb_ends_it_and_answers_once() -> None:
    ends: list[object] = []
    async with live() as environment:

        async def bomb() -> None:
            source = "import os\nprint('up', flush=True)\nopen('up', 'w').close()\nwhile True:\n"
            try:
                ends.append(
                    await environment.python(
                        source + "    try: os.fork()\n    except OSError: pass"
                    )
                )
            except PortError as error:
                ends.append(error)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bomb)
                while not await environment.workspace.listdir("."):
                    await next_look()
                await environment.remote.destroy(environment.handle)
        await environment.remote.destroy(environment.handle)
        async with admin() as client:
            assert (await client.describe()).environments == 0
    assert len(ends) == 1
