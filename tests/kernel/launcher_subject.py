"""A launcher of the test's own on the lane's real systemd, and an image in the lane's store."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import trio

from sbxd.launcher.kernel import hostpaths
from sbxd.mechanism.namespaces import NamespacesMechanism, open_namespaces
from sbxd.mechanism.namespaces_sandbox import NamespacesSandbox
from sbxd.mechanism.protocol import (
    CommandExit,
    CommandSpec,
    Counters,
    RunningCommand,
    SlotProfile,
)
from sbxd.oci import media
from sbxd.port.ids import EnvironmentId
from sbxd.port.limits import MIB, IoCeilings, ResourceLimits
from tests.kernel.image_layers import config_text, unpack
from tests.pacing import next_look

TAR = Path("/var/cache/sbxd-lab/image.tar")
ENVIRONMENT = ((b"PATH", b"/usr/bin:/bin"), (b"HOME", b"/workspace"))
LIMITS = ResourceLimits(
    cpu_millicores=1000,
    memory_bytes=96 * MIB,
    pids_max=32,
    workspace_bytes=32 * MIB,
    inodes_max=1024,
    wall_clock_seconds=60,
)
WAIT_SECONDS = 20


def fresh_id() -> EnvironmentId:
    """An id that no other test has."""
    return EnvironmentId(os.urandom(16).hex())


def unpacked_image() -> str:
    """The digest of the lane's image, in the store and unpacked."""
    blobs = Path(hostpaths.STATE_DIRECTORY) / "images" / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    with TAR.open("rb") as file:
        layer = hashlib.file_digest(file, "sha256").hexdigest()
    if not (blobs / layer).exists():
        shutil.copyfile(TAR, blobs / f"{layer}.partial")
        (blobs / f"{layer}.partial").rename(blobs / layer)

    def put(raw: bytes) -> str:
        name = hashlib.sha256(raw).hexdigest()
        (blobs / name).write_bytes(raw)
        return f"sha256:{name}"

    config = config_text(f"sha256:{layer}")
    manifest = {
        "schemaVersion": 2,
        "config": {"mediaType": media.CONFIG, "digest": put(config), "size": len(config)},
        "layers": [
            {
                "mediaType": media.LAYER,
                "digest": f"sha256:{layer}",
                "size": TAR.stat().st_size,
            }
        ],
    }
    digest = put(msgspec.json.encode(manifest))
    unpack(digest)
    return digest


class Launcher(NamedTuple):
    """A running launcher. `wait` returns its exit status."""

    process: "subprocess.Popen[bytes]"
    socket: str

    def helpers(self) -> list[int]:
        """The children that it forked and has not handed anything over to yet."""
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in text.split()]

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(WAIT_SECONDS)


@contextmanager
def launcher(
    directory: Path, program: tuple[str, ...] = ("-m", "sbxd.launcher")
) -> Iterator[Launcher]:
    """Start one; it is stopped by SIGTERM at the end, and must exit with 0 unless killed.

    program: what the interpreter runs, for a launcher with a fault in it.
    """
    path = str(directory / "launcher.sock")
    Path(path).unlink(missing_ok=True)
    ready = str(directory / "notify")
    Path(ready).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(ready)
        notified.settimeout(WAIT_SECONDS)
        process = subprocess.Popen(
            [sys.executable, *program, "--socket", path],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "NOTIFY_SOCKET": ready},
        )
        try:
            assert notified.recv(100) == b"READY=1"
        except OSError:
            process.kill()
            process.wait(WAIT_SECONDS)
            raise
    try:
        yield Launcher(process, path)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            status = process.wait(WAIT_SECONDS)
            assert status == 0, f"the launcher ended with {status}"


@asynccontextmanager
async def mechanism(
    subject: Launcher, io: IoCeilings | None = None
) -> AsyncIterator[NamespacesMechanism]:
    """The daemon's side of it, with a bound on everything."""
    with trio.fail_after(4 * WAIT_SECONDS):
        async with open_namespaces(subject.socket, io=io) as opened:
            yield opened


@asynccontextmanager
async def sandbox(
    opened: NamespacesMechanism, image: str, limits: ResourceLimits = LIMITS
) -> AsyncIterator[NamespacesSandbox]:
    """One assigned slot, destroyed at the end."""
    slot = await opened.prepare(fresh_id(), SlotProfile(image, limits), back_stop_seconds=600)
    try:
        await slot.assign(limits)
        yield slot
    finally:
        with trio.move_on_after(WAIT_SECONDS, shield=True):
            await slot.destroy()


class Finished(NamedTuple):
    """What a command left."""

    end: CommandExit
    stdout: bytes
    stderr: bytes
    counters: Counters


async def start(slot: NamespacesSandbox, *argv: str, stdin: bytes = b"") -> RunningCommand:
    """Start a command in the root of the workspace."""
    arguments = tuple(argument.encode() for argument in argv)
    return await slot.start(CommandSpec(arguments, ENVIRONMENT, b".", stdin))


async def run(slot: NamespacesSandbox, *argv: str, stdin: bytes = b"") -> Finished:
    """Run a command to its end, and prove that nothing of it is left."""
    return await finish(await start(slot, *argv, stdin=stdin))


async def finish(running: RunningCommand) -> Finished:
    """Collect a command's output and end, kill what it left, and give its leaf back."""
    outputs = {"stdout": b"", "stderr": b""}

    async def pump(name: str) -> None:
        while data := await running.receive_output(name):
            outputs[name] += data

    async with trio.open_nursery() as nursery:
        for name in outputs:
            nursery.start_soon(pump, name)
        nursery.start_soon(running.send_stdin)
        end = await running.wait_exit()
        running.kill()
        await running.wait_empty()
    counters = running.counters()
    await running.aclose()
    return Finished(end, outputs["stdout"], outputs["stderr"], counters)


async def until(holds: Callable[[], object]) -> None:
    """Until the machine is in a state that nothing tells of, at most WAIT_SECONDS."""
    with trio.fail_after(WAIT_SECONDS):
        while not holds():
            await next_look()


async def left_of(opened: NamespacesMechanism, environment_id: str) -> tuple[str, ...]:
    """What the kernel, PID 1 and the disk still hold of this environment.

    A loop device is freed by the kernel some moments after its last mount is gone.
    """
    with trio.move_on_after(WAIT_SECONDS):
        while True:
            items = (await opened.inventory()).items
            kinds = next(
                (item.kinds for item in items if item.environment_id == environment_id), ()
            )
            if kinds != ("mount",):
                return kinds
    return kinds
