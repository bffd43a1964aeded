"""What agents' code stands on works in an environment, and prints what it prints without one.

The control of each row is the same script on the same root file system under bubblewrap, as root
and without a filter. The image is imported for these tests alone, since the daemon of a lane has
one image otherwise.
"""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from sbxd.client.remote import connect
from tests.redteam.live import WORKER_SOCKET, Live, specification
from tests.workloads.images import LIMITS, imported
from tests.workloads.rows import ROWS, Row

pytestmark = pytest.mark.needs("daemon", "image-workloads")

UNPACKED = Path("/var/lib/sbxd/unpacked")
VARIABLES = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "TMPDIR": "/tmp",
}


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """The digest of the larger image, in the store for as long as this module's tests run."""
    with imported("workloads") as digest:
        yield digest


async def inside(image: str, row: Row) -> tuple[str, str]:
    """stdout and what went wrong."""
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        handle = await remote.provision(specification(image, LIMITS))
        try:
            result = await Live(remote, handle).run("sh", "-c", row.script, timeout_seconds=240)
        finally:
            await remote.destroy(handle)
    trouble = f"{result.exit_code} {result.signal} {result.killed_by} {result.stderr.decode()}"
    return result.stdout.decode(), trouble


def without(image: str, row: Row) -> tuple[str, str]:
    """The same on the same files, as root and with every system call."""
    root = UNPACKED / image.removeprefix("sha256:") / "rootfs"
    with tempfile.TemporaryDirectory(dir="/var/lib/sbxd") as workspace:
        command = [
            *("bwrap", "--ro-bind", str(root / "usr"), "/usr", "--ro-bind", str(root / "etc")),
            *("/etc", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--clearenv"),
            *(w for name in ("bin", "lib", "lib64", "sbin") for w in _link(name)),
            *(w for name, value in VARIABLES.items() for w in ("--setenv", name, value)),
            *("--bind", workspace, "/workspace", "--chdir", "/workspace", "--unshare-net"),
            *("--unshare-ipc", "--cap-add", "ALL", "sh", "-c", row.script),
        ]
        done = subprocess.run(command, capture_output=True, timeout=240, stdin=subprocess.DEVNULL)
    return done.stdout.decode(), f"{done.returncode} {done.stderr.decode()}"


def _link(name: str) -> tuple[str, str, str]:
    return "--symlink", f"usr/{name}", f"/{name}"


@pytest.mark.awaits("apparmor", "landlock", "image-workloads")
@pytest.mark.case("KRN-01", "KRN-14")
@pytest.mark.parametrize("row", ROWS, ids=[row.name.replace(" ", "-") for row in ROWS])
async def test_a_row_of_the_matrix_holds(image: str, row: Row) -> None:
    printed, trouble = await inside(image, row)
    assert printed == row.says, trouble
    control, trouble = await trio.to_thread.run_sync(without, image, row)
    assert control == (row.outside if row.refused else row.says), trouble
