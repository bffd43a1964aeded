"""The names that every sandbox has: of its user, its group and its host, put before the image's.

Runs where the layers are laid (see `launcher.unpacker`), after them. What stands first in these
files is what a program finds, so the image cannot give the user another name or home. A file that
is no regular one, or too large, is left as it is; so is an image without /etc.
"""

import os
import stat
from contextlib import suppress
from typing import Final

from sbxd.jail import syscalls
from sbxd.jail.plan import WORKLOAD_ID

USER: Final = "sandbox"
HOST: Final = "sandbox"
FILE_BYTES_MAX: Final = 1024 * 1024
FIRST: Final = {
    "passwd": f"{USER}:x:{WORKLOAD_ID}:{WORKLOAD_ID}:{USER}:/workspace:/bin/sh\n",
    "group": f"{USER}:x:{WORKLOAD_ID}:\n",
    "hosts": f"127.0.0.1\tlocalhost {HOST}\n::1\tlocalhost {HOST}\n",
}
# Of an image that has no such file.
_ALONE: Final = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "",
}
_OLD: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BENEATH: Final = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS


def add_names(root: int) -> None:
    """Name the user, the group and the host in an unpacked image. Raises OSError."""
    try:
        folder = syscalls.openat2(root, b"etc", os.O_RDONLY | os.O_DIRECTORY, _BENEATH)
    except OSError:
        return
    try:
        for name, first in FIRST.items():
            kept = _kept(folder, name)
            if kept is not None:
                _write(folder, name, first.encode() + kept)
    finally:
        os.close(folder)


def _kept(folder: int, name: str) -> bytes | None:
    """The image's own lines; None when the file is to be left as it is."""
    try:
        file = os.open(name, _OLD, dir_fd=folder)
    except FileNotFoundError:
        return _ALONE[name].encode()
    except OSError:
        return None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
            return None
        return os.read(file, FILE_BYTES_MAX)
    finally:
        os.close(file)


def _write(folder: int, name: str, content: bytes) -> None:
    """A new file in the place of the old one, which may have other names."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    with open(os.open(name, _NEW, 0o644, dir_fd=folder), "wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content)
