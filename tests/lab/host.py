"""What the lab needs of the machine it runs on, and where the repository's own folders are.

Invariants: nothing here changes a mount, a cgroup or a setting of the machine. The one thing that
it may change is the set of installed Debian packages, and only through apt-get, and only those of
`HOST_TOOLS` that are missing. Deliberately absent: any name of a mirror or registry; the machine's
own configuration says where packages come from.
"""

import os
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".cache" / "lab"
LANES = CACHE / "lanes"
IN_LANE_SOURCE = Path("/src")
# What a command in a lane sees, besides SBXD_LANE.
IN_LANE_ENVIRONMENT = {
    "HOME": "/root",
    "HYPOTHESIS_STORAGE_DIRECTORY": "/var/tmp/hypothesis",
    "LANG": "C.UTF-8",
    "PATH": "/opt/sbxd/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPYCACHEPREFIX": "/var/cache/sbxd-lab/bytecode",
    "PYTHONUNBUFFERED": "1",
}

# tool -> the Debian package that brings it
HOST_TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "mount": "mount",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class LabError(Exception):
    """A lane could not be set up. The text says what is missing and what to do about it."""


def require_root() -> None:
    """Raise LabError unless this process may mount and make namespaces."""
    if os.geteuid() != 0:
        raise LabError(
            "the lab's lanes need root (they mount file systems and make namespaces): "
            "run this with sudo, or run only what needs no lane with `pytest`"
        )


def require_tools() -> None:
    """Install what is missing with apt-get, or say what to install where there is none."""
    missing = sorted({package for tool, package in HOST_TOOLS.items() if not shutil.which(tool)})
    if not DEBIAN_KEYRING.exists():
        missing.append("debian-archive-keyring")
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise LabError(f"install these programs first: {', '.join(missing)} (no apt-get here)")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing],
    ):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            raise LabError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")


def interpreter() -> str:
    """The interpreter for tests that need no lane: the repository's environment, else PATH's."""
    local = REPOSITORY / ".venv" / "bin" / "python"
    found = str(local) if local.exists() else shutil.which("python3")
    if not found:
        raise LabError("no python3 on PATH and no .venv in the repository")
    return found
