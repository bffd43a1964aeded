"""The shipped units: what systemd says of them, and what the launcher's must leave unset."""

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
UNITS = REPOSITORY / "units"
RECORD = REPOSITORY / "docs" / "units.md"
SERVICES = (
    "sbxd.service",
    "sbxd-launcher.service",
    "sbxd-metrics.service",
    "sbxd-reap.service",
    "sbxd-worker-artifacts.service",
)
# How the table of reasons calls them.
CALLED = {
    "sbxd.service": "sbxd",
    "sbxd-launcher.service": "launcher",
    "sbxd-metrics.service": "metrics",
    "sbxd-reap.service": "reap",
    "sbxd-worker-artifacts.service": "sweep",
}

# What a process of the launcher's hands down would break a sandbox or be set on every workload.
# DESIGN.md section 2; the comment in the unit gives the reasons.
UNSET_IN_LAUNCHER = {
    "AppArmorProfile",
    "DeviceAllow",
    "DevicePolicy",
    "LockPersonality",
    "MemoryDenyWriteExecute",
    "NoNewPrivileges",
    "OOMScoreAdjust",
    "PrivateDevices",
    "PrivateUsers",
    "ProcSubset",
    "ProtectClock",
    "ProtectControlGroups",
    "ProtectHostname",
    "ProtectKernelLogs",
    "ProtectKernelTunables",
    "ProtectProc",
    "RestrictNamespaces",
    "RestrictSUIDSGID",
    "SystemCallFilter",
    "User",
}

in_a_lane = pytest.mark.needs("daemon", "systemd")


def settings(unit: str) -> list[tuple[str, str]]:
    """The settings of a unit's [Service] or other main section, in their order."""
    lines = (UNITS / unit).read_text().splitlines()
    pairs = (line.partition("=") for line in lines if re.match(r"[A-Z]\w*=", line))
    return [(name, value) for name, _, value in pairs]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")


def journal_of(unit: str) -> str:
    """The last that the unit, or PID 1 of it, has said up to now: what an ended process wrote may
    still be on its way to the journal."""
    assert run("journalctl", "--sync").returncode == 0
    return run("journalctl", "--no-pager", "-o", "cat", "-u", unit, "-n", "200").stdout


def test_the_launcher_leaves_unset_what_a_sandbox_would_inherit() -> None:
    assert not UNSET_IN_LAUNCHER & {name for name, _ in settings("sbxd-launcher.service")}
    # The control: the same reading finds what the other unit does set.
    assert "NoNewPrivileges" in {name for name, _ in settings("sbxd.service")}


@pytest.mark.parametrize("unit", SERVICES)
def test_the_hardening_is_in_alphabetical_order(unit: str) -> None:
    service = (UNITS / unit).read_text().partition("[Service]")[2].partition("[Install]")[0]
    names = [line.partition("=")[0] for line in service.splitlines() if "=" in line]
    assert names == sorted(names)


def test_every_line_of_a_service_has_its_reason() -> None:
    wanted: dict[str, set[str]] = {}
    for unit in SERVICES:
        service = (UNITS / unit).read_text().partition("[Service]")[2].partition("[Install]")[0]
        for name in re.findall(r"^([A-Z]\w*)=", service, re.MULTILINE):
            wanted.setdefault(name, set()).add(CALLED[unit])
    _, _, below = RECORD.read_text().partition("## Line by line")
    found = {}
    for name, units, why in re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", below, re.M):
        listed = set(CALLED.values()) if units == "all" else set(units.split(", "))
        assert len(why) > 10
        found[name] = listed
    assert found == wanted


def test_every_service_of_the_tree_is_looked_at() -> None:
    assert {path.name for path in UNITS.glob("*.service")} == set(SERVICES) == set(CALLED)


def test_the_daemon_runs_without_any_capability() -> None:
    values = dict(settings("sbxd.service"))
    assert values["CapabilityBoundingSet"] == values["AmbientCapabilities"] == ""
    assert values["User"] == values["Group"] == "sbxd"


@in_a_lane
def test_systemd_finds_nothing_to_complain_of() -> None:
    names = sorted(path.name for path in UNITS.iterdir())
    done = run("systemd-analyze", "verify", *names)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@in_a_lane
