"""`sbxctl shell` and `sbxctl cp`, as programs, against a daemon over in-memory environments."""

import hashlib
import json
import os
import re
import signal
from pathlib import Path

from sbxctl.exits import Exit
from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.fake.script import Invocation, Outcome, Script
from sbxd.port.command import KillReason
from tests.service.fake_socket import SocketDaemon, socket_daemon
from tests.service.on_terminal import on_terminal
from tests.service.requests import SPECIFICATION

PROMPT = b"\x1b[1;7m/workspace$\x1b[0m "
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


async def typed(daemon: SocketDaemon, lines: str, *arguments: str) -> tuple[int, str]:
    """The exit code of a shell that is typed at, and what was seen but for the prompts."""
    given = arguments or IMAGE
    async with on_terminal("shell", *given, socket=daemon.path) as terminal:
        await terminal.until(PROMPT)
        await terminal.type(lines + "\x04")
        code = await terminal.end()
    seen = re.sub(rb"\x1b\[[0-9;]*m", b"", terminal.seen.split(PROMPT, 1)[1])
    return code, re.sub(rb"(?m)^((/workspace[a-z/]*\$|>) )+", b"", seen).decode()


async def test_each_line_is_a_command_and_the_last_ones_code_is_the_shells(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        code, seen = await typed(daemon, "one\n\n  two | three\nexit-with 7\n")
        left = await daemon.sbxctl("ls", "--json")
    assert (code, seen) == (7, "ran one\nran   two | three\nexit code 7\n\n")
    assert json.loads(left.stdout) == []


async def test_a_command_may_have_several_lines(tmp_path: Path) -> None:
    document = "cat <<EOF\nrm -rf one\ncd two\nEOF"
    loop = "for each in a b\ndo\n echo 'it\ngoes on'\ndone"
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        code, seen = await typed(daemon, f"{document}\n{loop}\n")
        _, unended = await typed(daemon, "echo 'open\n\x04")
    assert seen == f"ran {document}\nran {loop}\n\n"
    assert code == 0
    assert unended == "\nran echo 'open\n\n", "at the end of the input sh says what is missing"


async def test_exit_ends_it_and_may_name_a_code(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        assert await typed(daemon, "exit 3\nnever\n") == (3, "")
        assert (await typed(daemon, "exit-with 4\nexit\nnever\n"))[0] == 4
        assert (await typed(daemon, "exit-with 4\nexit \u0663\nnever\n"))[0] == 4


async def test_the_directory_stays_from_line_to_line_and_in_the_workspace(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        code, seen = await typed(
            daemon,
            "write a/b/file\ncd a/b\nwhere\ncd ..\nwhere\ncd ../../../etc\nwhere\ncd\nwhere\n",
        )
    said = "sbxctl: cd: /etc is outside the workspace\n"
    assert seen == f"/workspace/a/b\n/workspace/a\n{said}/workspace/a\n/workspace\n\n"
    assert code == 0


async def test_a_kill_is_named_and_the_loop_goes_on(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        code, seen = await typed(daemon, "oom\nafter\n")
    assert (code, seen) == (0, "killed: MEMORY\nran after\n\n")


async def test_an_environment_that_has_expired_ends_the_loop(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        code, seen = await typed(daemon, "expire\nafter\n")
    assert (code, seen) == (Exit.EXPIRED, "killed: EXPIRED\n")


async def test_a_live_environment_stays_and_has_its_limits_already(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        assert await typed(daemon, "one\n", handle.environment_id) == (0, "ran one\n\n")
        refused = await daemon.sbxctl("shell", "--memory", "64M", handle.environment_id)
        beyond = await daemon.sbxctl("shell", "--timeout", "86400", handle.environment_id)
        listed = await daemon.sbxctl("ls", "--json")
    assert refused.code == Exit.USAGE
    assert beyond.code == Exit.REJECTED
    assert "--timeout 86400: a command of this environment has" in beyond.stderr
    assert [each["handle"]["environment_id"] for each in json.loads(listed.stdout)] == [
        handle.environment_id
    ]


async def test_an_interrupt_cancels_the_command_and_not_the_shell(tmp_path: Path) -> None:
    async with (
        socket_daemon(SCRIPT, tmp_path) as daemon,
        on_terminal("shell", *IMAGE, socket=daemon.path) as terminal,
    ):
        at = await terminal.until(PROMPT)
        await terminal.type("forever\n")
        at = await terminal.until(b"partial\n", after=at)
        os.kill(terminal.process.pid, signal.SIGINT)
        at = await terminal.until(b"killed: CANCELLED", after=at)
        await terminal.type("after\n")
        at = await terminal.until(b"ran after\n", after=at)
        at = await terminal.until(PROMPT, after=at)
        await terminal.type("echo 'never ended\n")
        at = await terminal.until(b"\x1b[1;7m>", after=at)
        os.kill(terminal.process.pid, signal.SIGINT)
        at = await terminal.until(b"Ctrl-D", after=at)
        await terminal.type("again\n\x04")
        await terminal.until(b"ran again\n", after=at)
        assert await terminal.end() == 0


async def test_a_pipe_is_one_script_for_one_sh(tmp_path: Path) -> None:
    """What the script means is then sh's to say, to the last byte."""
    seen = []

    def one_sh(call: Invocation) -> Outcome:
        seen.append((call.argv, call.working_directory))
        return Outcome(stdout=call.stdin, exit_code=9)

    script = b"cd a\ncat <<EOF\nrm -rf x\nexit 3\nEOF\nexit 4\n\xff"
    async with socket_daemon(Script(by_program={"sh": one_sh}), tmp_path) as daemon:
        ran = await daemon.sbxctl("shell", *IMAGE, stdin=script)
        nothing = await daemon.sbxctl("shell", *IMAGE, stdin=b"\n")
    assert (ran.code, ran.stdout) == (9, script)
    assert seen == [(("sh",), "/workspace")]
    assert (nothing.code, nothing.stdout) == (0, b"")


async def test_a_script_that_is_killed_has_the_kills_code(tmp_path: Path) -> None:
    killed = Script(by_program={"sh": Outcome(stdout=b"x", killed_by=KillReason.MEMORY)})
    async with socket_daemon(killed, tmp_path) as daemon:
        ran = await daemon.sbxctl("shell", *IMAGE, stdin=b"x\ny\n")
    assert (ran.code, ran.stdout) == (Exit.MEMORY, b"x")
    assert ran.stderr == "killed: MEMORY\n"


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
