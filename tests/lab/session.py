"""Starts lanes, finds kept ones again, and runs commands in them: the lab's front side.

Invariants: a lane that this process started for itself is tied to it by a pipe (its end, however
it comes, ends the lane); a kept lane is known by its folder's lock, which the kernel releases
when its keeper dies, so a dead one is never taken for a live one.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import boot, keeper, layers, state
from .channel import Decoder, Frame, Kind
from .host import IN_LANE_ENVIRONMENT, IN_LANE_SOURCE, LANES, REPOSITORY, LabError

LANE_NAMES = ("container", "gvisor", "uml", "qemu")
Say = Callable[[str], None]
Sink = Callable[[bytes], None]


@dataclass(frozen=True)
class Wish:
    """How a lane is to be booted."""

    lane: str
    daemon: bool = True
    bare: bool = False  # without the project; never with the daemon
    writable: bool = False
    empty: bool = False  # an empty disk, even where a filled one is cached


@dataclass
class Lane:
    """A booted lane. One that is not kept has a tether, and a keeper that is a child of ours."""

    name: str
    lane: str
    tether: int | None = None
    keeper: "subprocess.Popen[bytes] | None" = None

    def connect(self) -> socket.socket:
        here = os.open(LANES / self.name, os.O_PATH | os.O_DIRECTORY)
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(f"/proc/self/fd/{here}/{keeper.CONTROL}")
        finally:
            os.close(here)
        return connection

    def run(self, argv: list[str], out: Sink, err: Sink, *, seconds: float | None = None) -> int:
        """Run a command to its end, killed after `seconds`; output goes to the sinks as it comes.

        Returns: the command's exit status, 128 + n if signal n ended it.
        Raises: LabError when the lane refuses the command or ends before it.
        """
        with self.connect() as connection:
            connection.sendall(Frame(Kind.RUN, 0, self.request(argv)).encode())
            for frame in frames(connection, seconds):
                if frame.kind is Kind.STDOUT:
                    out(frame.payload)
                elif frame.kind is Kind.STDERR:
                    err(frame.payload)
                elif frame.kind is Kind.EXIT:
                    return int(json.loads(frame.payload)["status"])
                elif frame.kind is Kind.REFUSED:
                    raise LabError(json.loads(frame.payload)["reason"])
        raise LabError(f"the lane `{self.name}` ended before the command did")

    def request(self, argv: list[str], *, terminal: bool = False, **environment: str) -> bytes:
        """A RUN frame's payload."""
        full = {**IN_LANE_ENVIRONMENT, "SBXD_LANE": self.lane, **environment}
        return json.dumps(
            {
                "argv": argv,
                "directory": str(IN_LANE_SOURCE),
                "environment": full,
                "terminal": terminal,
            }
        ).encode()

    def release(self) -> None:
        """End the lane if it is not a kept one, and wait until nothing of it is left."""
        if self.tether is not None:
            os.close(self.tether)
            self.tether = None
            wait_until_gone(self.name)
        if self.keeper is not None:
            self.keeper.wait()
            self.keeper = None

    def stop(self) -> None:
        """End the lane, kept or not."""
        with self.connect() as connection:
            connection.sendall(Frame(Kind.STOP, 0).encode())
            for _ in frames(connection):
                pass
        wait_until_gone(self.name)


def frames(connection: socket.socket, seconds: float | None = None) -> Iterator[Frame]:
    """Frames until the other side closes; LabError when that takes more than `seconds`."""
    decoder = Decoder()
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data = connection.recv(65536)
        except TimeoutError as error:
            raise LabError(f"over its budget of {seconds:.0f} s: killed") from error
        if not data:
            return
        yield from decoder.feed(data)


