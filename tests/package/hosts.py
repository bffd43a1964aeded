"""A host with nothing of sbxd on it, and what is on it."""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab import session
from tests.lab.host import LANES

SECONDS_MAX = 400.0

# What changes on any host on which a package is installed, or merely runs.
_VOLATILE = (
    "/dev",
    "/home",
    "/lab",
    "/opt/sbxd",
    "/proc",
    "/src",
    "/sys",
    "/tmp",
    "/var/cache/apt",
    "/var/cache/debconf",
    "/var/cache/ldconfig",
    "/var/cache/sbxd-lab",
    "/var/lib/apt",
    "/var/lib/dpkg",
    "/var/log",
    "/var/tmp",
)
# systemd's own, below /run: each has a folder that it changes all the time.
_VOLATILE_RUN = ("/run/dbus", "/run/lock", "/run/log", "/run/systemd", "/run/udev", "/run/user")
# Made by whatever changes accounts, and left by it: the state before the last change.
_BACKUPS = frozenset(f"/etc/{name}-" for name in ("passwd", "group", "shadow", "gshadow"))

# systemd is asked first, is given its time, and is not taken for one that has nothing.
_INVENTORY = f"""
export SYSTEMD_BUS_TIMEOUT=300s
units=$(systemctl list-units --all --plain --no-legend) || exit 1
unit_files=$(systemctl list-unit-files --plain --no-legend) || exit 1
find / \\( {" -o ".join(f"-path {path}" for path in (*_VOLATILE, *_VOLATILE_RUN))} \\) -prune \
    -o -print | sed 's/^/file /'
getent passwd | sed 's/^/user /'
getent group | sed 's/^/group /'
printf '%s\\n' "$units" | awk '$2 != "not-found" {{print "unit", $1}}' |
    grep -v '\\.device$'
printf '%s\\n' "$unit_files" | awk '{{print "unit file", $1}}'
findmnt -rno TARGET | sed 's/^/mount /'
find /sys/fs/cgroup -type d -name 'sbx*' | sed 's/^/cgroup /'
losetup -nO BACK-MAJ:MIN,BACK-FILE | awk -v disk="$(mountpoint -d /var/lib/sbxd)" \
    '$1 == disk {{print "loop device of", $2}}'
cat /sys/kernel/security/apparmor/profiles 2>/dev/null | sed 's/^/profile /'
ls /sys/class/net | sed 's/^/network interface /'
"""


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    status: int
    out: str
    err: str

    def ok(self) -> str:
        """What it printed; AssertionError when it failed."""
        assert self.status == 0, self.out + self.err
        return self.out


@dataclass(frozen=True)
class Host:
    """A booted lane without the project. seconds: the longest that a command may take."""

    lane: session.Lane
    seconds: float = SECONDS_MAX

    def run(self, *argv: str) -> Done:
        out, err = bytearray(), bytearray()
        status = self.lane.run(list(argv), out.extend, err.extend, seconds=self.seconds)
        return Done(status, out.decode(), err.decode())

    def shell(self, script: str) -> Done:
        return self.run("/bin/sh", "-c", script)

    def as_user(self, user: str, *argv: str) -> Done:
        return self.run("runuser", "-u", user, "--", *argv)

    def apt(self, *words: str) -> Done:
        """apt-get, which asks nothing and has no network."""
        return self.run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-y", *words)

    def bring(self, file: Path) -> str:
        """Where the host finds a copy of a file of ours."""
        shutil.copy(file, LANES / self.lane.name / file.name)
        return f"/lab/{file.name}"

    def write(self, path: str, text: str) -> None:
        self.shell(f"printf %s {shlex.quote(text)} >{shlex.quote(path)}").ok()

    def inventory(self) -> frozenset[str]:
        """Files, accounts, units, mounts, control groups, loop devices, profiles, interfaces."""
        listed = self.shell(_INVENTORY).ok().splitlines()
        return frozenset(line for line in listed if line.removeprefix("file ") not in _BACKUPS)


@contextmanager
def booted(kind: str, *, seconds: float = SECONDS_MAX) -> Iterator[Host]:
    """A lane of this kind with nothing of the project, ended on leaving. seconds: the longest that
    one command may take there."""
    lane = session.start(session.Wish(lane=kind, bare=True), None, lambda text: None)
    try:
        yield Host(lane, seconds)
    finally:
        lane.release()
