"""The disk of a `uml` lane with the image for sandboxes already in the store.

An import takes a kernel of user mode twenty seconds, so it is done once: a lane is booted on an
empty disk, given the image by `tests/lab/provision` as every lane is, and its disk, once nothing
uses it any more, is the cached entry. A lane gets a copy of it.

Invariant: the key holds every file that decides what an import leaves on the disk.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from . import cache, kernel
from .host import LANES, REPOSITORY, LabError

_RECIPE = 1
_DECIDING = (
    "sbxd/oci/tar.py",
    "sbxd/service/image_blobs.py",
    "sbxd/service/images.py",
    "sbxd/launcher/kernel/hostpaths.py",
    "sbxd/launcher/kernel/image_layers.py",
    "sbxd/launcher/kernel/image_stream.py",
    "sbxd/launcher/kernel/image_tar.py",
    "sbxd/launcher/kernel/images.py",
    "sbxd/launcher/kernel/uids.py",
    "sbxd/launcher/unpacker.py",
    "tests/lab/provision",
)
SETTLE = (
    "systemctl stop sbxd.socket sbxd-admin.socket sbxd.service"
    " sbxd-launcher.socket sbxd-launcher.service && umount /var/lib/sbxd"
)
DISK = "disk.img"

# Boots a lane on an empty disk, runs a shell line in it, and calls back before it ends.
Boot = Callable[[str, Callable[[str], None]], None]


def obtain(image: Path, boot: Boot, say: Callable[[str], None]) -> Path:
    """The cached disk for this image and this work tree, made now if there is none."""
    digests = [hashlib.sha256((REPOSITORY / name).read_bytes()).hexdigest() for name in _DECIDING]

    def build(target: Path) -> None:
        boot(SETTLE, lambda name: copy(LANES / name / DISK, target))

    try:
        return cache.obtain("state", [_RECIPE, image.name, digests], build, say)
    except OSError as error:
        raise LabError(f"the state of lane uml could not be made: {error}") from error


def copy(source: Path, target: Path) -> None:
    """Copy a disk, its holes as holes."""
    if shutil.which("cp") is None:
        raise LabError("cp is missing on this machine")
    kernel.run("cp", "--sparse=always", "--reflink=auto", str(source), str(target))
