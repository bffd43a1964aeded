"""An operator makes a typo, sees it, corrects it: the service is not started for ever meanwhile,
and who asks for work is turned away and not left waiting.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sbxctl.exits import Exit
from tests.redteam.configuration import current, put
from tests.redteam.operator import SERVICE, configured, now, said, start

pytestmark = pytest.mark.needs("daemon", "root", "lane-container")

UNITS = Path(__file__).resolve().parents[2] / "units"
TYPO = 'sandbox = "docker"\n'
METRICS = Path("/run/sbxd-metrics/sbxd.prom")
SOCKETS = ("sbxd.socket", "sbxd-admin.socket")
PROFILES = Path("/etc/sbxd/seccomp")
WEAKER = "weaker-than-ours"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")


def shown(unit: str, setting: str) -> str:
    return run("systemctl", "show", f"--property={setting}", "--value", unit).stdout.strip()


def at_rest() -> None:
    """Until the service has failed, nothing starts it and its sockets listen."""
    while (
        shown(SERVICE, "ActiveState") != "failed"
        or [shown(each, "SubState") for each in SOCKETS] != ["listening"] * 2
        or run("systemctl", "list-jobs", "--no-legend", SERVICE).stdout.strip()
    ):
        os.sched_yield()


def test_a_typo_is_said_once_to_each_who_asks_and_corrected_without_a_word_to_systemd() -> None:
    right = current()
    with configured(TYPO):
        since = now()
        assert start() != 0
        assert shown(SERVICE, "ExecMainStatus") == "2"
        # Not `auto-restart`: nothing starts it again by itself.
        assert (shown(SERVICE, "ActiveState"), shown(SERVICE, "SubState")) == ("failed", "failed")
        assert said(since).count("refusing to start") == 1

        refused = run("sbxctl", "ls")
        assert refused.returncode == Exit.UNAVAILABLE
        assert "sbxctl doctor" in refused.stderr
        at_rest()
        # One start for that client, a second at most when it came as the first one ended.
        assert 2 <= said(since).count("refusing to start") <= 3

        doctor = run("sbxctl", "doctor", "--json")
        assert doctor.returncode == Exit.HOST_DEGRADED
        items = {each["name"]: each for each in json.loads(doctor.stdout)}
        assert "namespaces" in items["configuration"]["detail"]
        assert "sbxctl config check" in items["configuration"]["fix"]
        assert "refused to start" in items["sbxd"]["detail"]
        assert "systemctl restart sbxd" in items["sbxd"]["fix"]
        at_rest()

        # Corrected: the next client is served, as is `systemctl restart sbxd`.
        put(right)
        served = run("sbxctl", "doctor", "--json")
        items = {each["name"]: each for each in json.loads(served.stdout)}
        assert items["sbxd"]["state"] == "ok"
        assert shown(SERVICE, "ActiveState") == "active"
        assert run("systemctl", "restart", SERVICE).returncode == 0


def measured() -> str:
    """What the file for node_exporter says once the timer's unit has run."""
    run("systemctl", "reset-failed", "sbxd-metrics.service")  # it is asked more often than a timer
    assert run("systemctl", "start", "sbxd-metrics.service").returncode == 0
    return METRICS.read_text()


def test_the_metrics_timer_tries_neither_a_typo_again_nor_starts_what_was_stopped() -> None:
    assert "sbxd_up 1\n" in measured()
    with configured(TYPO):
        assert start() != 0
        at_rest()
        since = now()
        texts = [measured() for _ in range(3)]
        at_rest()
        assert said(since).count("refusing to start") == 0
        # As after a boot: the first question is asked, and no other.
        METRICS.unlink()
        texts.append(measured())
        at_rest()
        since = now()
        texts.append(measured())
        at_rest()
        assert said(since).count("refusing to start") == 0
        # The control: a client does have it started.
        assert run("sbxctl", "metrics").returncode == Exit.UNAVAILABLE
        at_rest()
        assert said(since).count("refusing to start") >= 1
    assert [text.splitlines()[-1] for text in texts] == ["sbxd_up 0"] * 5
    assert "sbxd_up 1\n" in measured()
    assert run("systemctl", "stop", SERVICE).returncode == 0
    assert "sbxd_up 0\n" in measured()
    assert shown(SERVICE, "ActiveState") == "inactive"
    # As an upgrade does: the sockets alone are started, and the daemon waits for its first client.
    everything = (*SOCKETS, SERVICE)
    assert run("systemctl", "stop", *everything).returncode == 0
    assert "sbxd_up 0\n" in measured()
    assert {shown(each, "ActiveState") for each in everything} == {"inactive"}
    assert run("systemctl", "start", *SOCKETS).returncode == 0
    assert shown(SERVICE, "ActiveState") == "inactive"
    assert "sbxd_up 1\n" in measured()
    assert shown(SERVICE, "ActiveState") == "active"


