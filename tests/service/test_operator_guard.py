"""The guard by the operator's file: one call, and the command that says what it permits."""

import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sbxd.client import operator_guard as module
from sbxd.client.guard import EgressDenied, Guard
from sbxd.client.operator_guard import (
    OperatorPolicyUnreadable,
    operator_guard,
    operator_policy,
)
from sbxd.policy.egress import EgressRefusal
from sbxd.port.egress import DENY_ALL, EgressDestination, EgressMode, EgressPolicy
from sbxd.worker_cli.__main__ import cli
from sbxd.worker_cli.config import load
from sbxd.worker_cli.exits import Exit
from tests.service.guard_parts import Names, beyond

LISTED = '[egress]\nmode = "allowlist"\ndestinations = [{host = "A.example.com", ports = [443]}]\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "worker.toml"
    path.write_text(LISTED)
    return path


def test_the_policy_is_the_files(file: Path) -> None:
    destinations = (EgressDestination(host="a.example.com", ports=(443,)),)
    wanted = EgressPolicy(mode=EgressMode.ALLOWLIST, destinations=destinations)
    assert operator_policy(file) == wanted
    settings = load(file)
    assert settings.egress is not None
    assert settings.egress.mode is EgressMode.ALLOWLIST


def test_the_daemons_own_table_is_one(tmp_path: Path) -> None:
    path = tmp_path / "sbxd.toml"
    path.write_text('sandbox = "gvisor"\n' + LISTED + "tunnels_max = 7\nidle_seconds = 60\n")
    assert len(operator_policy(path).destinations) == 1


def test_mode_deny_makes_a_guard_that_reaches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text('[egress]\nmode = "deny"\n')
    assert operator_policy(path) == DENY_ALL
    with pytest.raises(EgressDenied) as denied:
        operator_guard(path).check_blocking("a.example.com", 443)
    assert denied.value.refused.reason is EgressRefusal.MODE_DENY


@pytest.mark.case("EGR-05")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", r"no table \[egress\]"),
        ("[artifacts]\n", r"no table \[egress\]"),
        ("[egress", "worker.toml"),
        ('[egress]\nmode = "open"\n', "mode"),
        ('[egress]\nmod = "deny"\n', "mod"),
        (LISTED.replace("A.example.com", "*.com"), "host"),
        (LISTED.replace("A.example.com", "10.0.0.1"), "host"),
        ("[egress]\nmode = 7\n", "mode"),
        ("egress = 7\n", "egress"),
    ],
)
def test_a_policy_that_is_missing_empty_or_misspelt_makes_no_guard(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "worker.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OperatorPolicyUnreadable, match=said):
        operator_guard(path)


def command(file: Path, target: str) -> Any:
    return CliRunner().invoke(cli, ["--config", str(file), "guard", target])


def test_the_command_says_what_the_guard_would_do(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it dials")

    def guard(*arguments: Any, **options: Any) -> Guard:
        names = Names(a_example_com=[["8.8.8.8"], ["10.0.0.1"]])
        return Guard(*arguments, **options, resolver=made.setdefault("names", names), ask=beyond)

    made: dict[str, Names] = {}
    monkeypatch.setattr(module, "Guard", guard)
    monkeypatch.setattr(socket, "create_connection", never)
    allowed = command(file, "a.example.com:443")
    assert (allowed.exit_code, allowed.output) == (0, "allowed by a.example.com:443: 8.8.8.8\n")
    refused = command(file, "a.example.com:443")
    assert refused.exit_code == Exit.EGRESS_REFUSED
    assert refused.output.startswith("refused: address_refused: ")
    assert command(file, "b.example.com:443").exit_code == Exit.EGRESS_REFUSED


@pytest.mark.parametrize(
    "target",
    ["a.example.com", "a.example.com:", ":443", "a:0443", "a:٤٤٣", "a:4_4", "a:443:1", "a:443 "],
)
def test_what_is_no_destination_is_a_usage_error(file: Path, target: str) -> None:
    assert "is not HOST:PORT" in command(file, target).output
