"""What each lane is known to have and to lack, so that no test passes for the wrong reason.

A pass in the lane `container` proves nothing about limits, quota or AppArmor: these tests hold the
reasons. When one fails on another machine, the table in `features.py` is wrong for it.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.lab.features import landlock_version

CGROUP = Path("/sys/fs/cgroup")
STATE = Path("/var/lib/sbxd")
CAP_SYS_RESOURCE = 24
FORKS = """
import os, signal
children = 0
try:
    while children < 10:
        if os.fork() == 0:
            signal.pause()
        children += 1
except BlockingIOError:
    pass
print(children, flush=True)
"""

in_container = pytest.mark.needs("lane-container")
in_gvisor = pytest.mark.needs("lane-gvisor")
in_uml = pytest.mark.needs("lane-uml")
in_qemu = pytest.mark.needs("lane-qemu")
in_each = pytest.mark.parametrize(
    "lane",
    [
        pytest.param("container", marks=in_container),
        pytest.param("gvisor", marks=in_gvisor),
        pytest.param("uml", marks=in_uml),
        pytest.param("qemu", marks=in_qemu),
    ],
)
in_limiting = pytest.mark.parametrize(
    "lane", [pytest.param("uml", marks=in_uml), pytest.param("qemu", marks=in_qemu)]
)


def run(*command: str, timeout: float = 60) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=timeout, cwd="/"
    )
    return done.stdout.strip()


def mount_options(kind: str, where: str) -> str:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source = line.partition(" - ")
        if source.split()[0] == kind and fields.split()[4] == where:
            return f"{fields.split()[5]},{source.split()[2]}"
    raise AssertionError(f"no {kind} at {where}")


@in_each
def test_the_lane_is_the_one_it_says(lane: str) -> None:
    assert os.environ["SBXD_LANE"] == lane
    assert Path("/proc/1/comm").read_text().strip() == "systemd"
    assert run("systemctl", "is-system-running") == "running"


@in_each
def test_systemd_is_new_enough_to_speak_for_a_current_host(lane: str) -> None:
    assert int(run("systemctl", "--version").split()[1]) >= 257


@in_each
def test_the_work_tree_is_the_one_that_is_imported(lane: str) -> None:
    where = run("/opt/sbxd/bin/python", "-c", "import sbxd; print(sbxd.__file__)")
    assert where == "/src/sbxd/__init__.py"


@in_each
def test_the_sockets_listen_as_the_units_say(lane: str) -> None:
    for unit in ("sbxd.socket", "sbxd-admin.socket", "sbxd-launcher.socket"):
        assert run("systemctl", "is-active", unit) == "active"
    assert Path("/run/sbxd-launcher/launcher.sock").stat().st_mode & 0o777 == 0o600


@in_each
def test_the_image_for_sandboxes_is_there(lane: str) -> None:
    listing = run("tar", "--list", "--file", "/var/cache/sbxd-lab/image.tar")
    assert "./usr/bin/python3" in listing.splitlines()
    larger = Path("/var/cache/sbxd-lab/image-workloads.tar")
    assert larger.exists() == (lane == "container")
    programs = Path("/var/cache/sbxd-lab/image-programs.tar")
    assert programs.exists() == (lane in ("container", "gvisor"))


@in_each
def test_the_programs_that_read_metrics_are_in_one_lane_and_do_not_run(lane: str) -> None:
    programs = Path("/opt/prometheus")
    assert programs.exists() == (lane == "container")
    if programs.exists():
        assert "promtool, version 2." in run(str(programs / "promtool"), "--version")
        assert not Path("/usr/lib/systemd/system/prometheus.service").exists()


@in_each
def test_a_service_gets_its_credential(lane: str) -> None:
    got = run(
        *("systemd-run", "--quiet", "--wait", "--pipe", "--property=User=sbxd"),
        *("--property=LoadCredential=x:/etc/sbxd/service-credential", "/bin/sh", "-c"),
        'cat "$CREDENTIALS_DIRECTORY/x"',
    )
    assert got == Path("/etc/sbxd/service-credential").read_text()


@in_each
def test_cgroup_kill_empties_a_group(lane: str) -> None:
    group = CGROUP / "fact-kill"
    group.mkdir()
    sleeper = subprocess.Popen(["sleep", "100"])
    (group / "cgroup.procs").write_text(str(sleeper.pid))
    assert "populated 1" in (group / "cgroup.events").read_text()
    (group / "cgroup.kill").write_text("1")
    assert sleeper.wait(timeout=10) == -9
    assert "populated 0" in (group / "cgroup.events").read_text()
    group.rmdir()


@in_each
def test_a_loop_device_can_be_mounted(lane: str, tmp_path: Path) -> None:
    image = STATE / "fact.img"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    run("mkfs.ext4", "-q", str(image))
    run("mount", "-o", "loop", str(image), str(tmp_path))
    try:
        assert "loop" in run("findmnt", "--noheadings", "--output", "SOURCE", str(tmp_path))
    finally:
        run("umount", str(tmp_path))
        image.unlink()


@in_each
def test_an_idmapped_mount_of_the_state_directory_works(lane: str, tmp_path: Path) -> None:
    source = STATE / "fact-idmap"
    source.mkdir()
    (source / "file").touch()
    try:
        run("mount", "--bind", "-o", "X-mount.idmap=b:0:1879048192:1", str(source), str(tmp_path))
        assert (tmp_path / "file").stat().st_uid == 1879048192
        run("umount", str(tmp_path))
    finally:
        (source / "file").unlink()
        source.rmdir()


@in_each
def test_ctime_is_fine_from_linux_6_13_on_once_it_has_been_looked_at(lane: str) -> None:
    """A change after a stat has a ctime of its own there; before, changes within one tick share it.

    (New files, whose ctime nobody has looked at, share a tick's on any kernel.)
    """
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    file = STATE / "fact-ctime"
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        seen = [_ctime_of_a_change(descriptor) for _ in range(50)]
        if version < (6, 13):
            # A slow lane may need more than a tick for a change; two in one tick come soon.
            while len(set(seen)) == len(seen) and len(seen) < 20_000:
                seen.append(_ctime_of_a_change(descriptor))
    finally:
        os.close(descriptor)
        file.unlink()
    assert (len(set(seen)) == len(seen)) == (version >= (6, 13))


def _ctime_of_a_change(descriptor: int) -> int:
    os.fchmod(descriptor, 0o600)
    return os.fstat(descriptor).st_ctime_ns


@in_container
def test_container_has_cgroup2_without_limits() -> None:
    controllers = set((CGROUP / "cgroup.controllers").read_text().split())
    assert not controllers & {"memory", "pids", "cpu", "io"}


@in_container
def test_container_has_no_nsdelegate() -> None:
    assert "nsdelegate" not in mount_options("cgroup2", "/sys/fs/cgroup")


@in_container
def test_container_has_no_cap_sys_resource() -> None:
    status = Path("/proc/1/status").read_text()
    bounding = next(line for line in status.splitlines() if line.startswith("CapBnd"))
    assert not int(bounding.split()[1], 16) >> CAP_SYS_RESOURCE & 1


@in_container
def test_container_has_no_apparmor() -> None:
    assert not Path("/sys/module/apparmor/parameters/enabled").exists()


@in_container
def test_container_has_landlock() -> None:
    assert landlock_version() >= 1


@in_container
def test_container_cannot_see_or_change_the_machine() -> None:
    assert "ro" in mount_options("sysfs", "/sys").split(",")
    interfaces = {path.name for path in Path("/sys/class/net").iterdir()}
    assert interfaces == {"lo"}
    assert all(int(p.name) < 100000 for p in Path("/proc").iterdir() if p.name.isdigit())


@in_container
def test_container_runs_gvisor_at_all() -> None:
    assert "runsc version" in run("runsc", "--version")


@in_limiting
def test_a_lane_with_limits_has_the_controllers(lane: str) -> None:
    controllers = set((CGROUP / "cgroup.controllers").read_text().split())
    assert {"cpu", "io", "memory", "pids"} <= controllers


@in_limiting
def test_a_lane_with_limits_can_hold_a_cgroup_to_a_rate_of_its_disk(lane: str) -> None:
    group = CGROUP / "lab-io"
    group.mkdir()
    try:
        device = Path("/var/lib/sbxd").stat().st_dev
        line = f"{os.major(device)}:{os.minor(device)} wbps=1048576"
        (group / "io.max").write_text(line)
        assert line.split()[1] in (group / "io.max").read_text()
        assert (group / "io.stat").exists()
    finally:
        group.rmdir()


@in_limiting
def test_a_lane_with_limits_has_nsdelegate(lane: str) -> None:
    assert "nsdelegate" in mount_options("cgroup2", "/sys/fs/cgroup")


@in_limiting
def test_a_lane_with_limits_kills_what_exceeds_memory_max(lane: str) -> None:
    hog = "x = bytearray(200 << 20); print(len(x))"
    done = subprocess.run(
        [
            *("systemd-run", "--quiet", "--wait", "--pipe", "--unit=fact-memory"),
            *("--property=MemoryMax=40M", "--property=MemorySwapMax=0"),
            *("/usr/bin/python3", "-c", hog),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    run("systemctl", "reset-failed", "fact-memory.service")
    assert done.stdout == ""
    assert done.returncode != 0
    control = run(
        *("systemd-run", "--quiet", "--wait", "--pipe", "--property=MemoryMax=400M"),
        *("/usr/bin/python3", "-c", hog),
    )
    assert control == str(200 << 20)


@in_limiting
def test_a_lane_with_limits_refuses_forks_over_pids_max(lane: str) -> None:
    def children(tasks_max: int) -> int:
        """How many children a service with this limit had at once, of 10 that it wanted."""
        limit = f"--property=TasksMax={tasks_max}"
        words = ("systemd-run", "--quiet", "--wait", "--pipe", limit, "/usr/bin/python3")
        return int(run(*words, "-c", FORKS, timeout=120))

    assert children(5) == 4, "and its first process"
    assert children(50) == 10, "the control"


@in_limiting
def test_a_lane_with_limits_enforces_apparmor(lane: str, tmp_path: Path) -> None:
    assert Path("/sys/module/apparmor/parameters/enabled").read_text().strip() == "Y"
    program = Path("/usr/local/bin/fact-cat")
    program.write_bytes(Path("/usr/bin/cat").read_bytes())
    program.chmod(0o755)
    secret = Path("/var/tmp/fact-secret")
    secret.write_text("control")
    assert run(str(program), str(secret)) == "control"
    profile = tmp_path / "profile"
    profile.write_text(
        "profile fact /usr/local/bin/fact-cat {\n  /** mr,\n  deny /var/tmp/fact-secret r,\n}\n"
    )
    run("apparmor_parser", "--replace", "--skip-cache", str(profile))
    try:
        done = subprocess.run([program, secret], capture_output=True, text=True)
        assert done.returncode == 1
        assert "Permission denied" in done.stderr
    finally:
        run("apparmor_parser", "--remove", str(profile))


@in_limiting
def test_a_lane_with_limits_enforces_project_quota_in_bytes_and_inodes(lane: str) -> None:
    assert "prjquota" in mount_options("xfs", str(STATE))
    folder = STATE / "fact-quota"
    folder.mkdir()
    setup = (f"project -s -p {folder} 4242", "limit -p bhard=5m ihard=20 4242")
    for command in setup:
        run("xfs_quota", "-x", "-c", command, str(STATE))
    nobody = {"user": 65534, "group": 65534}
    os.chown(folder, 65534, 65534)
    big = subprocess.run(
        ["dd", "if=/dev/zero", f"of={folder}/big", "bs=1M", "count=8"],
        capture_output=True,
        text=True,
        **nobody,  # type: ignore[call-overload]
    )
    assert big.returncode == 1
    assert (folder / "big").stat().st_size <= 5 << 20
    many = subprocess.run(
        ["sh", "-c", f"for i in $(seq 30); do : > {folder}/$i || exit 9; done"],
        capture_output=True,
        **nobody,  # type: ignore[call-overload]
    )
    assert many.returncode != 0
    assert len(list(folder.iterdir())) < 20
    run("rm", "-r", str(folder))


@in_uml
def test_uml_has_no_landlock() -> None:
    assert landlock_version() == 0


@in_uml
def test_uml_is_a_kernel_of_its_own() -> None:
    assert "User Mode Linux" in Path("/proc/cpuinfo").read_text()


@in_qemu
def test_qemu_has_apparmor_and_landlock_at_once() -> None:
    assert landlock_version() >= 1
    stacked = Path("/sys/kernel/security/lsm").read_text().strip().split(",")
    assert {"apparmor", "landlock"} <= set(stacked)


@in_qemu
def test_qemu_is_debian_s_own_kernel() -> None:
    assert "deb13" in os.uname().release


@in_qemu
def test_qemu_runs_gvisor_at_all() -> None:
    said = run("runsc", "--network=none", "--ignore-cgroups", "do", "echo", "inside", timeout=120)
    assert said.endswith("inside")


@in_qemu
def test_qemu_has_no_route_out_of_it() -> None:
    interfaces = {path.name for path in Path("/sys/class/net").iterdir()}
    assert interfaces == {"lo"}
