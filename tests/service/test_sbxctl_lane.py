"""sbxctl against the installed daemon: what an operator's scripts rely on."""

import gzip
import io
import json
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sbxctl.exits import Exit
from tests.redteam.live import live

pytestmark = [pytest.mark.needs("daemon", "root")]

BYTES = bytes(range(256)) + b"\x1b[2J\r\n\xff"


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: bytes
    stderr: str


def sbxctl(*arguments: str, stdin: bytes = b"", user: int | None = None) -> Ran:
    done = subprocess.run(
        ["sbxctl", *arguments],
        input=stdin,
        capture_output=True,
        timeout=180,
        check=False,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        cwd="/",
    )
    return Ran(done.returncode, done.stdout, done.stderr.decode())


def sh(script: str, *options: str) -> Ran:
    return sbxctl("run", *options, "--", "sh", "-c", script)


# --- run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 7, 230, 255])
def test_the_commands_own_exit_code_is_passed_through(code: int) -> None:
    assert sh(f"exit {code}").code == code


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("SEGV", 139), ("TERM", 143)])
def test_a_death_by_an_own_signal_is_128_and_its_number(name: str, code: int) -> None:
    ran = sh(f"kill -{name} $$")
    assert ran.code == code
    assert f"died of signal {code - 128}" in ran.stderr


def test_stdout_is_the_commands_bytes_and_the_report_is_on_stderr() -> None:
    source = f"import os; os.write(1, bytes({list(BYTES)})); os.write(2, b'to stderr\\n')"
    ran = sbxctl("run", "--", "python3", "-c", source)
    assert ran.stdout == BYTES
    assert ran.stderr.startswith("to stderr\n")
    assert "exit code 0" in ran.stderr
    assert "\x1b" not in ran.stderr


def test_a_timeout_is_230_with_the_partial_output() -> None:
    ran = sh("echo partial; sleep 600", "--timeout", "5")
    assert (ran.code, ran.stdout) == (Exit.TIMEOUT, b"partial\n")
    assert "killed: TIMEOUT" in ran.stderr


def test_endless_output_is_232_with_what_was_asked_for() -> None:
    ran = sbxctl("run", "--max-output", "64k", "--", "cat", "/dev/zero")
    assert (ran.code, ran.stdout) == (Exit.OUTPUT_LIMIT, bytes(65536))
    assert "stdout truncated" in ran.stderr


@pytest.mark.needs("limits")
def test_memory_and_pids_have_their_codes() -> None:
    eater = "x = []\nwhile True: x.append(bytearray(2**20))"
    assert sbxctl("run", "--memory", "64M", "--", "python3", "-c", eater).code == Exit.MEMORY
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert sbxctl("run", "--pids", "16", "--", "python3", "-c", bomb).code == Exit.PIDS


def test_a_failing_program_start_is_a_refusal_and_not_the_commands_code() -> None:
    for argv in (["no-such-program"], ["/etc/passwd"], ["/etc"], ["./relative"]):
        ran = sbxctl("run", "--", *argv)
        assert ran.code == Exit.REJECTED, argv
        assert "Traceback" not in ran.stderr
        assert ran.stdout == b""


def test_files_go_in_and_come_out_and_the_report_names_them(tmp_path: Path) -> None:
    (tmp_path / "in.bin").write_bytes(BYTES * 1000)
    ran = sh(
        "tr -d x < data/in.bin > out.bin; rm data/in.bin",
        "--put",
        f"{tmp_path}/in.bin:data/in.bin",
        "--get",
        f"out.bin:{tmp_path}/out.bin",
    )
    assert ran.code == 0, ran.stderr
    assert (tmp_path / "out.bin").read_bytes() == (BYTES * 1000).replace(b"x", b"")
    assert "created" in ran.stderr
    assert "deleted" in ran.stderr
    assert os.listdir(tmp_path).count("out.bin") == 1


def test_stdin_is_a_pipe_or_what_was_asked_for() -> None:
    assert sbxctl("run", "--stdin", "-", "--", "cat", stdin=BYTES * 5000).stdout == BYTES * 5000
    assert sbxctl("run", "--", "wc", "-w", stdin=b"1 2 3\n").stdout == b"3\n"
    assert sbxctl("run", "--stdin", "/dev/null", "--", "cat", stdin=b"not asked").stdout == b""


