"""The process that owns one booted lane: its mounts, its first process and its users.

Usage: `python3 -m tests.lab.keeper` with an Order as JSON on descriptor `ORDER_FD`. It writes one
line to descriptor `STATUS_FD`: `ready` or `failed` with the reason as JSON, and then serves the
socket `control` in the lane's folder until a STOP, a signal, or the end of the tether.

Invariants: all mounts lie in this process's private namespace; its death, however it comes, is
the lane's; a lane that does not come up whole is a failure and never a lesser lane.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from . import boot, kernel
from .furnish import Furnishing, furnish
from .host import IN_LANE_SOURCE, LANES, REPOSITORY, LabError
from .hub import Hub

ORDER_FD = 3
STATUS_FD = 4
TETHER_FD = 5

_BOOT_SECONDS = {"container": 60.0, "uml": 180.0}
_PROVISION_SECONDS = {"container": 120.0, "uml": 300.0}
PROVISION = "tests/lab/provision"
CONTROL = "control"
IMAGE = "var/cache/sbxd-lab/image.tar"


@dataclass(frozen=True)
class Order:
    """What to boot. Paths are those of complete cache entries."""

    name: str
    lane: str
    root: str
    environment: str
    image: str
    uml: str
    daemon: bool
    writable: bool

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class Ended(Exception):
    """A signal asked for the end."""


def main() -> None:
    with os.fdopen(ORDER_FD, "rb") as file:
        order = Order(**json.loads(file.read()))
    folder = LANES / order.name
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    group = boot.own_cgroup() / f"sbxd-lab-{order.name}-{os.getpid()}"
    (folder / "group").write_text(str(group))
    try:
        _keep(order, folder, group)
    except Ended:
        pass
    except (LabError, OSError) as error:
        _report("failed " + json.dumps(str(error)))
        sys.exit(1)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        boot.end_group(group)
        shutil.rmtree(folder, ignore_errors=True)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended


def _report(line: str) -> None:
    try:
        os.write(STATUS_FD, line.encode() + b"\n")
        os.close(STATUS_FD)
    except OSError:
        pass  # whoever waited is gone, or has been told already


def _keep(order: Order, folder: Path, group: Path) -> None:
    kernel.private_mounts()
    root = _assemble(order, folder)
    console = os.open(folder / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    furnish(root, Furnishing(order.lane, boot.CHANNELS[order.lane], order.daemon))
    if order.lane == "container":
        booted = boot.container(root, folder, group, console)
    else:
        booted = boot.uml(root, folder, group, console, Path(order.uml))
    try:
        hub = _wait_whole(order, folder, root, booted)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        listener.bind(f"/proc/self/fd/{here}/{CONTROL}")
        os.close(here)
        listener.listen(16)
        hub.listen(listener)
        _report("ready")
        hub.serve()
    finally:
        booted.end()


def _assemble(order: Order, folder: Path) -> Path:
    """The lane's own root: cached layers below, a scratch layer that nothing survives above."""
    scratch = folder / "scratch"
    kernel.mount("tmpfs", scratch, "mode=0755", "size=8G", kind="tmpfs")
    root = scratch / "root"
    lower = [Path(order.environment), Path(order.root)]
    kernel.overlay(lower, scratch / "upper", scratch / "work", root)
    source = root / str(IN_LANE_SOURCE).lstrip("/")
    kernel.bind(REPOSITORY, source, *(() if order.writable else ("ro",)))
    kernel.bind(folder, root / "lab")
    kernel.bind(order.image, root / IMAGE, "ro")
    (root / "var/lib/sbxd").mkdir(parents=True, exist_ok=True)
    return root


def _wait_whole(order: Order, folder: Path, root: Path, booted: boot.Booted) -> Hub:
    """Wait for the agent, for the end of the boot, and run the hook that prepares the lane."""
    limit = _BOOT_SECONDS[order.lane]
    if order.lane == "container":
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
    if _tethered():
        hub.watch(TETHER_FD)
    _, state = hub.run(["/usr/bin/systemctl", "is-system-running", "--wait"], limit)
    if state.strip() != "running":
        _, failed = hub.run(["/usr/bin/systemctl", "--no-legend", "list-units", "--failed"], 60)
        raise LabError(_diagnosis(folder, root, f"systemd is {state.strip()}:\n{failed}"))
    if order.daemon and (REPOSITORY / PROVISION).exists():
        program = f"{IN_LANE_SOURCE}/{PROVISION}"
        status, printed = hub.run([program], _PROVISION_SECONDS[order.lane])
        if status:
            raise LabError(f"{PROVISION} ended with {status}:\n{printed}")
    return hub


def _tethered() -> bool:
    try:
        os.fstat(TETHER_FD)
    except OSError:
        return False
    return True


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
