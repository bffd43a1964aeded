"""The larger images of a lane, each in the store for as long as a module's tests run."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

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
