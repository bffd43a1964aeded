"""`sbxctl status`, `top`, `pool` and `metrics` as programs, against a daemon in memory."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from sbxctl.exits import Exit
from sbxctl.service_state import has_ended
from sbxd.audit.events import RequestRejected
from sbxd.audit.lease_events import LeaseAuthorityMissed
from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.fake.script import Outcome, Script
from sbxd.policy.violations import ViolationCode
from sbxd.port.errors import RejectedCode
from sbxd.port.ids import TenantId
from tests.service.fake_socket import CLIENT_SECONDS, SocketDaemon, sbxctl, socket_daemon
from tests.service.requests import SPECIFICATION

Popen = subprocess.Popen[bytes]
SCRIPT = Script(otherwise=Outcome())
HOSTILE = "\x1b[2J"


async def provisioned(daemon: SocketDaemon) -> str:
    """One environment that stays while its connection is held by nobody: the fake's grace is
    longer than a test."""
    async with daemon.daemon.channel() as channel:
        handle = await RemoteExecutionEnvironment(channel).provision(SPECIFICATION)
    return handle.environment_id


async def deny(daemon: SocketDaemon, tenant: str, count: int) -> None:
    for _ in range(count):
        await daemon.daemon.recorded.emit(
            RequestRejected(
                verb="execute",
                code=RejectedCode.INVALID_COMMAND,
                violation=ViolationCode.COMMAND_DENIED,
                detail="",
                peer_uid=0,
                tenant_id=TenantId(tenant),
            )
        )


async def test_status_of_a_daemon_that_is_well_is_one_page_and_exits_with_0(
    tmp_path: Path,
) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        environment_id = await provisioned(daemon)
        ran = await daemon.sbxctl("status")
        as_json = await daemon.sbxctl("status", "--json")
        listed = await daemon.sbxctl("top", "--once")
    assert (ran.code, ran.stderr) == (Exit.OK, "")
    page = ran.stdout.decode()
    assert "\x1b" not in page, "colours in a pipe"
    assert len(page.splitlines()) < 24, "more than one screen"
    for name in ("sandboxes", "pool", "audit", "journal", "quarantine", "denials", "alerts"):
        assert re.search(rf"^ *{name}  ", page, re.MULTILINE), name
    assert "1 of at most" in page
    document = json.loads(as_json.stdout)
    assert document["mechanism"] == "fake"
    assert document["states"] == {"LIVE": 1}
    assert document["alerts"] == []
    assert environment_id[:12] in listed.stdout.decode()


async def test_status_says_what_is_wrong_and_how_to_look_and_exits_with_249(
    tmp_path: Path,
) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        await deny(daemon, "loud", 60)
        await deny(daemon, "quiet", 3)
        ran = await daemon.sbxctl("status")
        document = json.loads((await daemon.sbxctl("status", "--json")).stdout)
    assert ran.code == Exit.ALERTING
    assert "SbxdDenialSpike: tenant loud: 60 denials" in ran.stdout.decode()
    assert "journalctl SBX_VIOLATION=COMMAND_DENIED SBX_TENANT_ID=loud" in ran.stdout.decode()
    assert [alert["name"] for alert in document["alerts"]] == ["SbxdDenialSpike"]
    assert {d["tenant"]: d["count"] for d in document["denials"]} == {"loud": 60, "quiet": 3}


async def test_what_a_word_of_a_peer_holds_never_reaches_the_terminal(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        await deny(daemon, HOSTILE, 60)
        page = (await daemon.sbxctl("status")).stdout
        metrics = (await daemon.sbxctl("metrics")).stdout
    assert b"\x1b" not in page + metrics
    assert b"\\x1b[2J" in page


async def test_top_in_a_pipe_is_plain_and_once_and_sorted(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        environment_id = await provisioned(daemon)
        plain = await daemon.sbxctl("top", "--sort", "tenant")
        document = json.loads((await daemon.sbxctl("top", "--json")).stdout)
    assert plain.code == Exit.OK
    headline, _blank, headings, row, *rest = plain.stdout.decode().splitlines()
    assert headline.startswith("1 sandbox; pool 0 of 0")
    assert headings.split()[:4] == ["ENVIRONMENT", "TENANT", "STATE", "CPU"]
    assert row.split()[:2] == [environment_id[:12], SPECIFICATION.tenant_id]
    assert (rest, b"\x1b" in plain.stdout) == ([], False)
    (only,) = document["environments"]
    assert only["meter"]["environment_id"] == environment_id
    assert set(document["pool"]) >= {"ready", "target", "hits", "misses", "ages_ms", "memory_bytes"}


@contextmanager
def on_a_terminal(*arguments: str, **environment: str) -> Iterator[tuple[int, Popen]]:
    """`sbxctl` on a terminal of its own: the terminal's other end, and the program."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    program = subprocess.Popen(
        [sys.executable, "-m", "sbxctl", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=subprocess.PIPE,
        env=kept | {"TERM": "xterm-256color"} | environment,
    )
    os.close(slave)
    try:
        yield master, program
    finally:
        program.kill()
        program.communicate()
        os.close(master)