def test_a_shell_that_is_given_a_script_runs_it_as_sh_does() -> None:
    """Also what holds from line to line there: here-documents, variables, functions."""
    script = b"""
x=1; f() {
  echo "f $x"
}
cd /tmp
cat <<EOF
rm -rf / # $x
exit 3
EOF
cat <<-'END' | tr a-z A-Z
\t$x
\tEND
if :; then
  f
fi
pwd; exit 7
"""
    ran = sbxctl("shell", stdin=script)
    by_sh = subprocess.run(["sh"], input=script, capture_output=True, check=False, timeout=60)
    assert (ran.code, ran.stdout) == (by_sh.returncode, by_sh.stdout)
    assert (ran.code, ran.stdout.splitlines()[:2]) == (7, [b"rm -rf / # 1", b"exit 3"])


def test_json_is_one_document_and_tells_an_exit_from_a_kill() -> None:
    exited = json.loads(sh("exit 230", "--json").stdout)["result"]
    assert (exited["exit_code"], exited["killed_by"]) == (230, None)
    died = json.loads(sh("kill -KILL $$", "--json").stdout)["result"]
    assert (died["exit_code"], died["signal"], died["killed_by"]) == (137, 9, None)
    killed = json.loads(sh("sleep 600", "--json", "--timeout", "1").stdout)
    assert (killed["result"]["exit_code"], killed["result"]["killed_by"]) == (None, "TIMEOUT")
    assert killed["timings"]["provision_ms"] > 0


@pytest.mark.parametrize("name", ["LD_PRELOAD", "AWS_SECRET_ACCESS_KEY", "HTTP_PROXY", "PATH", "X"])
def test_a_variable_that_the_operator_has_not_listed_is_refused(name: str) -> None:
    ran = sbxctl("run", "--env", f"{name}=x", "--", "env")
    assert (ran.code, ran.stdout) == (Exit.REJECTED, b"")
    assert name in ran.stderr


def listed() -> dict[str, Any]:
    """What `ls` shows, by environment. It may be another test's, which is being ended yet."""
    rows = json.loads(sbxctl("ls", "--json").stdout)
    return {row["handle"]["environment_id"]: row for row in rows}


def test_nothing_of_a_run_is_left_in_the_list() -> None:
    before = listed()
    made = []
    for script, options in (("exit 1", ()), ("sleep 600", ("--timeout", "1"))):
        ran = json.loads(sh(script, "--json", *options).stdout)
        made.append(ran["environment"]["environment_id"])
    assert len({*made} - before.keys()) == 2
    assert listed().keys() <= before.keys()


# --- environments ------------------------------------------------------------------------------


async def test_an_environment_of_a_worker_is_listed_shown_used_and_destroyed() -> None:
    async with live() as environment:
        identity = environment.handle.environment_id
        await environment.workspace.write("note", b"from the worker")
        assert identity in listed()
        assert identity in sbxctl("ls").stdout.decode()
        shown = sbxctl("inspect", identity).stdout.decode()
        assert "tenant-1" in shown
        assert "128.0 MiB" in shown
        ran = sbxctl("exec", identity, "--", "cat", "note")
        assert (ran.code, ran.stdout) == (0, b"from the worker")
        assert sbxctl("exec", identity, "sh", "-c", "exit 9").code == 9
        assert sbxctl("destroy", identity).stdout.decode().split() == [identity, "destroyed"]
        assert sbxctl("destroy", identity).stdout.decode().split() == [identity, "gone"]
        gone = sbxctl("exec", identity, "true")
        assert gone.code == Exit.REJECTED
        assert "sbxctl ls" in gone.stderr


# --- images ------------------------------------------------------------------------------------


def _root_file_system(folder: Path, content: bytes) -> Path:
    """One that unpacks; nothing in it can run."""
    root = folder / "root"
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "usr/bin", "workspace"):
        (root / name).mkdir(parents=True)
    (root / "etc" / "marker").write_bytes(content)
    for directory, folders, files in os.walk(root):
        for name in (*folders, *files):
            os.utime(os.path.join(directory, name), (1, 1))
    return root


def images() -> list[tuple[str, str, str]]:
    """What is in the store; which of it is in use is the pool's and other tests' matter."""
    rows = json.loads(sbxctl("image", "ls", "--json").stdout)
    return [(row["digest"], row["label"], row["imported_at"]) for row in rows]


