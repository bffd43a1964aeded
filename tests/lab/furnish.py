"""Lays what a lane needs into its own copy of the root file system, before it boots.

The project's units, sysusers and tmpfiles are copied as they are shipped; the paths that they
name (/usr/bin/sbxd, /usr/lib/sbxd/sbxd-launcher) are links to entry points in the virtual
environment, whose code is the work tree at /src.

Invariant: everything is written below `root`, an overlay that dies with the lane.
"""

import contextlib
import os
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from . import kernel
from .host import IN_LANE_ENVIRONMENT, IN_LANE_SOURCE, REPOSITORY, LabError

_FILES = Path(__file__).with_name("files")
_CONFIGURATION = Path(__file__).with_name("configuration")
_ENVIRONMENT = Path("opt/sbxd")
_UNITS = Path("usr/lib/systemd/system")
SHIPPED = REPOSITORY / "packaging" / "files.toml"

SOCKETS = ("sbxd.socket", "sbxd-admin.socket", "sbxd-launcher.socket")

# Units that would act on the machine's hardware, clock or settings, or that only cost time.
_MASKED = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "dev-hugepages.mount",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "modprobe@drm.service",
    "modprobe@efi_pstore.service",
    "getty.target",
    "ldconfig.service",
    "proc-sys-fs-binfmt_misc.automount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-binfmt.service",
    "systemd-firstboot.service",
    "systemd-hibernate-clear.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-machine-id-commit.service",
    "systemd-modules-load.service",
    "systemd-network-generator.service",
    "systemd-pcrphase.service",
    "systemd-random-seed.service",
    "systemd-remount-fs.service",
    "systemd-sysctl.service",
    "systemd-timesyncd.service",
    "systemd-udev-trigger.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-udevd.service",
    "systemd-update-done.service",
    "systemd-update-utmp.service",
)


@dataclass(frozen=True)
class Furnishing:
    """What may differ from lane to lane."""

    lane: str
    channel: str
    daemon: bool
    bare: bool


def furnish(root: Path, what: Furnishing) -> None:
    """Install the project into `root` as its package would, and the lab's own few files.

    A bare lane gets the lab's files alone: it is for the package itself.
    """
    shutil.copytree(_FILES, root, dirs_exist_ok=True)
    if what.bare:
        shutil.rmtree(root / "etc/sbxd")
    else:
        _install_shipped(root)
        _link_source(root)
    wanted = [f"sockets.target.wants/{name}" for name in SOCKETS] if what.daemon else []
    wanted.append("multi-user.target.wants/sbxd-lab-agent.service")
    system = root / "etc/systemd/system"
    for place in wanted:
        if not (root / _UNITS / Path(place).name).exists():
            raise LabError(f"units/{Path(place).name} is missing: it cannot be enabled in a lane")
        _link(system / place, f"/{_UNITS}/{Path(place).name}")
    for name in _MASKED:
        _link(system / name, "/dev/null")
    _link(system / "default.target", f"/{_UNITS}/multi-user.target")
    if what.lane == "qemu":
        _be_patient(root)
    (root / "etc/sbxd-lab").mkdir(exist_ok=True)
    (root / "etc/sbxd-lab/lane").write_text(
        f"SBXD_LANE={what.lane}\nSBXD_LAB_CHANNEL={what.channel}\n"
    )
    (root / "var/log/journal").mkdir(parents=True, exist_ok=True)
    if what.bare:
        return
    (root / "etc/sbxd/service-credential").chmod(0o600)
    shutil.copy(_CONFIGURATION / f"{what.lane}.toml", root / "etc/sbxd/config.toml")
    kernel.run(
        "chroot", str(root), "systemd-sysusers", environment={**os.environ, **IN_LANE_ENVIRONMENT}
    )
    # A module that does not compile is for its importer to report: the status is of no interest.
    with contextlib.suppress(OSError):
        kernel.run(
            *("chroot", str(root), "/opt/sbxd/bin/python", "-m", "compileall", "-qq", "-j", "2"),
            *(f"{IN_LANE_SOURCE}/sbxd", f"{IN_LANE_SOURCE}/sbxctl"),
            environment={**os.environ, **IN_LANE_ENVIRONMENT},
        )


def _install_shipped(root: Path) -> None:
    """What the package lays on a host, from the list that it is made from."""
    for row in tomllib.loads(SHIPPED.read_text())["host"]:
        folder = root / row["to"].lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(REPOSITORY.glob(row["from"])):
            shutil.copy(file, folder / file.name)


def _be_patient(root: Path) -> None:
    """An emulated processor on a busy machine starts an interpreter in tens of seconds."""
    for name in ("sbxd.service", "sbxd-launcher.service"):
        folder = root / "etc/systemd/system" / f"{name}.d"
        folder.mkdir(parents=True)
        (folder / "sbxd-lab.conf").write_text("[Service]\nTimeoutStartSec=300s\nWatchdogSec=300s\n")


def _link_source(root: Path) -> None:
    """Do what `pip install --editable` would, without a build."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    packages = next((root / _ENVIRONMENT / "lib").glob("python3.*")) / "site-packages"
    (packages / "sbxd-source.pth").write_text(f"{IN_LANE_SOURCE}\n")
    about = packages / f"sbxd-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    for name, entry in project["scripts"].items():
        module, _, function = entry.partition(":")
        script = root / _ENVIRONMENT / "bin" / name
        script.write_text(
            "#!/opt/sbxd/bin/python\n"
            "import sys\n"
            f"from {module} import {function}\n"
            f"sys.exit({function}())\n"
        )
        script.chmod(0o755)
        _link(root / "usr/bin" / name, f"/{_ENVIRONMENT}/bin/{name}")
    _compile_guest_init(root)
    _link(root / "usr/lib/sbxd/sbxd-launcher", f"/{_ENVIRONMENT}/bin/sbxd-launcher")


def _compile_guest_init(root: Path) -> None:
    """As `make guest` does, with the lane's own compiler."""
    scratch = root / "tmp/guest"
    shutil.copytree(REPOSITORY / "guest", scratch)
    (root / "usr/lib/sbxd").mkdir(parents=True, exist_ok=True)
    kernel.run(
        *("chroot", str(root), "/tmp/guest/build.sh", "/usr/lib/sbxd/sbx-guest-init"),
        environment={**os.environ, **IN_LANE_ENVIRONMENT},
    )
    shutil.rmtree(scratch)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
