"""The process that owns one booted lane: its mounts, its first process and its users.

Usage: `python3 -m tests.lab.keeper ORDER STATUS TETHER`, three descriptors. It reads an Order as
JSON from ORDER, writes one line to STATUS (`ready`, or `failed` with the reason as JSON), and then
serves the socket `control` in the lane's folder until a STOP, a signal, or the end of TETHER (-1
for a lane that is kept).

Invariants: all mounts lie in this process's private namespace; its death, however it comes, is
the lane's; a lane that does not come up whole is a failure and never a lesser lane.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from . import boot, kernel
from .furnish import Furnishing, furnish
from .host import IN_LANE_SOURCE, LANES, REPOSITORY, LabError
from .hub import Hub

_BOOT_SECONDS = {"container": 60.0, "gvisor": 60.0, "uml": 180.0, "qemu": 300.0}
_PROVISION_SECONDS = {"container": 120.0, "gvisor": 120.0, "uml": 300.0, "qemu": 600.0}
PROVISION = "tests/lab/provision"
CONTROL = "control"
SCRATCH = "scratch"
IMAGE = "var/cache/sbxd-lab/image.tar"
WORKLOADS = "var/cache/sbxd-lab/image-workloads.tar"
PROGRAMS = "var/cache/sbxd-lab/image-programs.tar"
MONITORING = "opt/prometheus"


@dataclass(frozen=True)
class Order:
    """What to boot. Paths are those of complete cache entries."""

    name: str
    lane: str
    root: str
    environment: str
    image: str
    workloads: str
    programs: str
    monitoring: str
    uml: str
    qemu: str
    state: str
    daemon: bool
    bare: bool
    writable: bool

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class Ended(Exception):
    """A signal asked for the end."""


def main() -> None:
    order_fd, status_fd, tether_fd = (int(word) for word in sys.argv[1:4])
    with os.fdopen(order_fd, "rb") as file:
        order = Order(**json.loads(file.read()))
    folder = LANES / order.name
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    group = boot.own_cgroup() / f"sbxd-lab-{order.name}-{os.getpid()}"
    (folder / "group").write_text(str(group))
    try:
        _keep(order, folder, group, status_fd, tether_fd)
    except Ended:
        pass
    except (LabError, OSError) as error:
        traceback.print_exc()
        _report(status_fd, "failed " + json.dumps(str(error)))
        sys.exit(1)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        boot.end_group(group)
        with contextlib.suppress(OSError):
            kernel.detach(folder / SCRATCH)
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a lane's folder: plain files and one empty mount point.

    Never a recursive removal: should a mount still be there, it would follow it, in the end to the
    work tree.
    """
    with contextlib.suppress(FileNotFoundError):
        for entry in list(folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                entry.rmdir()
            else:
                entry.unlink()
        folder.rmdir()


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended


def _report(status_fd: int, line: str) -> None:
    try:
        os.write(status_fd, line.encode() + b"\n")
        os.close(status_fd)
    except OSError:
        pass  # whoever waited is gone, or has been told already


def _keep(order: Order, folder: Path, group: Path, status_fd: int, tether_fd: int) -> None:
    kernel.private_mounts()
    root = _assemble(order, folder)
    console = os.open(folder / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    furnish(root, Furnishing(order.lane, boot.CHANNELS[order.lane], order.daemon, order.bare))
    state = Path(order.state) if order.state else None
    match order.lane:
        case "container" | "gvisor":
            booted = boot.container(root, folder, group, console)
        case "uml":
            booted = boot.uml(root, folder, group, console, Path(order.uml), state)
        case _:
            layer = Path(order.qemu)
            booted = boot.emulated(
                root, folder, group, console, layer, state, writable=order.writable
            )
    try:
        hub = _connect(order, folder, root, booted)
        if tether_fd >= 0:
            hub.watch(tether_fd)
        _wait_whole(order, folder, root, hub)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        listener.bind(f"/proc/self/fd/{here}/{CONTROL}")
        os.close(here)
        listener.listen(16)
        hub.listen(listener)
        _report(status_fd, "ready")
        hub.serve()
    finally:
        booted.end()


def _assemble(order: Order, folder: Path) -> Path:
    """The lane's own root: cached layers below, a scratch layer that nothing survives above."""
    scratch = folder / SCRATCH
    kernel.mount("tmpfs", scratch, "mode=0755", "size=8G", kind="tmpfs")
    root = scratch / "root"
    lower = [Path(order.environment), Path(order.root)]
    kernel.overlay(lower, scratch / "upper", scratch / "work", root)
    source = root / str(IN_LANE_SOURCE).lstrip("/")
    kernel.bind(REPOSITORY, source, *(() if order.writable else ("ro",)))
    kernel.bind(folder, root / "lab")
    kernel.bind(order.image, root / IMAGE, "ro")
    if order.workloads:
        kernel.bind(order.workloads, root / WORKLOADS, "ro")
    if order.programs:
        kernel.bind(order.programs, root / PROGRAMS, "ro")
    if order.monitoring:
        kernel.bind(order.monitoring, root / MONITORING, "ro")
    (root / "var/lib/sbxd").mkdir(parents=True, exist_ok=True)
    return root


def _connect(order: Order, folder: Path, root: Path, booted: boot.Booted) -> Hub:
    """Wait for the lane's agent."""
    limit = _BOOT_SECONDS[order.lane]
    if order.lane in ("container", "gvisor"):
        booted.stream.settimeout(limit)
        try:
            connection, _ = booted.stream.accept()
        except TimeoutError as error:
            raise LabError(_diagnosis(folder, root, "the agent did not start")) from error
        booted.stream.close()
        connection.setblocking(True)
        booted.stream = connection
    hub = Hub(booted.stream)
    try:
        hub.wait_until(lambda: hub.greeted, limit, "the agent's start")
    except LabError as error:
        raise LabError(_diagnosis(folder, root, str(error))) from error
    return hub


def _wait_whole(order: Order, folder: Path, root: Path, hub: Hub) -> None:
    """Wait for the end of the boot, and run the hook that prepares the lane."""
    limit = _BOOT_SECONDS[order.lane]
    _, state = hub.run(["/usr/bin/systemctl", "is-system-running", "--wait"], limit)
    if state.strip() != "running":
        _, failed = hub.run(["/usr/bin/systemctl", "--no-legend", "list-units", "--failed"], 60)
        raise LabError(_diagnosis(folder, root, f"systemd is {state.strip()}:\n{failed}"))
    if order.daemon and (REPOSITORY / PROVISION).exists():
        program = f"{IN_LANE_SOURCE}/{PROVISION}"
        status, printed = hub.run([program], _PROVISION_SECONDS[order.lane])
        if status:
            raise LabError(f"{PROVISION} ended with {status}:\n{printed}")


def _diagnosis(folder: Path, root: Path, what: str) -> str:
    console = (folder / "console.log").read_text(errors="replace")[-4000:]
    try:
        journal = kernel.run(
            *("chroot", str(root), "journalctl", "--no-pager", "-q", "-n", "60"),
            *("-D", "/var/log/journal"),
        )
    except OSError as error:
        journal = str(error)
    return f"{what}\n--- console\n{console}\n--- journal\n{journal}"


if __name__ == "__main__":
    main()
