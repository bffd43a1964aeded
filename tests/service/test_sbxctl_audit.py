"""`sbxctl audit`, `audit verify` and `logs` over a journalctl that the test gives."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sbxctl.exits import Exit
from sbxctl.journal import WHO_MAY
from sbxctl.journal_kept import kept_item
from sbxctl.when import parse
from tests.service.fake_socket import Ran, sbxctl

BOOT = "b" * 32
NOBODY = 65534


def record(number: int, event: str = "EgressRefused", **more: object) -> dict[str, object]:
    return {
        "__REALTIME_TIMESTAMP": str(1_800_000_000_000_000 + number * 1_000_000),
        "MESSAGE": f"Connection {number} refused",
        "MESSAGE_ID": "6c242bc6a00c4e849d9180a395376c23",
        "PRIORITY": "5",
        "SBX_EVENT": event,
        "SBX_TENANT_ID": "acme",
        "SBX_REASON": "host_not_listed",
        "SBX_AUDIT_BOOT_ID": BOOT,
        "SBX_AUDIT_INSTANCE": "1" * 32,
        "SBX_AUDIT_SCHEMA": "1",
        "SBX_AUDIT_SEQUENCE": str(number),
        "SBX_AUDIT_TIME": str(1_800_000_000_000_000 + number * 1_000_000 - 500),
        **more,
    }


class Journal:
    """A journalctl that answers with these records and notes how it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def holds(self, *records: Mapping[str, object], script: str = "") -> None:
        (self.folder / "lines").write_text("".join(json.dumps(each) + "\n" for each in records))
        program = self.folder / "journalctl"
        answer = script or f"cat {self.folder}/lines"
        program.write_text(f'#!/bin/sh\necho "$*" >> {self.folder}/calls\n{answer}\n')
        program.chmod(0o755)

    @property
    def last_call(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()[-1].split()


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Journal(tmp_path)


async def test_one_line_for_each_record_and_no_colour_in_a_pipe(journal: Journal) -> None:
    journal.holds(record(1), {"MESSAGE": "of the operation"}, record(2, MESSAGE="a\nb\x1b[31m"))
    ran = await sbxctl("audit")
    first, second = ran.stdout.decode().splitlines()
    assert first.split(None, 3) == [
        "2027-01-15T08:00:00.999Z", "1", "EgressRefused", "Connection 1 refused",
    ]  # fmt: skip
    assert second.endswith("a\\nb\\x1b[31m")
    assert (ran.code, ran.stderr) == (0, "")


async def test_filters_are_matches_of_the_journal_and_only_the_units_records_count(
    journal: Journal,
) -> None:
    journal.holds(record(1))
    await sbxctl(
        *("audit", "--tenant", "acme", "--run", "run-1", "--environment", "e" * 32),
        *("--event", "egressrefused", "--event", "CommandStarted", "--since", "2027-01-15T00:00Z"),
    )
    call = journal.last_call
    for word in (
        "_SYSTEMD_UNIT=sbxd.service", "SBX_TENANT_ID=acme", "SBX_RUN_ID=run-1",
        f"SBX_ENVIRONMENT_ID={'e' * 32}", "SBX_EVENT=EgressRefused", "SBX_EVENT=CommandStarted",
        "--since=@1799971200",
    ):  # fmt: skip
        assert word in call
    assert "--follow" not in call


async def test_a_reason_is_looked_for_in_every_field_that_says_why(journal: Journal) -> None:
    journal.holds(
        record(1, SBX_REASON="x"),
        record(2, SBX_KILLED_BY="MEMORY"),
        record(3, SBX_CODE="memory"),
        record(4),
    )
    ran = await sbxctl("audit", "--reason", "Memory", "--json")
    assert [json.loads(line)["sequence"] for line in ran.stdout.splitlines()] == [2, 3]


async def test_times_are_those_of_the_decision(journal: Journal) -> None:
    late = record(9, SBX_AUDIT_TIME=str(1_800_000_002_000_000))  # it waited in the spool
    journal.holds(record(1), late, record(10))
    ran = await sbxctl(
        *("audit", "--json", "--since", "2027-01-15T08:00:02Z", "--until", "2027-01-15T08:00:05Z")
    )
    assert [json.loads(line)["sequence"] for line in ran.stdout.splitlines()] == [9]


async def test_the_newest_and_following(journal: Journal) -> None:
    journal.holds(*(record(number) for number in range(1, 8)))
    ran = await sbxctl("audit", "-n", "2", "--json")
    assert [json.loads(line)["sequence"] for line in ran.stdout.splitlines()] == [6, 7]
    await sbxctl("audit", "-f")
    assert {"--follow", "--lines=10"} <= set(journal.last_call)
    await sbxctl("audit", "-f", "--since", "1h")
    assert "--no-tail" in journal.last_call


async def test_a_document_has_the_documented_keys(journal: Journal) -> None:
    journal.holds(record(1, SBX_COUNTS=["a=1", "b=2"], SBX_HOST=[97, 10]))
    ran = await sbxctl("audit", "--json")
    document = json.loads(ran.stdout)
    assert list(document) == [
        "sequence", "boot_id", "instance", "decided_at", "received_at", "event", "message_id",
        "priority", "message", "fields", "cut",
    ]  # fmt: skip
    assert document["cut"] == []
    assert document["fields"] == {
        "counts": ["a=1", "b=2"], "host": "a\n", "reason": "host_not_listed", "tenant_id": "acme",
    }  # fmt: skip
    assert document["decided_at"] == "2027-01-15T08:00:00.999500Z"


@pytest.mark.parametrize(
    "words",
    [
        ("--tenant", "a b"),
        ("--tenant", "x\n+"),
        ("--run", "+"),
        ("--event", "NoSuchEvent"),
        ("--since", "whenever"),
        ("-n", "-1"),
    ],
)
async def test_what_is_no_filter_is_a_usage_error(journal: Journal, words: tuple[str, ...]) -> None:
    journal.holds(record(1))
    ran = await sbxctl("audit", *words)
    assert ran.code == Exit.USAGE
    assert "Traceback" not in ran.stderr
    assert not (journal.folder / "calls").exists()


def on_a_terminal(*words: str, **environment: str) -> bytes:
    """What sbxctl writes to a terminal."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sbxctl", *words],
        stdout=secondary,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(secondary)
    seen = b""
    with process, os.fdopen(primary, "rb", buffering=0) as terminal:
        try:
            while piece := terminal.read(4096):
                seen += piece
        except OSError:  # the other side is closed
            pass
    return seen


def test_a_terminal_gets_colours_unless_they_are_not_wanted(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    journal.holds(record(1, PRIORITY="1"))
    assert b"\x1b[" in on_a_terminal("audit")
    plain = on_a_terminal("audit", NO_COLOR="1")
    assert b"Connection 1 refused" in plain
    assert b"\x1b[3" not in plain
    assert b"\x1b[4" not in plain


def test_a_reader_that_stops_is_no_error(journal: Journal) -> None:
    journal.holds(record(1), script=f"while cat {journal.folder}/lines; do :; done")
    with subprocess.Popen(
        [sys.executable, "-m", "sbxctl", "audit", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


# --- the proof ----------------------------------------------------------------------------------


def state(folder: Path, sequence: int, *, spooled: bytes = b"") -> str:
    (folder / "audit").mkdir()
    (folder / "audit" / "position").write_text(f"{BOOT} {sequence:020} {0:020}\n")
    (folder / "audit" / "spool").write_bytes(spooled)
    return str(folder)


async def verify(journal: Journal, *words: str) -> Ran:
    return await sbxctl("audit", "verify", *words)


async def test_a_whole_journal_is_sound_to_the_end_that_the_service_knows(
    journal: Journal, tmp_path: Path
) -> None:
    journal.holds(*(record(number) for number in range(1, 6)))
    ran = await verify(journal, "--state-directory", state(tmp_path, 5))
    assert ran.code == 0
    assert b"sound: 5 records, none is missing" in ran.stdout
    assert b"note" not in ran.stdout


async def test_gaps_and_a_missing_end_are_named_with_250(journal: Journal, tmp_path: Path) -> None:
    journal.holds(record(1), record(4))
    ran = await verify(journal, "--state-directory", state(tmp_path, 6))
    assert ran.code == Exit.AUDIT_INCOMPLETE
    out = ran.stdout.decode()
    assert f"finding: MISSING 2 to 3 of boot {BOOT}" in out
    assert f"finding: MISSING 5 to 6 of boot {BOOT}" in out
    assert "not sound: 2 findings in 2 records" in ran.stderr
    ran = await verify(journal, "--json", "--state-directory", str(tmp_path))
    document = json.loads(ran.stdout)
    assert (document["sound"], document["end"]["proven"]) == (False, True)
    assert [each["kind"] for each in document["findings"]] == ["MISSING", "MISSING"]


async def test_an_end_that_cannot_be_proven_is_said(journal: Journal, tmp_path: Path) -> None:
    journal.holds(record(1))
    ran = await verify(journal, "--state-directory", str(tmp_path))
    assert ran.code == 0
    assert b"note: the end is not proven: No such file" in ran.stdout
    ran = await verify(journal, "--state-directory", state(tmp_path, 2, spooled=b"x"))
    assert ran.code == 0
    assert b"records wait in the service's spool" in ran.stdout


async def test_an_empty_journal_does_not_hide_what_the_service_knows(
    journal: Journal, tmp_path: Path
) -> None:
    journal.holds()
    ran = await verify(journal, "--state-directory", state(tmp_path, 3))
    assert (ran.code, b"MISSING 1 to 3" in ran.stdout) == (Exit.AUDIT_INCOMPLETE, True)


# --- the log ------------------------------------------------------------------------------------


async def test_logs_are_of_the_chosen_parts_and_none_of_the_audits(journal: Journal) -> None:
    said = {"__REALTIME_TIMESTAMP": "1800000000000000", "PRIORITY": "6"}
    journal.holds(
        {**said, "MESSAGE": "serving", "_SYSTEMD_UNIT": "sbxd.service"},
        {**said, "MESSAGE": "Started", "UNIT": "sbxd.service", "_SYSTEMD_UNIT": "init.scope"},
    )
    ran = await sbxctl("logs", "daemon", "launcher", "-p", "warning", "--since", "today")
    assert [line.split(None, 2)[1:] for line in ran.stdout.decode().splitlines()] == [
        ["sbxd", "serving"],
        ["systemd", "Started"],
    ]
    call = journal.last_call
    assert "--priority=warning" in call
    assert call[-7:] == [
        "_SYSTEMD_UNIT=sbxd.service", "_SYSTEMD_UNIT=sbxd-launcher.service", "_TRANSPORT=stdout",
        "+", "_PID=1", "UNIT=sbxd.service", "UNIT=sbxd-launcher.service",
    ]  # fmt: skip
    ran = await sbxctl("logs", "--json")
    assert json.loads(ran.stdout.splitlines()[0]) == {
        "at": "2027-01-15T08:00:00Z", "unit": "sbxd.service", "by": "sbxd", "priority": 6,
        "message": "serving",
    }  # fmt: skip
    assert "--lines=100" in journal.last_call


@pytest.mark.parametrize("words", [("audit",), ("audit", "-f"), ("audit", "verify"), ("logs",)])
@pytest.mark.needs("daemon", "root")
async def test_who_may_not_read_is_told_who_may(
    words: tuple[str, ...],
) -> None:
    ran = await sbxctl(*words, user=NOBODY)
    assert ran.code == Exit.UNAVAILABLE
    assert "systemd-journal" in ran.stderr
    assert "Traceback" not in ran.stderr


async def test_a_journalctl_that_fails_is_told_and_is_no_stack_trace(journal: Journal) -> None:
    journal.holds(script="echo 'no such time' >&2; exit 1")
    ran = await sbxctl("audit")
    assert ran.code == Exit.UNAVAILABLE
    assert "no such time" in ran.stderr
    assert "Traceback" not in ran.stderr


# --- times --------------------------------------------------------------------------------------

NOW = datetime(2027, 1, 15, 8, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("words", "moment"),
    [
        ("now", NOW),
        ("15m", NOW - timedelta(minutes=15)),
        ("-2h", NOW - timedelta(hours=2)),
        ("3 d ago", NOW - timedelta(days=3)),
        ("2027-01-14T10:30Z", datetime(2027, 1, 14, 10, 30, tzinfo=UTC)),
        ("2027-01-14T10:30:05+02:00", datetime(2027, 1, 14, 8, 30, 5, tzinfo=UTC)),
    ],
)
def test_a_time_is_read_as_it_is_written(words: str, moment: datetime) -> None:
    assert parse(words, NOW) == moment


def test_a_day_begins_at_this_hosts_midnight() -> None:
    today, yesterday = parse("today", NOW), parse("yesterday", NOW)
    assert today is not None
    assert yesterday is not None
    assert (today.hour, today.minute, yesterday.day) == (0, 0, (today - timedelta(days=1)).day)
    assert parse("2027-01-14", NOW) == datetime(2027, 1, 14).astimezone()


@pytest.mark.parametrize(
    "words", ["", "x", "5", "5y", "2027-13-01", "9999999999d", "--output=cat", "@5"]
)
def test_what_is_no_time_is_none(words: str) -> None:
    assert parse(words, NOW) is None


async def test_records_that_are_not_kept_any_more_are_251_and_no_whole_proof(
    journal: Journal, tmp_path: Path
) -> None:
    journal.holds(*(record(number) for number in range(40, 46)))
    ran = await verify(journal, "--state-directory", state(tmp_path, 45))
    assert ran.code == Exit.AUDIT_NOT_KEPT
    assert f"note: NOT_KEPT 1 to 39 of boot {BOOT}" in ran.stdout.decode()
    assert b"sound:" not in ran.stdout
    assert "sound as far as it is kept: 6 records" in ran.stderr
    ran = await verify(journal, "--json", "--state-directory", str(tmp_path))
    assert ran.code == 251
    document = json.loads(ran.stdout)
    assert (document["sound"], document["complete"]) == (True, False)
    # With an older record there, everything since then is kept.
    ran = await verify(journal, "--since", "1h", "--state-directory", str(tmp_path))
    assert ran.code == 0
    journal.holds(script='case "$*" in *--until=*) ;; *) cat "$(dirname "$0")/lines" ;; esac')
    (tmp_path / "lines").write_text(json.dumps(record(40)) + "\n")
    ran = await verify(journal, "--since", "1h", "--json", "--state-directory", str(tmp_path))
    assert ran.code != 0
    assert json.loads(ran.stdout)["complete"] is False


# --- a daemon that was taken over owns the folder -------------------------------------------------


def a_link(position: Path, secret: Path) -> None:
    position.symlink_to(secret)


def a_pipe(position: Path, secret: Path) -> None:
    os.mkfifo(position)


def a_second_name(position: Path, secret: Path) -> None:
    os.link(secret, position)


def a_folder(position: Path, secret: Path) -> None:
    position.mkdir()


def a_huge_file(position: Path, secret: Path) -> None:
    position.touch()
    os.truncate(position, 2**40)


@pytest.mark.case("DMN-10")
@pytest.mark.parametrize("plant", [a_link, a_pipe, a_second_name, a_folder, a_huge_file])
async def test_nothing_but_the_services_own_file_is_read_as_its_position(
    journal: Journal, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    journal.holds(record(1))
    directory = state(tmp_path, 1)
    ran = await verify(journal, "--json", "--state-directory", directory)
    assert json.loads(ran.stdout)["end"]["proven"]
    secret = tmp_path / "secret"
    secret.write_text(f"{BOOT} {1:020} {0:020}\n")
    (tmp_path / "audit" / "position").unlink()
    plant(tmp_path / "audit" / "position", secret)
    ran = await verify(journal, "--json", "--state-directory", directory)
    assert ran.code == 0
    end = json.loads(ran.stdout)["end"]
    assert not end["proven"]
    assert "Traceback" not in ran.stderr


@pytest.mark.case("DMN-10")
async def test_a_folder_that_is_a_link_is_not_gone_into(journal: Journal, tmp_path: Path) -> None:
    journal.holds(record(1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    state(elsewhere, 1)
    (tmp_path / "audit").symlink_to(elsewhere / "audit")
    ran = await verify(journal, "--json", "--state-directory", str(tmp_path))
    assert not json.loads(ran.stdout)["end"]["proven"]


# --- how far back it is kept ----------------------------------------------------------------------


def test_doctor_says_how_far_back_the_records_are_kept(journal: Journal, tmp_path: Path) -> None:
    journal.holds(record(1), record(2))
    kept = kept_item(tmp_path)
    assert (kept.state, kept.fix) == ("ok", "")
    assert kept.detail == "the oldest record is of 2027-01-15 08:00 UTC; the journal is on disk"
    lost_at_boot = kept_item(tmp_path / "absent")
    assert lost_at_boot.state == "degraded"
    assert "a reboot leaves none" in lost_at_boot.detail
    assert lost_at_boot.fix.startswith(f"mkdir -p {tmp_path / 'absent'}")
    journal.holds(script="echo no permission >&2; exit 1")
    unknown = kept_item(tmp_path)
    assert (unknown.state, unknown.fix) == ("degraded", WHO_MAY)
