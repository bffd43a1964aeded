"""What sbxctl reads from a command line, what it shows, and what its exit codes mean."""

import gzip
import io
import lzma
import os
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sbxctl.__main__ import cli
from sbxctl.archive import prepared
from sbxctl.audit import Identifier
from sbxctl.exits import Exit, of_kill
from sbxctl.report import bytes_field, printable, show_changes, show_result
from sbxctl.rootfs import build_debian
from sbxctl.run import parse_get, parse_put, parse_variables
from sbxctl.units import (
    Cpus,
    EnvironmentName,
    ImageDigest,
    Seconds,
    Size,
    Whole,
    human_bytes,
    parse_destination,
)
from sbxctl.when import When
from sbxd.policy.destinations import parse_port
from sbxd.port.command import ChangeKind, Evidence, ExecutionResult, FileChange, KillReason
from sbxd.wire.messages import ImageFormat


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1048576", 1048576),
        ("64k", 65536),
        ("64M", 64 * 2**20),
        ("64MB", 64 * 2**20),
        ("64MiB", 64 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2g", 2**31),
        ("1T", 2**40),
        (" 8M ", 8 * 2**20),
    ],
)
def test_a_size_is_bytes_in_binary_multiples(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "M",
        "five",
        "5X",
        "1 2",
        "0x10",
        "nan",
        "inf",
        "-inf",
        "1e9999",
        "nanM",
        "-1",
        "-5M",
        "1e3",
        "1_0",
    ],
)
def test_what_is_no_size_names_the_form(text: str) -> None:
    with pytest.raises(click.BadParameter, match="64M"):
        Size().convert(text, None, None)


@pytest.mark.parametrize("text", ["0", "0M", "0.2", "9000000T"])
def test_a_size_that_is_none_or_absurd_is_out_of_range(text: str) -> None:
    with pytest.raises(click.BadParameter, match="range"):
        Size().convert(text, None, None)


@given(st.text(max_size=12))
def test_any_text_is_a_size_above_zero_or_a_usage_error(text: str) -> None:
    with suppress(click.BadParameter):
        assert Size().convert(text, None, None) >= 1


@pytest.mark.parametrize(("text", "millicores"), [("1", 1000), ("0.5", 500), ("2.25", 2250)])
def test_cpus_are_cores(text: str, millicores: int) -> None:
    assert Cpus().convert(text, None, None) == millicores


@pytest.mark.parametrize("text", ["", "two", "nan", "inf", "1e400", "-inf", "1,5", "-1", "1e3"])
def test_what_is_no_number_of_cores_names_the_form(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"0\.5"):
        Cpus().convert(text, None, None)


@pytest.mark.parametrize("text", ["0", "0.001"])
def test_too_few_cores_name_the_smallest_share(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"0\.01"):
        Cpus().convert(text, None, None)


@given(st.text(max_size=12))
def test_any_text_is_a_share_or_a_usage_error(text: str) -> None:
    with suppress(click.BadParameter):
        assert Cpus().convert(text, None, None) >= 10


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**19, "1.5 MiB"), (2**41, "2.0 TiB")],
)
def test_bytes_for_people(size: int, shown: str) -> None:
    assert human_bytes(size) == shown


# --- transfers and variables -------------------------------------------------------------------


