"""sbxctl as a program, against a daemon over in-memory environments behind a real socket."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sbxctl.__main__ import main
from sbxctl.exits import Exit, of_kill
from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.fake.script import Invocation, Outcome, Script
from sbxd.port.command import KillReason
from tests.service.fake_socket import sbxctl, socket_daemon
from tests.service.requests import SPECIFICATION

IMAGE = ("--image", "sha256:" + "a" * 64)
BYTES = b"\x00\xff\x1b[2J line\r\n" + bytes(range(256))


def _environment(call: Invocation) -> Outcome:
    return Outcome(stdout=json.dumps(dict(call.environment)).encode())


def _killed(call: Invocation) -> Outcome:
    return Outcome(stdout=b"partial", killed_by=KillReason(call.argv[1]))


SCRIPT = Script(
    by_program={
        "true": Outcome(),
        "bytes": Outcome(stdout=BYTES, stderr=b"to stderr\n"),
        "exit": lambda call: Outcome(exit_code=int(call.argv[1])),
        "die": lambda call: Outcome(signal=int(call.argv[1])),
        "kill": _killed,
        "cat": lambda call: Outcome(stdout=call.stdin),
        "file": lambda call: Outcome(stdout=call.files[call.argv[1]]),
        "write": lambda call: Outcome(writes={call.argv[1]: call.argv[2].encode()}),
        "where": lambda call: Outcome(stdout=call.working_directory.encode()),
        "environment": _environment,
    }
)


# --- run ---------------------------------------------------------------------------------------


async def test_output_goes_out_unchanged_and_the_report_to_stderr(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("run", *IMAGE, "--", "bytes")
    assert (ran.code, ran.stdout) == (0, BYTES)
    assert ran.stderr.startswith("to stderr\n")
    assert "exit code 0" in ran.stderr


async def test_another_mechanism_than_the_daemons_is_refused_and_nothing_runs(
    tmp_path: Path,
) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        refused = await daemon.sbxctl("run", "--mechanism=gvisor", *IMAGE, "--", "bytes")
        own = await daemon.sbxctl("run", "--mechanism=fake", *IMAGE, "--", "bytes")
        none = await daemon.sbxctl("run", "--mechanism=docker", *IMAGE, "--", "bytes")
    assert (refused.code, refused.stdout) == (Exit.REJECTED, b"")
    assert "this daemon runs fake, not gvisor" in refused.stderr
    assert 'set sandbox = "gvisor"' in refused.stderr
    assert (own.code, own.stdout) == (0, BYTES), "the control: the daemon's own"
    assert none.code == Exit.USAGE


@pytest.mark.parametrize("code", [0, 7, 230, 255])
async def test_the_commands_own_exit_code_is_passed_through(tmp_path: Path, code: int) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        assert (await daemon.sbxctl("run", *IMAGE, "exit", str(code))).code == code


async def test_a_death_by_a_signal_is_128_and_its_number(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("run", *IMAGE, "die", "11")
    assert ran.code == 139
    assert "died of signal 11" in ran.stderr


@pytest.mark.parametrize("reason", KillReason)
async def test_a_kill_has_its_code_and_keeps_the_partial_output(
    tmp_path: Path, reason: KillReason
) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("run", *IMAGE, "kill", reason.value)
    assert ran.code == of_kill(reason)
    assert ran.stdout == b"partial"
    assert f"killed: {reason}" in ran.stderr


async def test_nothing_is_left_after_a_run_of_any_kind(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        for argv in (("true",), ("kill", "MEMORY"), ("unknown",)):
            await daemon.sbxctl("run", *IMAGE, *argv)
            assert await daemon.daemon.environments.list() == ()


async def test_stdin_is_given_from_a_file_or_from_standard_input(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(BYTES)
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        from_file = await daemon.sbxctl("run", *IMAGE, "--stdin", str(tmp_path / "in"), "cat")
        piped = await daemon.sbxctl("run", *IMAGE, "--stdin", "-", "cat", stdin=BYTES)
        by_itself = await daemon.sbxctl("run", *IMAGE, "cat", stdin=BYTES)
        none = await daemon.sbxctl("run", *IMAGE, "--stdin", os.devnull, "cat", stdin=BYTES)
    assert (from_file.stdout, piped.stdout, none.stdout) == (BYTES, BYTES, b"")
    assert by_itself.stdout == BYTES, "a pipe is standard input, as everywhere"


async def test_exec_takes_a_pipe_as_run_does(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        ran = await daemon.sbxctl("exec", handle.environment_id, "cat", stdin=BYTES)
    assert ran.stdout == BYTES


async def test_a_timeout_is_what_was_asked_for_or_refused(tmp_path: Path) -> None:
    """Never the default in its place."""
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        longer = await daemon.sbxctl("run", "--json", "--timeout", "1500", *IMAGE, "true")
        beyond = await daemon.sbxctl("run", "--timeout", "86400", *IMAGE, "true")
    assert json.loads(longer.stdout)["result"]["evidence"]["effective_timeout_ms"] == 1_500_000
    assert beyond.code == Exit.REJECTED
    assert "wall_clock_seconds" in beyond.stderr


async def test_exec_refuses_a_timeout_that_the_environment_does_not_allow(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
        longest = SPECIFICATION.limits.wall_clock_seconds
        words = ("exec", "--timeout", str(longest + 1), handle.environment_id, "true")
        refused = await daemon.sbxctl(*words)
        taken = await daemon.sbxctl(
            "exec", "--timeout", str(longest), handle.environment_id, "true"
        )
    assert refused.code == Exit.REJECTED
    assert f"has {longest} s at most" in refused.stderr
    assert taken.code == 0


async def test_put_and_get_copy_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(BYTES)
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        put = await daemon.sbxctl(
            "run", *IMAGE, "--put", f"{tmp_path}/a.csv:in.csv", "file", "in.csv"
        )
        got = await daemon.sbxctl(
            "run", *IMAGE, "--get", f"out:{tmp_path}/out", "write", "out", "text"
        )
    assert put.stdout == BYTES
    assert got.code == 0
    assert (tmp_path / "out").read_bytes() == b"text"


async def test_get_of_a_file_that_is_not_there_keeps_what_the_operator_has(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"precious")
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("run", *IMAGE, "--get", f"missing:{tmp_path}/mine", "true")
        assert ran.code == Exit.WORKSPACE
        assert "NOT_FOUND" in ran.stderr
        assert (tmp_path / "mine").read_bytes() == b"precious"
        assert [n for n in os.listdir(tmp_path) if "mine" in n] == ["mine"], "a partial is left"
        (tmp_path / "link").symlink_to("mine")
        replaced = await daemon.sbxctl(
            "run", *IMAGE, "--get", f"out:{tmp_path}/link", "write", "out", "text"
        )
        assert replaced.code == 0
        assert (tmp_path / "link").read_bytes() == b"text"
        assert (tmp_path / "mine").read_bytes() == b"precious", "a link was followed"
        nowhere = await daemon.sbxctl(
            "run", *IMAGE, "--get", "out:/no/such/x", "write", "out", "text"
        )
        assert nowhere.code == Exit.WORKSPACE
        assert "--get out: /no/such/x: No such file" in nowhere.stderr
        assert "fault of sbxctl" not in nowhere.stderr
        assert "Traceback" not in nowhere.stderr
        escape = await daemon.sbxctl("run", *IMAGE, "--get", "../../etc/shadow:x", "true")
        assert escape.code == Exit.WORKSPACE


async def test_the_result_comes_first_and_what_is_missing_after_it(tmp_path: Path) -> None:
    gets = ("--get", "missing:m", "--get", "out:there", "--get", "out:/proc/none/x")
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        for command, code, verdict in (
            (("write", "out", "text"), Exit.WORKSPACE, "exit code 0"),
            (("exit", "7"), 7, "exit code 7"),
            (("kill", "TIMEOUT"), Exit.TIMEOUT, "killed: TIMEOUT"),
            (("kill", "EXPIRED"), Exit.EXPIRED, "killed: EXPIRED"),
        ):
            ran = await daemon.sbxctl("run", *IMAGE, *gets, *command, directory=tmp_path)
            assert ran.code == code
            assert 0 <= ran.stderr.index(verdict) < ran.stderr.index("sbxctl: --get missing: ")
            assert "--get out: /proc/none/x" in ran.stderr or command[0] != "write"
            told = await daemon.sbxctl("run", "--json", *IMAGE, *gets, *command, directory=tmp_path)
            assert told.code == code
            document = json.loads(told.stdout)
            assert document["result"]["duration_ms"] >= 0
            missing = [each["name"] for each in document["not_fetched"]]
            assert missing == (
                ["missing", "out"] if command[0] == "write" else ["missing", "out", "out"]
            )
    assert (tmp_path / "there").read_bytes() == b"text", "a later --get is tried"


async def test_names_with_colons_go_in_and_come_out(tmp_path: Path) -> None:
    (tmp_path / "a:b").write_bytes(BYTES)
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        put = await daemon.sbxctl(
            "run", *IMAGE, "--put", r"a\:b:in\:x", "file", "in:x", directory=tmp_path
        )
        got = await daemon.sbxctl(
            "run", *IMAGE, "--get", r"o\:1:there\:2", "write", "o:1", "y", directory=tmp_path
        )
    assert (put.code, put.stdout) == (0, BYTES)
    assert (got.code, (tmp_path / "there:2").read_bytes()) == (0, b"y")


async def test_put_to_outside_the_workspace_is_refused_before_the_command(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("run", *IMAGE, "--put", f"{tmp_path}/a:../a", "bytes")
    assert (ran.code, ran.stdout) == (Exit.WORKSPACE, b"")


async def test_json_is_one_document_with_everything(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("run", "--json", *IMAGE, "bytes")
        killed = await daemon.sbxctl("run", "--json", *IMAGE, "kill", "PIDS")
        changed = await daemon.sbxctl("run", "--json", *IMAGE, "write", "f", "x")
    document = json.loads(ran.stdout)
    assert set(document) == {"environment", "result", "timings", "not_fetched"}
    assert document["not_fetched"] == []
    assert "base64" in document["result"]["stdout"]
    assert document["result"]["stderr"] == {"text": "to stderr\n"}
    assert document["result"]["exit_code"] == 0
    assert document["timings"]["provision_ms"] >= 0
    assert json.loads(killed.stdout)["result"]["killed_by"] == "PIDS"
    assert killed.code == Exit.PIDS
    (change,) = json.loads(changed.stdout)["result"]["files_changed"]
    assert (change["path"], change["change"], change["size_bytes"]) == ("f", "CREATED", 1)


async def test_variables_are_judged_by_name(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        plain = await daemon.sbxctl("run", *IMAGE, "environment")
        for name in ("LD_PRELOAD", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY"):
            ran = await daemon.sbxctl("run", *IMAGE, "--env", f"{name}=x", "environment")
            assert (ran.code, ran.stdout) == (Exit.REJECTED, b""), name
            assert name in ran.stderr
    assert json.loads(plain.stdout)["HOME"] == "/workspace"


async def test_limits_above_the_ceiling_are_refused_with_the_field(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("run", *IMAGE, "--memory", "900G", "true")
    assert ran.code == Exit.REJECTED
    assert "memory" in ran.stderr


async def test_a_program_that_is_not_there_is_named_with_a_hint(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("run", *IMAGE, "unknown")
    assert ran.code == Exit.REJECTED
    assert "→ name a program of the image" in ran.stderr


async def test_an_alias_that_is_unknown_lists_the_known_ones(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        named = await daemon.sbxctl("run", "--image", "python", "true")
        none = await daemon.sbxctl("run", "true")
    assert (named.code, none.code) == (Exit.REJECTED, Exit.REJECTED)
    assert "it has: none" in named.stderr
    assert "sbxctl image ls" in named.stderr
    assert "--image" in none.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument"),
        (["run", "--memory", "lots", "true"], "write it like 64M"),
        (["run", "--cpus", "all", "true"], "write it like 0.5"),
        (["run", "--pids", "0", "true"], "--pids"),
        (["run", "--inodes", "1", "true"], "--inodes"),
        (["run", "--timeout", "0", "true"], "--timeout"),
        (["run", "--nonsense", "true"], "No such option"),
        (["run", "--put", "/no/such/file", "true"], "is no file"),
        (["run", "--env", "NAME", "true"], "write NAME=value"),
        (["frobnicate"], "No such command"),
        (["destroy"], "Missing argument"),
        (["exec", "0" * 32], "Missing argument"),
        (["exec", "0" * 32, "--"], "name a command"),
        (["image", "import", "/no/such/file"], "does not exist"),
        (["image", "rm", "python"], "no digest: sha256: and 64 hex digits"),
        (["inspect", "sbx-1"], "is not an id: write its 32 hex digits"),
        (["exec", "sbx-1", "true"], "is not an id: write its 32 hex digits"),
        (["shell", "sbx-1"], "is not an id: write its 32 hex digits"),
        (["destroy", "0" * 32, "sbx-1"], "is not an id: write its 32 hex digits"),
        (["run", "--stdin", "/no/such/file", "true"], "/no/such/file"),
    ],
)
def test_a_wrong_command_line_is_245_and_says_how_it_is_right(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["sbxctl", "--socket", "/no/such/socket", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == Exit.USAGE
    assert words in shown.err
    assert shown.out == ""


def test_a_right_command_line_gets_as_far_as_the_socket(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sbxctl", "--socket", "/no/such/socket", "run", "true"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == Exit.UNAVAILABLE
    assert "/no/such/socket does not exist" in capsys.readouterr().err


async def test_options_after_the_program_are_the_programs(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("run", *IMAGE, "--", "exit", "7")
        own = await daemon.sbxctl("run", *IMAGE, "cat", "--json")
    assert ran.code == 7
    assert (own.code, own.stdout) == (0, b""), own.stderr


# --- ls, inspect, exec, destroy ----------------------------------------------------------------


async def test_a_live_environment_is_listed_inspected_used_and_destroyed(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon, daemon.daemon.channel() as channel:
        worker = RemoteExecutionEnvironment(channel)
        handle = await worker.provision(SPECIFICATION)
        listed = await daemon.sbxctl("ls")
        as_json = await daemon.sbxctl("ls", "--json")
        shown = await daemon.sbxctl("inspect", handle.environment_id)
        executed = await daemon.sbxctl("exec", handle.environment_id, "exit", "5")
        where = await daemon.sbxctl("exec", handle.environment_id, "--", "where")
        destroyed = await daemon.sbxctl("destroy", handle.environment_id)
        again = await daemon.sbxctl("destroy", handle.environment_id)
        empty = await daemon.sbxctl("ls", "--json")
    assert handle.environment_id in listed.stdout.decode()
    assert json.loads(as_json.stdout)[0]["handle"]["environment_id"] == handle.environment_id
    assert "256.0 MiB" in shown.stdout.decode()
    assert (executed.code, where.stdout) == (5, b"/workspace")
    assert destroyed.stdout.decode().split() == [handle.environment_id, "destroyed"]
    assert (again.code, again.stdout.decode().split()[1]) == (0, "gone")
    assert json.loads(empty.stdout) == []


@pytest.mark.parametrize("verb", [["inspect"], ["exec"]])
async def test_an_environment_that_never_was_points_to_the_list(
    tmp_path: Path, verb: list[str]
) -> None:
    arguments = [*verb, "0" * 32] + (["true"] if verb == ["exec"] else [])
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl(*arguments)
    assert ran.code in (Exit.REJECTED, Exit.USAGE)
    assert "Traceback" not in ran.stderr
    assert "sbxctl ls" in ran.stderr


@pytest.mark.parametrize("odd", ["", "e" * 5000, "\x1b[2J"])
async def test_an_id_of_no_form_is_refused_without_a_traceback(tmp_path: Path, odd: str) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        for arguments in (["inspect", odd], ["exec", odd, "true"], ["destroy", odd]):
            ran = await daemon.sbxctl(*arguments)
            assert "Traceback" not in ran.stderr, arguments
            assert "\x1b" not in ran.stderr
            assert "\x1b" not in ran.stdout.decode()
        alive = await daemon.sbxctl("ls", "--json")
    assert alive.code == 0


# --- reaching the daemon -----------------------------------------------------------------------


async def test_a_missing_socket_names_the_unit_to_start(tmp_path: Path) -> None:
    ran = await sbxctl("--socket", str(tmp_path / "none.sock"), "ls")
    assert ran.code == Exit.UNAVAILABLE
    assert "none.sock does not exist" in ran.stderr
    assert "systemctl enable --now sbxd-admin.socket" in ran.stderr


async def test_a_socket_that_nobody_serves_names_the_doctor_and_the_log(tmp_path: Path) -> None:
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        ran = await sbxctl("--socket", str(path), "ls")
    assert ran.code == Exit.UNAVAILABLE
    assert "sbxctl doctor" in ran.stderr
    assert "sbxctl logs daemon launcher" in ran.stderr


def test_a_full_disk_is_no_fault_of_sbxctl(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sbxctl", "config", "show", str(tmp_path / "config.toml")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == Exit.INTERNAL
    assert "could not be written" in done.stderr
    assert "fault of sbxctl" not in done.stderr


async def test_doctor_without_a_daemon_has_a_fix_for_each_thing_that_is_missing(
    tmp_path: Path,
) -> None:
    ran = await sbxctl("--socket", str(tmp_path / "none.sock"), "doctor", "--json")
    assert ran.code == Exit.HOST_DEGRADED
    items = json.loads(ran.stdout)
    assert {"sbxd", "admin socket"} <= {item["name"] for item in items}
    for item in items:
        assert item["state"] == "ok" or item["fix"], item


async def test_doctor_asks_the_daemon(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("doctor", "--json")
        people = await daemon.sbxctl("doctor")
    items = {item["name"]: item for item in json.loads(ran.stdout)}
    assert "mechanism fake" in items["sbxd"]["detail"]
    assert items["image"]["fix"].startswith("sbxctl image build")
    assert ran.code == people.code == Exit.HOST_DEGRADED
    assert "fix: sbxctl image build" in people.stdout.decode()


# --- images ------------------------------------------------------------------------------------


async def test_an_image_is_imported_listed_and_removed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("x")
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        imported = await daemon.sbxctl("image", "import", "--label", "[red]\x1b[2J", str(root))
        digest = imported.stdout.decode().strip()
        listed = await daemon.sbxctl("image", "ls")
        as_json = await daemon.sbxctl("image", "ls", "--json")
        removed = await daemon.sbxctl("image", "rm", digest)
        again = await daemon.sbxctl("image", "rm", digest)
    assert digest.startswith("sha256:")
    assert "[images.aliases]" in imported.stderr
    assert digest in listed.stdout.decode()
    assert "\x1b" not in listed.stdout.decode()
    assert json.loads(as_json.stdout)[0]["label"] == "[red]\x1b[2J"
    assert removed.code == 0
    assert again.code == Exit.REJECTED


# --- reap, reconcile, quarantine ---------------------------------------------------------------


async def test_a_pass_of_the_reaper_says_what_it_found(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("reap")
        as_json = await daemon.sbxctl("reap", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.startswith(b"0 environments asked about")
    assert json.loads(as_json.stdout)["stale"] == []


async def test_nothing_to_repair_is_said_so(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        reconciled = await daemon.sbxctl("reconcile")
        listed = await daemon.sbxctl("quarantine", "ls")
        cleared = await daemon.sbxctl("quarantine", "clear", "a" * 32)
    assert (reconciled.code, reconciled.stdout) == (0, b"nothing to repair\n")
    assert (listed.code, listed.stdout) == (0, b"nothing is quarantined\n")
    assert cleared.code == Exit.REJECTED
    assert "sbxctl quarantine ls" in cleared.stderr
