"""The larger images of a lane, each in the store for as long as a module's tests run."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from sbxd.port.limits import MIB, ResourceLimits

LIMITS = ResourceLimits(
    cpu_millicores=2000,
    memory_bytes=1024 * MIB,
    pids_max=256,
    workspace_bytes=512 * MIB,
    inodes_max=20_000,
    wall_clock_seconds=300,
)
FOLDER = "/var/cache/sbxd-lab"


@contextmanager
def imported(name: str) -> Iterator[str]:
    """Import `image-NAME.tar` and give its digest; remove it at the end. The daemon of a lane has
    one image otherwise."""
    tar = f"{FOLDER}/image-{name}.tar"
    command = ["sbxctl", "image", "import", "--json", "--label", name, tar]
    done = subprocess.run(command, capture_output=True, check=True, timeout=400)
    digest: str = json.loads(done.stdout)["digest"]
    try:
        yield digest
    finally:
        removal = ["sbxctl", "image", "rm", digest]
        subprocess.run(removal, capture_output=True, check=True, timeout=120)