def test_put_takes_the_files_name_or_the_given_one(tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_text("x")
    assert parse_put(str(source)).workspace == "a.csv"
    assert parse_put(f"{source}:in/b.csv").workspace == "in/b.csv"


@pytest.mark.parametrize("what", ["missing", "."])
def test_put_of_what_is_no_file_is_a_wrong_command_line(what: str, tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="is no file"):
        parse_put(str(tmp_path / what))


def test_get_goes_to_the_last_part_of_the_name_or_to_the_given_place() -> None:
    assert parse_get("out/a.csv").host == Path("a.csv")
    assert parse_get("out/a.csv:/tmp/b.csv").host == Path("/tmp/b.csv")


def test_variables_are_name_and_value_and_the_value_may_hold_anything() -> None:
    assert parse_variables(("A=1", "B=", "C=x=y")) == {"A": "1", "B": "", "C": "x=y"}
    with pytest.raises(click.UsageError, match="NAME=value"):
        parse_variables(("A",))


# --- exit codes --------------------------------------------------------------------------------


def test_every_kill_reason_has_an_exit_code_of_its_own() -> None:
    codes = [of_kill(reason) for reason in KillReason]
    assert len(set(codes)) == len(KillReason)
    assert all(230 <= code < 240 for code in codes)


def test_no_two_exit_codes_are_the_same_and_all_fit_a_status() -> None:
    assert len({int(each) for each in Exit}) == len(Exit.__members__)
    assert all(0 <= each <= 255 for each in Exit)


# --- what a sandbox's bytes may do to a terminal -----------------------------------------------

HOSTILE = "\x1b[2J\x1b]0;title\x07a\rb\nc\x9b31m\u202eevil\u2028[bold]x[/bold]\\[red]"


def test_control_characters_and_markup_are_escaped() -> None:
    shown = printable(HOSTILE)
    assert shown.isprintable()
    out = _plain_console()
    out.print(shown)
    text = _text(out)
    assert "[bold]x[/bold]" in text, "markup was interpreted"
    assert "\\x1b[2J" in text
    assert text.rstrip("\n").isprintable()


@given(st.text(max_size=40))
def test_whatever_the_name_one_line_is_printed_and_nothing_is_interpreted(name: str) -> None:
    out = _plain_console()
    out.print(printable(name))
    text = _text(out)
    assert text.endswith("\n")
    assert text[:-1].isprintable()


def test_an_ordinary_name_is_shown_as_it_is() -> None:
    assert printable("data/Größe 1.csv") == "data/Größe 1.csv"


def test_a_changed_files_name_cannot_move_the_cursor() -> None:
    out = _plain_console()
    change = FileChange(path=HOSTILE, change=ChangeKind.CREATED, size_bytes=1, sha256="a" * 64)
    undecodable = FileChange(
        path="\udcff\udc1b", change=ChangeKind.DELETED, size_bytes=1, sha256=None
    )
    show_changes([change, undecodable], out=out)
    text = _text(out)
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2
    assert "\\udcff" in text


@pytest.mark.parametrize(
    ("killed_by", "words"),
    [
        (KillReason.MEMORY, "3 processes killed for memory"),
        (KillReason.PIDS, "9 forks refused"),
        (KillReason.TIMEOUT, "limit 1.5 s"),
        (KillReason.DISK, "killed: DISK"),
    ],
)
def test_the_verdict_says_why(killed_by: KillReason, words: str) -> None:
    out = _plain_console()
    result = ExecutionResult(
        exit_code=None,
        stdout=b"",
        stderr=b"",
        stdout_truncated=False,
        stderr_truncated=True,
        timed_out=killed_by is KillReason.TIMEOUT,
        killed_by=killed_by,
        files_changed=(),
        duration_ms=12,
        files_changed_truncated=True,
        evidence=Evidence(oom_kill=3, pids_max_events=9, effective_timeout_ms=1500),
        unenforced_limits=("cpu",),
    )
    show_result(result, out=out)
    text = _text(out)
    assert words in text
    assert "stderr truncated" in text
    assert "the list is truncated" in text
    assert "not enforced on this host: cpu" in text


def test_bytes_in_json_are_text_or_base64() -> None:
    assert bytes_field(b"caf\xc3\xa9") == {"text": "café"}
    assert bytes_field(b"\xff\x00") == {"base64": "/wA="}


def _text(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def _plain_console() -> Console:
    return Console(file=io.StringIO(), width=400, highlight=False, soft_wrap=True)


# --- root file systems -------------------------------------------------------------------------


def _tree(root: Path) -> Path:
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "motd").write_text("hello")
    (root / "bin").symlink_to("usr/bin")
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / "tool").write_bytes(b"\x7fELF")
    os.link(root / "usr" / "bin" / "tool", root / "usr" / "bin" / "same")
    os.mkfifo(root / "pipe")
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            os.utime(os.path.join(folder, name), (1, 1), follow_symlinks=False)
    return root


