"""`sbxctl shell` and `sbxctl cp`, as programs, against a daemon over in-memory environments."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import trio

from sbxctl.exits import Exit
from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.fake.script import Invocation, Outcome, Script
from sbxd.port.command import KillReason
from tests.service.fake_socket import CLIENT_SECONDS, SocketDaemon, socket_daemon
from tests.service.requests import SPECIFICATION

IMAGE = ("--image", "sha256:" + "a" * 64)


def _sh(call: Invocation) -> Outcome:
    line = call.argv[2]
    if line.startswith("write "):
        return Outcome(writes={line.split()[1]: b"text"})
    if line == "where":
        return Outcome(stdout=f"{call.working_directory}\n".encode())
    if line.startswith("exit-with "):
        return Outcome(exit_code=int(line.split()[1]))
    if line == "forever":
        return Outcome(stdout=b"partial\n", sleep_seconds=float("inf"))
    if line == "oom":
        return Outcome(killed_by=KillReason.MEMORY)
    if line == "expire":
        return Outcome(killed_by=KillReason.EXPIRED)
    return Outcome(stdout=f"ran {line}\n".encode())


SCRIPT = Script(by_program={"sh": _sh, "true": Outcome()})


async def shell(daemon: SocketDaemon, lines: str, *arguments: str) -> tuple[int, str, str]:
    given = arguments or IMAGE
    ran = await daemon.sbxctl("shell", *given, stdin=lines.encode())
    return ran.code, ran.stdout.decode(), ran.stderr


async def test_each_line_is_a_command_and_the_last_ones_code_is_the_shells(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        code, out, _ = await shell(daemon, "one\n\n  two | three\nexit-with 7\n")
        left = await daemon.sbxctl("ls", "--json")
    assert (code, out) == (7, "ran one\nran   two | three\n")
    assert json.loads(left.stdout) == []


async def test_exit_ends_it_and_may_name_a_code(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        assert (await shell(daemon, "exit 3\nnever\n"))[:2] == (3, "")
        assert (await shell(daemon, "exit-with 4\nexit\nnever\n"))[:2] == (4, "")


async def test_the_directory_stays_from_line_to_line_and_in_the_workspace(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        code, out, err = await shell(
            daemon,
            "write a/b/file\ncd a/b\nwhere\ncd ..\nwhere\ncd ../../../etc\nwhere\ncd\nwhere\n",
        )
    assert out == "/workspace/a/b\n/workspace/a\n/workspace/a\n/workspace\n"
    assert "cd: /etc is outside the workspace" in err
    assert code == 0


async def test_a_kill_is_named_and_the_loop_goes_on(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        code, out, err = await shell(daemon, "oom\nafter\n")
    assert "killed: MEMORY" in err
    assert (code, out) == (0, "ran after\n")


async def test_an_environment_that_has_expired_ends_the_loop(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        code, out, _ = await shell(daemon, "expire\nafter\n")
    assert (code, out) == (Exit.EXPIRED, "")


async def test_a_live_environment_stays_and_has_its_limits_already(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        code, out, _ = await shell(daemon, "one\n", handle.environment_id)
        assert (code, out) == (0, "ran one\n")
        refused = await shell(daemon, "", "--memory", "64M", handle.environment_id)
        listed = await daemon.sbxctl("ls", "--json")
    assert refused[0] == Exit.USAGE
    assert [each["handle"]["environment_id"] for each in json.loads(listed.stdout)] == [
        handle.environment_id
    ]


async def test_an_interrupt_cancels_the_command_and_not_the_shell(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        words = [sys.executable, "-m", "sbxctl", "--socket", str(daemon.path), "shell", *IMAGE]
        with trio.fail_after(CLIENT_SECONDS):
            async with trio.open_nursery() as nursery:
                started = partial(
                    trio.run_process,
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    check=False,
                )
                process: trio.Process = await nursery.start(started)
                assert process.stdin
                assert process.stdout
                assert process.stderr
                await process.stdin.send_all(b"forever\n")
                assert await process.stdout.receive_some() == b"partial\n"
                os.kill(process.pid, signal.SIGINT)
                assert b"killed: CANCELLED" in await process.stderr.receive_some()
                await process.stdin.send_all(b"after\n")
                assert await process.stdout.receive_some() == b"ran after\n"
                await process.stdin.aclose()
    assert process.returncode == 0


# --- cp ----------------------------------------------------------------------------------------


async def test_a_file_goes_in_and_comes_out_again(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "data.bin").write_bytes(content)
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        inside = handle.environment_id
        put = await daemon.sbxctl("cp", str(tmp_path / "data.bin"), f"{inside}:in/")
        got = await daemon.sbxctl("cp", "--json", f"{inside}:in/data.bin", str(tmp_path / "out"))
        (tmp_path / "folder").mkdir()
        kept = await daemon.sbxctl("cp", f"{inside}:in/data.bin", f"{tmp_path}/folder")
    assert (put.code, put.stdout, put.stderr) == (0, b"", "")
    assert kept.code == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "folder/data.bin").read_bytes() == content
    document = json.loads(got.stdout)
    assert document["size_bytes"] == len(content)
    assert document["sha256"] == hashlib.sha256(content).hexdigest()


async def test_what_cannot_be_copied_leaves_everything_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    mine = str(tmp_path / "mine")
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        inside = handle.environment_id
        missing = await daemon.sbxctl("cp", f"{inside}:missing", mine)
        outside = await daemon.sbxctl("cp", mine, f"{inside}:../../etc/x")
        gone = await daemon.sbxctl("cp", mine, f"{'0' * 32}:x")
        two = await daemon.sbxctl("cp", f"{inside}:a", f"{inside}:b")
        none = await daemon.sbxctl("cp", mine, "b")
        no_file = await daemon.sbxctl("cp", "/no/such/file", f"{inside}:b")
    assert (missing.code, outside.code) == (Exit.WORKSPACE, Exit.WORKSPACE)
    assert gone.code == Exit.REJECTED
    assert {two.code, none.code, no_file.code} == {Exit.USAGE}
    assert (tmp_path / "mine").read_text() == "mine"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