def start(wish: Wish, name: str | None, say: Say) -> Lane:
    """Boot a lane; with a name it is kept until `stop`, else it ends with this process."""
    if name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", name):
        raise LabError("a lane's name is of small letters, digits and dashes, at most 32")
    built = layers.obtain(wish.lane, say)
    filled = None
    if wish.lane in ("uml", "qemu") and wish.daemon and not (wish.empty or wish.bare):
        filled = state.obtain(built.image, lambda line, then: _on_empty_disk(line, then, say), say)
    sweep()
    kept = name is not None
    name = name or f"run-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    (LANES / name).mkdir(parents=True)
    order = keeper.Order(
        name=name,
        lane=wish.lane,
        root=str(built.root),
        environment=str(built.environment),
        image=str(built.image),
        workloads=str(built.workloads or ""),
        programs=str(built.programs or ""),
        monitoring=str(built.monitoring or ""),
        uml=str(built.uml or ""),
        qemu=str(built.qemu or ""),
        state=str(filled or ""),
        daemon=wish.daemon and not wish.bare,
        bare=wish.bare,
        writable=wish.writable,
    )
    (LANES / name / "lane").write_text(wish.lane)
    begun = time.monotonic()
    tether, keeper_process = _start_keeper(order, kept=kept)
    say(f"lane {wish.lane} is up after {time.monotonic() - begun:.1f} s")
    return Lane(name, wish.lane, tether, keeper_process)


def _on_empty_disk(line: str, then: Callable[[str], None], say: Say) -> None:
    lane = start(Wish(lane="uml", empty=True), None, say)
    try:
        said: list[bytes] = []
        if lane.run(["sh", "-c", line], said.append, said.append, seconds=120) != 0:
            raise LabError(f"the lane's disk is not released: {b''.join(said).decode()}")
        then(lane.name)
    finally:
        lane.release()


def _start_keeper(
    order: keeper.Order, *, kept: bool
) -> "tuple[int | None, subprocess.Popen[bytes] | None]":
    order_read, order_write = os.pipe()
    status_read, status_write = os.pipe()
    tether_read, tether_write = os.pipe()
    log = os.open(LANES / order.name / "keeper.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.lab.keeper"),
            *(str(order_read), str(status_write), str(-1 if kept else tether_read)),
        ],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(order_read, status_write) if kept else (order_read, status_write, tether_read),
        start_new_session=True,
    )
    for fd in (order_read, status_write, tether_read, log):
        os.close(fd)
    with os.fdopen(order_write, "wb") as file:
        file.write(order.encode())
    try:
        with os.fdopen(status_read, "rb") as file:
            line = file.readline().decode()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    word, _, reason = line.partition(" ")
    if word.strip() != "ready":
        with contextlib.suppress(OSError):
            os.close(tether_write)
        log_file = LANES / order.name / "keeper.log"
        said = log_file.read_text() if log_file.exists() else ""
        process.wait()
        why = json.loads(reason) if reason else f"its keeper died: {said}"
        raise LabError(f"the lane {order.lane} could not be set up: {why}")
    if kept:
        os.close(tether_write)
        return None, None
    return tether_write, process


def find(name: str) -> Lane | None:
    """The kept lane of that name, if it is alive."""
    folder = LANES / name
    if not folder.exists() or not _is_held(folder):
        return None
    return Lane(name=name, lane=(folder / "lane").read_text())


def alive() -> list[Lane]:
    """All lanes that are up now, of whoever."""
    if not LANES.exists():
        return []
    found = (find(folder.name) for folder in sorted(LANES.iterdir()))
    return [lane for lane in found if lane]


def sweep() -> None:
    """Remove what keepers that were killed outright have left (a folder and an empty cgroup)."""
    for folder in LANES.iterdir() if LANES.exists() else ():
        young = time.time() - folder.stat().st_mtime < 60 and not (folder / "group").exists()
        if young or _is_held(folder):
            continue
        with contextlib.suppress(OSError):
            boot.end_group(Path((folder / "group").read_text()))
        with contextlib.suppress(OSError):
            keeper.remove_folder(folder)


def wait_until_gone(name: str, seconds: float = 60.0) -> None:
    """Wait for a keeper's end, after which nothing of its lane is left."""
    deadline = time.monotonic() + seconds
    while _is_held(LANES / name):
        if time.monotonic() > deadline:
            raise LabError(f"the lane `{name}` does not end")
        time.sleep(0.02)


def _is_held(folder: Path) -> bool:
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