def _read(source: Path) -> bytes:
    with prepared(source, ImageFormat.ROOTFS) as tar:
        raw = b"".join(tar.pieces())
        assert len(raw) == tar.size
        assert raw == b"".join(tar.pieces()), "it can be read again"
        return raw


def test_a_tar_in_any_wrapping_gives_the_same_bytes(tmp_path: Path) -> None:
    packed = _read(_tree(tmp_path / "root"))
    for name, raw in (
        ("a.tar", packed),
        ("a.tar.gz", gzip.compress(packed)),
        ("a.tar.xz", lzma.compress(packed)),
        ("misnamed.zip", gzip.compress(packed)),
    ):
        (tmp_path / name).write_bytes(raw)
        assert _read(tmp_path / name) == packed, name


def test_the_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    assert _read(_tree(tmp_path / "one")) == _read(_tree(tmp_path / "two"))
    (tmp_path / "two" / "etc" / "motd").write_text("other")
    assert _read(tmp_path / "one") != _read(tmp_path / "two")


def test_a_packed_directory_holds_all_but_sockets(tmp_path: Path) -> None:
    root = _tree(tmp_path / "root")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "sock"))
        packed = _read(root)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = {member.name: member for member in archive}
    assert set(members) == {
        "bin",
        "etc",
        "etc/motd",
        "pipe",
        "usr",
        "usr/bin",
        "usr/bin/same",
        "usr/bin/tool",
    }
    assert members["bin"].linkname == "usr/bin"
    assert members["pipe"].isfifo()
    assert sum(members[name].islnk() for name in ("usr/bin/same", "usr/bin/tool")) == 1


def test_a_missing_mmdebstrap_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(click.ClickException, match="apt-get install mmdebstrap"):
        build_debian(tmp_path / "out.tar", suite="trixie", packages=("python3",))


def test_a_failing_mmdebstrap_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "mmdebstrap"
    tool.write_text("#!/bin/sh\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert subprocess.run(["mmdebstrap"], check=False).returncode == 3
    with pytest.raises(click.ClickException, match="failed"):
        build_debian(tmp_path / "out.tar", suite="trixie", packages=("python3",))


# --- numbers -----------------------------------------------------------------------------------

# What `int` and `float` of Python take, and no program of an operator writes.
STRANGE = [
    "1_000", "\u0664", "\u0661\u0662", "\uff11", "+5", "--5", "5e0", "0x5", "\u00b2", "", "5\n",
]  # fmt: skip
NUMBERS = (Whole, Seconds, Size, Cpus, When)
TEXTS = (click.types.StringParamType, click.Path, click.Choice, click.types.BoolParamType)


def _parameters(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Parameter]]:
    for each in command.params:
        yield f"{path} {each.name}".strip(), each
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from _parameters(below, f"{path} {name}".strip())


PARAMETERS = dict(_parameters(cli))


def test_no_number_of_a_verb_is_parsed_by_python() -> None:
    known = (*NUMBERS, *TEXTS, EnvironmentName, ImageDigest, Identifier)
    for path, each in PARAMETERS.items():
        assert isinstance(each.type, known), f"{path} has the type {each.type!r}"


@pytest.mark.parametrize("strange", STRANGE)
def test_every_number_size_and_time_takes_ascii_digits_alone(strange: str) -> None:
    numbers = {path: each for path, each in PARAMETERS.items() if isinstance(each.type, NUMBERS)}
    assert len(numbers) > 20
    taken = []
    for path, each in numbers.items():
        for text in (strange, f"{strange}h") if isinstance(each.type, When) else (strange,):
            with suppress(click.BadParameter):
                taken.append((path, each.type.convert(text, each, None)))
    assert taken == []


@pytest.mark.parametrize(
    ("port", "number"), [("443", 443), ("0443", 0), ("00", 0), ("99999", 99999)]
)
def test_a_port_is_one_as_the_proxy_takes_it(port: str, number: int) -> None:
    assert parse_destination(f"files.example.org:{port}") == ("files.example.org", number)
    assert parse_port(port) == (number if 0 < number < 65536 else None)