async def until_shown(master: int, wanted: bytes) -> bytes:
    """Read a terminal until it shows this."""
    seen = b""
    with trio.fail_after(CLIENT_SECONDS):
        while wanted not in seen:
            await trio.lowlevel.wait_readable(master)
            seen += os.read(master, 65536)
    return seen


async def ended(program: Popen) -> tuple[int, bytes]:
    """The exit code, and what is on stderr."""
    assert program.stderr is not None
    stderr = program.stderr
    raw = await trio.to_thread.run_sync(stderr.read)
    return await trio.to_thread.run_sync(program.wait, CLIENT_SECONDS), raw


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
async def test_top_on_a_terminal_takes_the_screen_and_gives_it_back(
    tmp_path: Path, end: signal.Signals
) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        await provisioned(daemon)
        with on_a_terminal("--socket", str(daemon.path), "top") as (master, program):
            seen = await until_shown(master, b"DENIALS")
            assert b"\x1b[?1049h" in seen, "the screen is taken"
            program.send_signal(end)
            await until_shown(master, b"\x1b[?1049l")
            assert await ended(program) == (Exit.OK, b"")


async def test_pool_shows_hits_and_misses(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("pool", "show")
        document = json.loads((await daemon.sbxctl("pool", "show", "--json")).stdout)
    assert "ready  0 of 0" in ran.stdout.decode()
    assert document["hits"] == document["misses"] == 0


async def test_metrics_come_in_three_forms(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        openmetrics = (await daemon.sbxctl("metrics")).stdout.decode()
        older = (await daemon.sbxctl("metrics", "--format", "prometheus")).stdout.decode()
        families = json.loads((await daemon.sbxctl("metrics", "--json")).stdout)
    assert openmetrics.endswith("# EOF\n")
    assert "# TYPE sbxd_denials counter\n" in openmetrics
    assert "# TYPE sbxd_denials_total counter\n" in older
    assert "# EOF" not in older
    assert "sbxd_up 1\n" in older
    assert {family["name"] for family in families} >= {"sbxd_up", "sbxd_provision_seconds"}


async def test_a_textfile_is_replaced_whole_and_readable(tmp_path: Path) -> None:
    target = tmp_path / "sbxd.prom"
    target.write_text("old")
    before = os.stat(target).st_ino
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("metrics", "--textfile", str(target))
        both = await daemon.sbxctl("metrics", "--textfile", str(target), "--json")
        nowhere = await daemon.sbxctl("metrics", "--textfile", str(tmp_path / "no" / "x"))
    assert (ran.code, ran.stdout, ran.stderr) == (Exit.OK, b"", "")
    assert target.read_text().startswith("# TYPE sbxd_up gauge\n")
    assert os.stat(target).st_ino != before
    assert os.stat(target).st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["admin.sock", "sbxd.prom"], "a partial is left"
    assert both.code == Exit.USAGE
    assert nowhere.code == Exit.UNAVAILABLE
    assert "Traceback" not in nowhere.stderr


async def test_the_textfile_of_a_daemon_that_is_down_says_so_and_nothing_else(
    tmp_path: Path,
) -> None:
    target = tmp_path / "sbxd.prom"
    target.write_text("sbxd_up 1\nsbxd_environments 7\n")
    ran = await sbxctl(
        "--socket", str(tmp_path / "none.sock"), "metrics", "--textfile", str(target)
    )
    assert ran.code == Exit.UNAVAILABLE
    samples = [line for line in target.read_text().splitlines() if not line.startswith("#")]
    assert samples == ["sbxd_up 0"]


RUNS, ENDED = ["invocation:dbus.service", "invocation:sbxd.service"], ["invocation:dbus.service"]


@pytest.mark.parametrize(
    ("links", "asked", "listens", "ended"),
    [
        (RUNS, 5, 1, False),
        (ENDED, 5, 1, True),
        # After a boot and after an upgrade: it waits for its first client.
        (ENDED, None, 1, False),
        (ENDED, 5, 9, False),
        # A systemd that has no such links, or no systemd.
        (["log-extra-fields:x"], 5, 1, False),
        (None, 5, 1, False),
    ],
    ids=["runs", "ended", "booted", "upgraded", "other systemd", "no systemd"],
)
def test_a_service_has_ended_when_it_was_asked_since_it_listens_and_does_not_run(
    tmp_path: Path, links: list[str] | None, asked: int | None, listens: int, ended: bool
) -> None:
    units, file, socket = (tmp_path / name for name in ("units", "sbxd.prom", "admin.sock"))
    for place, seconds in ((file, asked), (socket, listens)):
        if seconds is not None:
            place.touch()
            os.utime(place, (seconds, seconds))
    if links is not None:
        units.mkdir()
        for name in links:
            (units / name).symlink_to("0" * 32)
    assert has_ended(socket, file, units) == ended


async def test_who_does_not_start_it_asks_a_daemon_that_was_never_asked(tmp_path: Path) -> None:
    target = tmp_path / "sbxd.prom"
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        ran = await daemon.sbxctl("metrics", "--no-start", "--textfile", str(target))
        alone = await daemon.sbxctl("metrics", "--no-start")
    assert (ran.code, alone.code) == (Exit.OK, Exit.USAGE)
    assert "sbxd_up 1\n" in target.read_text()


@pytest.mark.parametrize("verb", [("status",), ("top", "--once"), ("pool", "show"), ("metrics",)])
async def test_without_a_daemon_there_is_a_sentence_and_a_hint(
    tmp_path: Path, verb: tuple[str, ...]
) -> None:
    ran = await sbxctl("--socket", str(tmp_path / "none.sock"), *verb)
    assert ran.code == Exit.UNAVAILABLE
    assert "→" in ran.stderr
    assert "Traceback" not in ran.stderr


async def test_status_names_an_authority_that_does_not_answer(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        await daemon.daemon.recorded.emit(
            LeaseAuthorityMissed(authority="tier", environments=2, detail="refused")
        )
        ran = await daemon.sbxctl("status")
    assert "SbxdLeaseAuthorityUnreachable: the lease authority tier" in ran.stdout.decode()


# --- the program itself -------------------------------------------------------------------------


async def test_a_reader_that_goes_away_is_no_bug(tmp_path: Path) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = await trio.run_process(
            [sys.executable, "-m", "sbxctl", "--socket", str(daemon.path), "metrics"],
            stdout=write_end,
            capture_stderr=True,
            check=False,
        )
        os.close(write_end)
    assert b"Traceback" not in done.stderr
    assert b"fault" not in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("options", "environment", "coloured"),
    [((), {}, True), (("--no-color",), {}, False), ((), {"NO_COLOR": "1"}, False)],
)
async def test_colours_are_on_a_terminal_alone_and_go_off(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], coloured: bool
) -> None:
    async with socket_daemon(SCRIPT, tmp_path) as daemon:
        command = ("--socket", str(daemon.path), *options, "status")
        with on_a_terminal(*command, **environment) as (master, program):
            seen = await until_shown(master, b"alerts")
            await ended(program)
    assert bool(re.search(rb"\x1b\[[0-9;]*3[0-9]m", seen)) is coloured
