"""The first process of a `container` lane: builds its view of the machine and becomes systemd.

Runs as pid 1 of new pid, mount, network, uts, ipc and cgroup namespaces. Usage:
container_init.py ROOT.

Invariants: sysfs is read-only and no device of the machine is passed in but those in `_DEVICES`;
/proc has nothing mounted over it (a /proc in a user namespace would be refused otherwise); no
mount of the machine is left after pivot_root.
"""

import os
import stat
import sys
from pathlib import Path

from . import kernel

# path below /dev -> (major, minor, mode)
_DEVICES = {
    "full": (1, 7, 0o666),
    "fuse": (10, 229, 0o666),
    "kvm": (10, 232, 0o666),
    "loop-control": (10, 237, 0o660),
    "net/tun": (10, 200, 0o666),
    "null": (1, 3, 0o666),
    "random": (1, 8, 0o666),
    "tty": (5, 0, 0o666),
    "urandom": (1, 9, 0o666),
    "zero": (1, 5, 0o666),
}
_LOOP_DEVICES = 256
_LINKS = {
    "fd": "/proc/self/fd",
    "ptmx": "pts/ptmx",
    "stderr": "/proc/self/fd/2",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
}


def main(root: Path) -> None:
    kernel.mount("proc", root / "proc", "nosuid", "nodev", "noexec", kind="proc")
    kernel.mount("sysfs", root / "sys", "nosuid", "nodev", "noexec", "ro", kind="sysfs")
    kernel.mount("cgroup2", root / "sys/fs/cgroup", "nosuid", "nodev", "noexec", kind="cgroup2")
    kernel.mount("tmpfs", root / "run", "nosuid", "nodev", "mode=0755", kind="tmpfs")
    kernel.mount("tmpfs", root / "tmp", "nosuid", "nodev", "mode=1777", kind="tmpfs")
    make_devices(root / "dev")
    os.chdir(root)
    kernel.pivot_root(Path("."), Path("."))
    kernel.detach(Path("."))
    os.chdir("/")
    # systemd takes this for done by whoever started it in a container; credentials depend on it.
    kernel.share_mounts()
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "container": "sbxd-lab",
    }
    os.execve("/lib/systemd/systemd", ["/lib/systemd/systemd"], environment)


def make_devices(dev: Path) -> None:
    """A small /dev of its own. The machine's loop devices are shared: the kernel has one pool."""
    kernel.mount("tmpfs", dev, "nosuid", "mode=0755", kind="tmpfs")
    os.umask(0)
    (dev / "net").mkdir(mode=0o755)
    for name, (major, minor, mode) in _DEVICES.items():
        os.mknod(dev / name, stat.S_IFCHR | mode, os.makedev(major, minor))
    for number in range(_LOOP_DEVICES):
        os.mknod(dev / f"loop{number}", stat.S_IFBLK | 0o660, os.makedev(7, number))
    for name, target in _LINKS.items():
        (dev / name).symlink_to(target)
    terminals = ("newinstance", "ptmxmode=0666", "mode=0620", "gid=5")
    kernel.mount("devpts", dev / "pts", *terminals, kind="devpts")
    kernel.mount("tmpfs", dev / "shm", "nosuid", "nodev", "mode=1777", kind="tmpfs")
    kernel.mount("mqueue", dev / "mqueue", "nosuid", "nodev", "noexec", kind="mqueue")
    os.umask(0o022)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
