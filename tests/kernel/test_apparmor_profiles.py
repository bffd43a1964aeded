"""The shipped profiles by themselves: root with every capability and no filter runs under them.

What a profile denies here, nothing else would: the control is the same program without a profile.
"""

import errno
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROFILES = REPOSITORY / "apparmor"
WORKLOAD, DAEMON, LAUNCHER = "sbxd-workload", "sbxd", "sbxd-launcher"
LOADED = Path("/sys/kernel/security/apparmor/profiles")

in_uml = pytest.mark.needs("root", "apparmor", "daemon")

PRELUDE = """
import ctypes, json, os, signal, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
scratch, other = sys.argv[1], int(sys.argv[2])

def attempt(call, *arguments):
    try:
        result = call(*arguments)
        if result == -1:
            return ctypes.get_errno()
    except OSError as problem:
        return problem.errno
    return 0

def write(path, text, mode="wb"):
    with open(path, mode, buffering=0) as file:
        file.write(text)

def trace():
    return libc.ptrace(0x4206, other, None, None)

def in_a_child(call):
    pid = os.fork()
    if pid == 0:
        os._exit(attempt(call))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def mount():
    return libc.mount(b"none", scratch.encode(), b"tmpfs", 0, None)
"""
ATTACKS = """
found = {
    "mount": attempt(mount),
    "remount": attempt(lambda: libc.mount(b"none", b"/mnt/held", b"tmpfs", 32, None)),
    "umount": attempt(lambda: libc.umount2(b"/mnt/held", 2)),
    "trace another": attempt(trace),
    "signal another": attempt(os.kill, other, signal.SIGCONT),
    "a user namespace": in_a_child(lambda: libc.unshare(0x10000000)),
    "a label of its own": attempt(write, "/proc/self/attr/apparmor/exec", b"exec sbxd-launcher"),
    "a setting of the kernel": attempt(write, "/proc/sys/kernel/domainname", b"(none)"),
    "a packet socket": attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0),
    "a datagram": attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM),
    "a raw socket": attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1),
    "a capability": attempt(os.setgroups, [0]),
    "a file of the system": attempt(write, "/etc/planted", b"x"),
    "a socket with a name": attempt(socket.socket(socket.AF_UNIX).connect, "/run/sbxd/worker.sock"),
}
print(json.dumps(found))
"""
# Two of them the kernel answers by its own rule for missing capabilities.
DENIED = {
    "mount": errno.EACCES,
    "remount": errno.EACCES,
    "umount": errno.EPERM,
    "trace another": errno.EACCES,
    "signal another": errno.EACCES,
    "a user namespace": errno.EACCES,
    "a label of its own": errno.EACCES,
    "a setting of the kernel": errno.EACCES,
    "a packet socket": errno.EACCES,
    "a datagram": errno.EACCES,
    "a raw socket": errno.EACCES,
    "a capability": errno.EPERM,
    "a file of the system": errno.EACCES,
    "a socket with a name": errno.EACCES,
}


@pytest.fixture
def victim() -> Iterator[int]:
    """A process that is nobody's business."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def held() -> Iterator[None]:
    """A mount to be taken away, and nothing planted afterwards."""
    place = Path("/mnt/held")
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    yield
    subprocess.run(["umount", "-l", place], check=False, capture_output=True)
    Path("/etc/planted").unlink(missing_ok=True)


def under(profile: str | None, source: str, scratch: Path, other: int) -> Any:
    confined = ["aa-exec", "-p", profile, "--"] if profile else []
    done = subprocess.run(
        [*confined, "/usr/bin/python3", "-c", PRELUDE + source, str(scratch), str(other)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_profiles_are_the_three_that_are_meant() -> None:
    assert {path.name for path in PROFILES.iterdir()} == {WORKLOAD, DAEMON, LAUNCHER}
    for path in PROFILES.iterdir():
        assert f"profile {path.name} " in path.read_text()
    assert "flags=(unconfined)" in (PROFILES / LAUNCHER).read_text(), "see the launcher's unit"
    assert "flags=(unconfined)" not in (PROFILES / WORKLOAD).read_text()


@in_uml
def test_the_profiles_are_loaded_in_their_modes() -> None:
    lines = set(LOADED.read_text().splitlines())
    assert {
        f"{WORKLOAD} (enforce)",
        f"{DAEMON} (enforce)",
        f"{LAUNCHER} (unconfined)",
    } <= lines


@in_uml
def test_the_workloads_profile_denies_what_the_hosts_root_may(
    tmp_path: Path, victim: int, held: None
) -> None:
    assert under(WORKLOAD, ATTACKS, tmp_path, victim) == DENIED


@in_uml
def test_control_without_the_profile_the_hosts_root_may(
    tmp_path: Path, victim: int, held: None
) -> None:
    found = under(None, ATTACKS, tmp_path, victim)
    subprocess.run(["umount", tmp_path], check=True)
    assert found == dict.fromkeys(DENIED, 0)


OF_THE_DAEMON = """
print(json.dumps({
    "execute": attempt(subprocess.run, ["/usr/bin/true"]),
    "write to the system": attempt(write, "/etc/planted", b"x"),
    "look at workspaces": attempt(os.listdir, "/var/lib/sbxd/volumes"),
    "look at unpacked images": attempt(os.listdir, "/var/lib/sbxd/unpacked"),
    "read the password file": attempt(open, "/etc/shadow"),
    "mount": attempt(mount),
    "trace another": attempt(trace),
    "a packet socket": attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0),
    "write to its image store": attempt(write, "/var/lib/sbxd/images/fact/x", b"x"),
    "remove it again": attempt(os.unlink, "/var/lib/sbxd/images/fact/x"),
}))
"""


@in_uml
def test_the_daemons_profile_leaves_it_its_own_folders_and_no_program(
    tmp_path: Path, victim: int, held: None
) -> None:
    own = Path("/var/lib/sbxd/images/fact")
    own.mkdir()
    try:
        found = under(DAEMON, OF_THE_DAEMON, tmp_path, victim)
        control = under(None, OF_THE_DAEMON, tmp_path, victim)
    finally:
        own.rmdir()
        subprocess.run(["umount", tmp_path], check=False)
    allowed = {name for name, code in found.items() if code == 0}
    assert allowed == {"write to its image store", "remove it again"}
    assert set(control.values()) == {0}


def label_of(unit: str) -> str:
    subprocess.run(["systemctl", "start", unit], check=True, timeout=60)
    shown = subprocess.run(
        ["systemctl", "show", "--property=MainPID", "--value", unit],
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(f"/proc/{shown.stdout.strip()}/attr/apparmor/current").read_text().strip("\0\n")


@in_uml
@pytest.mark.parametrize(
    ("unit", "label"),
    [
        ("sbxd.service", f"{DAEMON} (enforce)"),
        ("sbxd-launcher.service", f"{LAUNCHER} (unconfined)"),
    ],
)
def test_the_installed_services_run_under_their_profiles(unit: str, label: str) -> None:
    assert label_of(unit) == label


@pytest.mark.needs("daemon", "lane-container")
def test_the_daemon_starts_where_the_kernel_has_no_apparmor() -> None:
    subprocess.run(["systemctl", "start", "sbxd.service"], check=True, timeout=60)
    done = subprocess.run(
        ["systemctl", "show", "--property=AppArmorProfile", "sbxd.service"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert DAEMON in done.stdout, "the unit names the profile, and is up all the same"