def test_control_a_crash_is_followed_by_a_start() -> None:
    assert start() == 0
    before = shown(SERVICE, "MainPID")
    assert run("systemctl", "kill", "--signal=KILL", SERVICE).returncode == 0
    while shown(SERVICE, "ActiveState") != "active" or shown(SERVICE, "MainPID") == before:
        os.sched_yield()
    assert run("sbxctl", "ls").returncode == 0


@contextmanager
def a_profile_that_opens_more() -> Iterator[None]:
    """The launcher refuses it, says so, and starts."""
    shipped = json.loads(Path("/usr/share/sbxd/seccomp/workload.json").read_text())
    existed = PROFILES.exists()
    PROFILES.mkdir(mode=0o755, exist_ok=True)
    file = PROFILES / f"{WEAKER}.json"
    try:
        more = {"comment": "More.", "names": ["ptrace"], "action": "SCMP_ACT_ALLOW"}
        shipped["syscalls"].append(more)
        file.write_text(json.dumps(shipped))
        yield
    finally:
        file.unlink()
        if not existed:
            PROFILES.rmdir()
        subprocess.run(["systemctl", "restart", "sbxd-launcher"], check=True, timeout=120)


def test_the_launchers_lines_have_their_urgency_and_logs_filters_by_it() -> None:
    with a_profile_that_opens_more():
        since = run("date", "+%Y-%m-%dT%H:%M:%S").stdout.strip()
        assert run("systemctl", "restart", "sbxd-launcher").returncode == 0
        assert run("journalctl", "--sync").returncode == 0
        lines = {
            priority: run("sbxctl", "logs", "launcher", "-p", priority, "--since", since).stdout
            for priority in ("err", "info")
        }
    assert f"profile {WEAKER} is refused" in lines["err"]
    # The control: what is no error is there, and not among the errors.
    assert "profile workload: sha256" in lines["info"]
    assert "profile workload: sha256" not in lines["err"]
    assert "<3>" not in lines["err"]


# A service as its unit starts it, with a fault in its first step.
FAULTY = {
    "sbxd-launcher.service": (
        "import sbxd.launcher.__main__ as launcher; launcher._arguments = int; launcher.main()"
    ),
    "sbxd.service": "import sys, sbxd.__main__ as sbxd; sbxd._serve = int; sys.exit(sbxd.main())",
}
COPY = Path("/run/systemd/system/sbxd-test-traceback.service")


@pytest.mark.parametrize("unit", FAULTY)
def test_each_line_of_a_services_traceback_is_an_error_of_the_journal(unit: str) -> None:
    shipped = (UNITS / unit).read_text()
    service = shipped.partition("[Service]\n")[2].partition("[Install]")[0]
    replaced = ("ExecStart", "LoadCredential", "NotifyAccess", "Restart", "Sockets", "Type=")
    lines = [line for line in service.splitlines() if not line.startswith((*replaced, "Watchdog"))]
    start_faulty = f'ExecStart=/opt/sbxd/bin/python -c "{FAULTY[unit]}"'
    COPY.write_text("\n".join(["[Service]", *lines, start_faulty, "WorkingDirectory=/src", ""]))
    try:
        assert run("systemctl", "daemon-reload").returncode == 0
        since = now()
        assert run("systemctl", "start", "--wait", COPY.name).returncode != 0
        assert run("journalctl", "--sync").returncode == 0
        shown = run(
            *("journalctl", f"--after-cursor={since}", "--output=json"),
            *(f"_SYSTEMD_UNIT={COPY.name}", "_TRANSPORT=stdout"),
        ).stdout
    finally:
        COPY.unlink()
        run("systemctl", "reset-failed", COPY.name)
        run("systemctl", "daemon-reload")
    said_there = [json.loads(line) for line in shown.splitlines()]
    assert said_there[0]["MESSAGE"] == "Traceback (most recent call last):"
    assert "Error: " in said_there[-1]["MESSAGE"]
    assert len(said_there) > 3
    assert {each["PRIORITY"] for each in said_there} == {"3"}
