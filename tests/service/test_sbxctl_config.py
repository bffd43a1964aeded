"""`sbxctl config`, the last resort of the command line, and what every verb's help has."""

import errno
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sbxctl import environments
from sbxctl.__main__ import cli, main
from sbxctl.examples import EXAMPLES
from sbxctl.exits import Exit
from sbxd.config import decode, load
from sbxd.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
DEVELOPMENT = REPOSITORY / "packaging" / "development.toml"
WITH_EVERYTHING = """
deployment_mode = "development"
auth_mode = "dev"
sandbox = "namespaces"
[images]
default = "a-b"
[images.aliases]
"a-b" = "sha256:%s"
[egress]
mode = "allowlist"
destinations = [ { host = "*.example.org", ports = [443, 8443] } ]
[leases.authorities.one]
socket = "/run/worker/leases.sock"
owner_uids = [1000]
[limits.io]
read_bytes = 4096
""" % ("ab" * 32)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(words))
    return done.exit_code, done.output


def leaves(
    command: click.Command, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*words, name))
    if not isinstance(command, click.Group) or (words and command.invoke_without_command):
        yield words, command


def test_a_file_that_the_daemon_starts_with_is_ok(tmp_path: Path) -> None:
    assert run("config", "check", str(DEVELOPMENT)) == (0, f"{DEVELOPMENT}: ok\n")
    strict = tmp_path / "config.toml"
    strict.write_text((REPOSITORY / "packaging/config.toml").read_text())
    code, said = run("config", "check", str(strict))
    assert code == Exit.CONFIGURATION
    assert "service credential = absent" in said
    (tmp_path / "service-credential").write_text("x")
    assert run("config", "check", str(strict))[0] == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('sandbox = "namespaces"', ["deployment_mode = production", "auth_mode = token"]),
        ('sandbox = "microvm"', ["sandbox = microvm", "this build or host cannot run"]),
        ("sandboxes = 1", ["sandboxes", "there is no such key"]),
        ("sandbox = [", ["not a TOML document"]),
        ("[limits.defaults]\nmemory_bytes = 1", ["limits.defaults.memory_bytes"]),
    ],
)
def test_every_reason_not_to_start_is_named(tmp_path: Path, text: str, named: list[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    code, said = run("config", "check", str(file))
    assert code == Exit.CONFIGURATION
    for words in named:
        assert words in said
    document = json.loads(run("config", "check", "--json", str(file))[1])
    assert document["ok"] is False
    assert all(problem["fix"] for problem in document["problems"])


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    code, said = run("config", "check", str(tmp_path / "none.toml"))
    assert code == Exit.CONFIGURATION
    assert "cannot be read: No such file" in said


@pytest.mark.parametrize("text", ["", WITH_EVERYTHING, DEVELOPMENT.read_text()])
def test_what_is_shown_is_a_configuration_that_comes_to_the_same(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    code, shown = run("config", "show", str(file))
    assert code == 0
    assert decode(shown.encode()) == load(file)
    code, changed = run("config", "show", "--changed", str(file))
    assert decode(changed.encode()) == load(file)
    assert "# default" not in changed
    assert (changed == "") == (load(file) == Settings())


def test_what_is_shown_as_json_says_what_is_a_default() -> None:
    document = json.loads(run("config", "show", "--json", str(DEVELOPMENT))[1])
    assert document["sandbox"] == {"value": "namespaces", "is_default": False}
    assert document["limits.start_budget_seconds"] == {"value": 30, "is_default": True}


def test_a_file_that_is_none_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("nonsense = 1")
    code, said = run("config", "show", str(file))
    assert code == Exit.CONFIGURATION
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (RuntimeError("odd\x1b[2J"), "unexpected RuntimeError: odd\\x1b[2J"),
        (ExceptionGroup("g", [KeyError("k")]), "unexpected KeyError"),
        (OSError(errno.EIO, "io"), "unexpected OSError"),
    ],
)
def test_a_fault_of_sbxctl_is_a_sentence_and_a_stack_trace_only_when_asked_for(
    fault: Exception,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(socket: str, verb: object) -> None:
        raise fault

    monkeypatch.setattr(environments, "run_verb", fail)
    monkeypatch.setattr("sys.argv", ["sbxctl", "ls"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == Exit.INTERNAL
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert "\x1b" not in shown.err
    monkeypatch.setattr("sys.argv", ["sbxctl", "--debug", "ls"])
    with pytest.raises(type(fault)):
        main()


def test_every_verb_has_an_example_that_is_a_right_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("rootfs.tar", "data.csv", "new.toml", "a.py"):
        Path(file).touch()
    found = {" ".join(words): command for words, command in leaves(cli)}
    assert set(EXAMPLES) == set(found)
    for name, examples in EXAMPLES.items():
        for example in examples:
            typed = shlex.split(example)
            words = name.split()
            assert typed[: 1 + len(words)] == ["sbxctl", *words]
            command = found[name]
            command.make_context(name, list(typed[1 + len(words) :]))
        assert examples[0] in CliRunner().invoke(cli, [*name.split(), "--help"]).output


def test_control_a_wrong_example_would_be_found() -> None:
    with pytest.raises(click.UsageError):
        dict(leaves(cli))[("config", "show")].make_context("show", ["--nonsense"])