def test_an_image_has_one_digest_whatever_it_is_wrapped_in(tmp_path: Path) -> None:
    root = _root_file_system(tmp_path, os.urandom(16))
    first = sbxctl("image", "import", str(root))
    assert first.code == 0, first.stderr
    digest = first.stdout.decode().strip()
    try:
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(root, ".")
        other = sbxctl("image", "import", "--json", str(tmp_path / "a.tar"))
        assert other.code == 0, other.stderr
        other_digest = json.loads(other.stdout)["digest"]
        packed = tmp_path / "a.tar.gz"
        packed.write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
        again = sbxctl("image", "import", "--digest", other_digest, str(packed))
        assert again.stdout.decode().strip() == other_digest
        assert sbxctl("image", "import", str(root)).stdout.decode().strip() == digest
        known = [image["digest"] for image in json.loads(sbxctl("image", "ls", "--json").stdout)]
        assert known.count(digest) == 1
        assert known.count(other_digest) == 1
        assert sbxctl("image", "rm", other_digest).code == 0
    finally:
        assert sbxctl("image", "rm", digest).code == 0
    assert digest not in sbxctl("image", "ls").stdout.decode()
    refused = sbxctl("run", "--image", digest, "--", "true")
    assert refused.code == Exit.REJECTED
    assert "sbxctl image ls" in refused.stderr


def test_another_digest_than_the_expected_one_imports_nothing(tmp_path: Path) -> None:
    root = _root_file_system(tmp_path, os.urandom(16))
    before = images()
    ran = sbxctl("image", "import", "--digest", "sha256:" + "0" * 64, str(root))
    assert ran.code == Exit.REJECTED
    assert "digest is sha256:" in ran.stderr
    assert images() == before


@pytest.mark.parametrize("kind", ["garbage", "absolute", "escaping", "device"])
def test_a_hostile_tar_is_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        member = tarfile.TarInfo(
            {"absolute": "/escaped", "escaping": "../../escaped"}.get(kind, "x")
        )
        if kind == "device":
            member.type, member.devmajor, member.devminor = tarfile.BLKTYPE, 7, 0
        archive.addfile(member)
    (tmp_path / "bad.tar").write_bytes(os.urandom(4096) if kind == "garbage" else raw.getvalue())
    ran = sbxctl("image", "import", str(tmp_path / "bad.tar"))
    assert "Traceback" not in ran.stderr
    assert not os.path.exists("/escaped")
    assert not any("escaped" in files for _, _, files in os.walk("/var/lib/sbxd"))
    if ran.code == 0:
        assert kind != "garbage"
        assert sbxctl("image", "rm", ran.stdout.decode().strip()).code == 0
    else:
        assert ran.code in (Exit.REJECTED, Exit.UNAVAILABLE)
        assert ran.stdout == b""


def test_an_image_is_removed_by_its_digest_alone() -> None:
    (image, *_) = json.loads(sbxctl("image", "ls", "--json").stdout)
    ran = sbxctl("image", "rm", "latest")
    assert ran.code == Exit.USAGE
    assert "sbxctl image ls" in ran.stderr
    ran = sbxctl("image", "rm", "sha256:" + "0" * 64)
    assert ran.code == Exit.REJECTED
    assert sbxctl("run", "--image", image["digest"], "--", "true").code == 0


# --- doctor and who may ------------------------------------------------------------------------


def test_doctor_is_parseable_and_each_item_that_is_not_ok_has_a_fix() -> None:
    ran = sbxctl("doctor", "--json")
    items = json.loads(ran.stdout)
    states = {item["state"] for item in items}
    assert len(items) > 3
    for item in items:
        assert item["state"] == "ok" or item["fix"], item
    assert ran.code == (Exit.HOST_DEGRADED if "missing" in states else Exit.OK)
    people = sbxctl("doctor")
    assert people.code == ran.code
    for item in items:
        assert item["name"] in people.stdout.decode()


def test_somebody_else_is_told_which_group_may() -> None:
    ran = sbxctl("ls", user=65534)
    assert ran.code in (Exit.UNAVAILABLE, Exit.REJECTED)
    assert "sbxd-admin" in ran.stderr
    assert sbxctl("ls").code == 0, "the control: root may"


def test_limits_above_the_defaults_are_granted_up_to_the_ceilings() -> None:
    """The reserve's slots are made for the defaults; one that needs more is built for it."""
    for option, value in (("--pids", "512"), ("--memory", "512M"), ("--cpus", "4")):
        done = subprocess.run(
            ["sbxctl", "run", option, value, "--", "echo", "granted"],
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, b"granted\n"), done.stderr
