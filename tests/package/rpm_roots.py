"""A root file system of its own for `rpm --root`, on this machine, and what was done in it.

The root is the lab's Debian under an overlay in memory: a systemd, a Python and a shell with which
the scriptlets run as they would on a host, without a running service manager. Everything goes with
the process that made it: it has mounts and processes of its own.
"""

import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab import layers

SECONDS_MAX = 300
_APART = ("unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class Step:
    """How one command in the root ended."""

    status: int
    out: str
    err: str

    def ok(self) -> str:
        """What it printed; AssertionError when it failed."""
        assert self.status == 0, self.out + self.err
        return self.out


def told(steps: Mapping[str, tuple[str, ...]], files: Mapping[str, Path]) -> dict[str, Step]:
    """Run each step in turn in one fresh root, also after one that failed.

    Args:
        steps: a name and a command. One that begins with "rpm" is this machine's own, told where
            the root is; any other is run inside it.
        files: what is at /packages/NAME in the root, by its name.
    """
    root = layers.obtain("container", lambda text: None).root
    with tempfile.TemporaryDirectory(prefix="sbxd-rpm-") as scratch:
        merged, out = Path(scratch, "root"), Path(scratch, "out")
        for folder in (merged, out, Path(scratch, "memory")):
            folder.mkdir()
        lines = [
            "set -e",
            f"cd {scratch}",
            "mount -t tmpfs tmpfs memory",
            "mkdir memory/upper memory/work",
            f"mount -t overlay overlay -o lowerdir={root},upperdir=memory/upper,"
            "workdir=memory/work root",
            "mount -t proc proc root/proc",
            "mount --rbind /dev root/dev",
            "mkdir root/packages",
            *(f"cp {file} root/packages/{name}" for name, file in files.items()),
            "export LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        ]
        for number, command in enumerate(steps.values()):
            if command[0] == "rpm":
                # Debian's rpm wants to hear that it is meant; it opens packages from outside.
                words = [f"{merged}{w}" if w.startswith("/packages/") else w for w in command[1:]]
                whole = ("rpm", "--force-debian", f"--root={merged}", *words)
            else:
                whole = ("chroot", str(merged), *command)
            streams = f">out/{number}.out 2>out/{number}.err"
            lines.append(f"s=0; {shlex.join(whole)} {streams} || s=$?; echo $s >out/{number}")
        done = subprocess.run(
            [*_APART, "/bin/sh", "-c", "\n".join(lines)],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
        )
        assert done.returncode == 0, done.stderr
        return {
            name: Step(
                int((out / str(number)).read_text()),
                (out / f"{number}.out").read_text(),
                (out / f"{number}.err").read_text(),
            )
            for number, name in enumerate(steps)
        }
