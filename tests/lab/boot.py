"""Boots a lane's first process, and makes sure that its end is the end of everything in it.

`container` boots the machine's kernel's view of a new systemd; `uml` and `qemu` boot a kernel of
their own. Each is one process tree in pid and mount namespaces and a cgroup made for it.

Invariants: runs in the keeper's private mount namespace; the only thing made outside of it is the
one cgroup, below the keeper's own, which `Booted.end` removes; a killed keeper takes the lane
with it (the kernel kills the first process of the pid namespace).
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from . import kernel, qemu
from .container_init import make_devices
from .host import REPOSITORY, LabError
from .state import DISK, copy

UML_MEMORY = "2048M"
# Where a lane's agent finds its keeper.
_AGENT = "unix:/lab/agent.sock"
CHANNELS = {
    "container": _AGENT,
    "gvisor": _AGENT,
    "uml": "tty:/dev/ttyS0",
    "qemu": "port:/dev/vport0p1",
}
_DISKS = {
    "container": ("8G", ("mkfs.ext4", "-q", "-E", "nodiscard")),
    "uml": ("6G", ("mkfs.xfs", "-q")),
    # As a small host's: the pool of the installed configuration, 4 workspaces of 4 GiB, has room.
    "qemu": ("32G", ("mkfs.xfs", "-q")),
}
_UNSHARE = ("unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child")


@dataclass
class Booted:
    """A running lane: its first process here, and the stream to its agent."""

    process: subprocess.Popen[bytes]
    group: Path
    stream: socket.socket

    def end(self) -> None:
        """Kill whatever the lane still runs and remove its cgroup."""
        self.process.kill()
        self.process.wait()
        end_group(self.group)
        self.stream.close()


def end_group(group: Path) -> None:
    """Kill what is in a lane's cgroup and remove it with all that lies below it."""
    if not group.exists():
        return
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + 30
    while "populated 1" in (group / "cgroup.events").read_text():
        if time.monotonic() > deadline:
            raise LabError(f"processes in {group} do not end")
        with (group / "cgroup.events").open() as events:
            poll = select.poll()
            poll.register(events, select.POLLPRI)
            events.read()
            poll.poll(200)
    for folder, _, _ in os.walk(group, topdown=False):
        os.rmdir(folder)


def own_cgroup() -> Path:
    """Where this process is in the machine's version 2 hierarchy.

    It is found, never mounted: a mount from the first cgroup namespace would change the options
    of the whole machine's.
    """
    top = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            top = Path(fields.split()[4])
    if top is None:
        raise LabError("no cgroup2 is mounted on this machine: mount one (any place will do)")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return top / next(line[3:] for line in lines if line.startswith("0::")).lstrip("/")


def make_disk(lane: str, root: Path, folder: Path) -> Path:
    """A sparse file with the lane's file system, made by the root file system's own tools."""
    size, program = _DISKS[lane]
    disk = folder / DISK
    with disk.open("xb") as file:
        file.truncate(int(size.removesuffix("G")) << 30)
    kernel.run("chroot", str(root), *program, f"/lab/{disk.name}")
    return disk


def container(root: Path, folder: Path, group: Path, console: int) -> Booted:
    """Start systemd on this machine's kernel; returns the lane before its agent is there."""
    disk = make_disk("container", root, folder)
    kernel.mount(disk, root / "var/lib/sbxd", "loop")
    disk.unlink()  # the loop device keeps it for as long as the mount lasts
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # By a descriptor: the folder's own path may be longer than a socket's may be.
    here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    listener.bind(f"/proc/self/fd/{here}/agent.sock")
    os.close(here)
    listener.listen(1)
    command = (
        *_UNSHARE,
        *("--uts", "--ipc", "--net", "--cgroup"),
        *(sys.executable, "-m", "tests.lab.container_init", str(root)),
    )
    process = _start(command, group, console, ())
    return Booted(process, group, listener)


def uml(
    root: Path, folder: Path, group: Path, console: int, layer: Path, state: Path | None
) -> Booted:
    """Start a kernel of user mode, whose root is `root` through hostfs.

    state: a disk to start from; None for an empty one.
    """
    disk = _disk("uml", root, folder, state)
    program = Path("/opt/sbxd-lab/linux.uml")
    kernel.bind(layer / "linux.uml", root / str(program).lstrip("/"), "ro")
    for modules in (layer / "modules").iterdir():
        kernel.bind(modules, root / "usr/lib/modules" / modules.name, "ro")
    kernel.mount("tmpfs", root / "tmp", "mode=1777", kind="tmpfs")
    make_devices(root / "dev")  # it wants pseudo-terminals and a few others of its host
    ours, theirs = socket.socketpair()
    script = f'mount -t proc proc {root}/proc && exec chroot {root} "$@"'
    command = (
        *(*_UNSHARE, "--ipc", "--net", "sh", "-c", script, "uml", str(program)),
        *(f"mem={UML_MEMORY}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw"),
        *("quiet", "apparmor=1", "security=apparmor", f"ubd0=/lab/{disk.name}"),
        *("con=null", "con0=fd:0,fd:1", "ssl=null"),
        f"ssl0=fd:{theirs.fileno()},fd:{theirs.fileno()}",
        "init=/usr/lib/sbxd-lab/uml-init",
    )
    process = _start(command, group, console, (theirs.fileno(),))
    theirs.close()
    return Booted(process, group, ours)


def emulated(
    root: Path,
    folder: Path,
    group: Path,
    console: int,
    layer: Path,
    state: Path | None,
    *,
    writable: bool,
) -> Booted:
    """Start an emulated PC, whose root is `root` through 9p. state: as in `uml`."""
    disk = _disk("qemu", root, folder, state)
    for modules in (layer / "modules").iterdir():
        kernel.bind(modules, root / "usr/lib/modules" / modules.name, "ro")
    ours, theirs = socket.socketpair()
    program = qemu.command(layer, root.parent, root, disk, theirs, writable=writable)
    process = _start((*_UNSHARE, "--ipc", "--net", *program), group, console, (theirs.fileno(),))
    theirs.close()
    return Booted(process, group, ours)


def _disk(lane: str, root: Path, folder: Path, state: Path | None) -> Path:
    if state is None:
        return make_disk(lane, root, folder)
    copy(state, folder / DISK)
    return folder / DISK


def _start(
    command: tuple[str, ...], group: Path, console: int, fds: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    group.mkdir()
    procs = group / "cgroup.procs"

    def enter() -> None:
        kernel.die_with_parent()
        procs.write_text("0")

    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": "/tmp", "HOME": "/tmp"},
        stdin=subprocess.DEVNULL,
        stdout=console,
        stderr=console,
        pass_fds=fds,
        start_new_session=True,
        preexec_fn=enter,
    )