def test_a_planted_mistake_is_complained_of(tmp_path: Path) -> None:
    text = (UNITS / "sbxd.service").read_text().replace("LimitCORE=0", "LimitCORES=0")
    planted = tmp_path / "planted.service"
    planted.write_text(text)
    assert "LimitCORES" in run("systemd-analyze", "verify", str(planted)).stderr


@pytest.mark.needs("daemon", "lane-container")  # the number depends on systemd's version
@pytest.mark.parametrize("unit", SERVICES)
def test_the_recorded_exposure_is_the_one_that_systemd_computes(unit: str) -> None:
    done = run("systemd-analyze", "security", "--no-pager", unit)
    found = re.search(rf"exposure level for {re.escape(unit)}: ([0-9.]+) ", done.stdout)
    assert found, done.stdout + done.stderr
    row = re.search(rf"^\| `{re.escape(unit)}` \| ([0-9.]+) \|", RECORD.read_text(), re.MULTILINE)
    assert row, f"{RECORD.name} has no row for {unit}"
    assert row[1] == found[1], f"record {found[1]} for {unit} in docs/units.md"


def status_of(unit: str) -> dict[str, str]:
    """/proc/PID/status of the unit's main process, started if need be (it reports readiness)."""
    started = run("systemctl", "start", unit)
    assert started.returncode == 0, run("journalctl", "--no-pager", "-n", "30", "-u", unit).stdout
    pid = run("systemctl", "show", "--property=MainPID", "--value", unit).stdout.strip()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@in_a_lane
def test_the_running_daemon_has_no_right_to_lose() -> None:
    status = status_of("sbxd.service")
    for capabilities in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[capabilities], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert "0" not in status["Uid"].split() + status["Gid"].split()


@in_a_lane
def test_the_running_launcher_is_root_within_its_bounds() -> None:
    status = status_of("sbxd-launcher.service")
    assert set(status["Uid"].split()) == {"0"}
    assert status["NoNewPrivs"] == "0"
    bounds = int(status["CapBnd"], 16)
    cap_sys_admin, cap_sys_module, cap_sys_boot = 21, 16, 22
    assert bounds >> cap_sys_admin & 1
    assert not bounds >> cap_sys_module & 1
    assert not bounds >> cap_sys_boot & 1


@in_a_lane
@pytest.mark.parametrize(
    ("path", "owner", "group", "mode"),
    [
        ("/run/sbxd", "root", "root", "755"),
        ("/run/sbxd/worker.sock", "sbxd", "sbxd-workers", "660"),
        ("/run/sbxd/admin.sock", "root", "sbxd-admin", "660"),
        ("/run/sbxd-launcher", "root", "root", "755"),
        ("/run/sbxd-launcher/launcher.sock", "sbxd", "root", "600"),
        ("/var/lib/sbxd", "root", "root", "755"),
        ("/var/lib/sbxd/images", "sbxd", "sbxd", "755"),
        ("/var/lib/sbxd/audit", "sbxd", "sbxd", "700"),
        ("/var/lib/sbxd/journal", "sbxd", "sbxd", "700"),
        ("/var/lib/sbxd/uids", "root", "root", "700"),
        ("/var/lib/sbxd/unpacked", "root", "root", "700"),
        ("/var/lib/sbxd/volumes", "root", "root", "700"),
    ],
)
def test_sockets_and_folders_belong_to_whom_they_should(
    path: str, owner: str, group: str, mode: str
) -> None:
    done = run("stat", "--format=%U %G %a", path)
    assert done.stdout.split() == [owner, group, mode], done.stderr


@in_a_lane
def test_systemd_reads_the_launcher_as_it_is_meant() -> None:
    done = run(
        *("systemctl", "show", "sbxd-launcher.service"),
        *("--property=NoNewPrivileges", "--property=ProtectProc", "--property=DevicePolicy"),
        *("--property=RestrictNamespaces", "--property=OOMScoreAdjust", "--property=PrivateMounts"),
    )
    values = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert values == {
        "DevicePolicy": "auto",
        "NoNewPrivileges": "no",
        "OOMScoreAdjust": "0",
        "PrivateMounts": "yes",
        "ProtectProc": "default",
        "RestrictNamespaces": "no",
    }


@in_a_lane
def test_the_reapers_unit_reaches_the_daemon_without_being_root() -> None:
    started = run("systemctl", "start", "sbxd-reap.service")
    assert started.returncode == 0, run("journalctl", "--no-pager", "-u", "sbxd-reap").stdout
    shown = run("systemctl", "show", "--property=Result,User", "sbxd-reap.service").stdout
    assert "Result=success" in shown
    assert "environments asked about" in journal_of("sbxd-reap.service")


@in_a_lane
def test_the_timer_lets_it_ask_every_minute() -> None:
    started = run("systemctl", "start", "sbxd-reap.timer")
    try:
        assert started.returncode == 0, started.stderr
        shown = run("systemctl", "show", "--property=TimersMonotonic", "sbxd-reap.timer").stdout
        # The times of the next elapse are shown beside them, and may be "9h 41min" as well.
        asked = set(re.findall(r"(On\w+USec)=1min ;", shown))
        assert asked == {"OnActiveUSec", "OnUnitInactiveUSec"}, shown
    finally:
        run("systemctl", "stop", "sbxd-reap.timer")


# --- the host comes first ----------------------------------------------------------------------

SLICE = Path("/sys/fs/cgroup/sbx.slice")
SPIN = "while :; do :; done"


@pytest.mark.needs("daemon", "limits", "systemd")
def test_all_sandboxes_together_leave_memory_and_process_numbers_to_the_host() -> None:
    assert run("systemctl", "start", "sbx.slice").returncode == 0
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert int((SLICE / "memory.max").read_text()) <= total * 0.8
    assert (SLICE / "memory.swap.max").read_text().strip() == "0"
    numbers = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert int((SLICE / "pids.max").read_text()) <= numbers / 2
    assert int((SLICE / "cpu.weight").read_text()) == 20


def cpu_usec(group: Path) -> int:
    line = (group / "cpu.stat").read_text().splitlines()[0]
    return int(line.removeprefix("usage_usec "))


@pytest.mark.needs("daemon", "lane-uml", "limits", "systemd")  # one processor, for both
def test_a_host_that_wants_the_processor_has_most_of_it_beside_a_busy_sandbox() -> None:
    """Both spin on one processor; who is in sbx.slice has a fifth of a share of the other."""
    started = [
        run("systemd-run", f"--slice={slice_}", f"--unit={unit}", "/bin/sh", "-c", SPIN)
        for unit, slice_ in (("in-slice-test", "sbx.slice"), ("host-test", "system.slice"))
    ]
    try:
        assert [done.returncode for done in started] == [0, 0], started
        inside = SLICE / "in-slice-test.service"
        host = Path("/sys/fs/cgroup/system.slice/host-test.service")
        before = cpu_usec(inside), cpu_usec(host)
        # Waiting for processor time to be spent, whoever gets it: no clock of ours.
        while cpu_usec(inside) - before[0] + cpu_usec(host) - before[1] < 3_000_000:
            run("true")
        theirs, ours = cpu_usec(inside) - before[0], cpu_usec(host) - before[1]
        assert ours > 2 * theirs, (ours, theirs)
    finally:
        run("systemctl", "stop", "in-slice-test.service", "host-test.service")


@pytest.mark.needs("daemon", "lane-container", "systemd")
@pytest.mark.parametrize("unit", ["sbxd.service", "sbxd-launcher.service"])
def test_a_service_that_hangs_is_killed_and_started_again(unit: str) -> None:
    drop_in = Path(f"/run/systemd/system/{unit}.d/test.conf")
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    drop_in.write_text("[Service]\nWatchdogSec=2s\n")
    try:
        run("systemctl", "daemon-reload")
        assert run("systemctl", "restart", unit).returncode == 0
        main = ("systemctl", "show", "--property=MainPID", "--value", unit)
        before = run(*main).stdout.strip()
        assert int(before) > 1
        run("kill", "-STOP", before)
        wait = (
            f"until p=$({' '.join(main)}) && [ $p != {before} ] && [ $p != 0 ]; do sleep 0.2; done"
        )
        assert run("/bin/sh", "-c", wait).returncode == 0
        assert "Watchdog timeout" in journal_of(unit)
    finally:
        drop_in.unlink()
        drop_in.parent.rmdir()
        run("systemctl", "daemon-reload")
        run("systemctl", "restart", unit)
