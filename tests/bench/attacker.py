"""One hostile worker: `python3 -m tests.bench.attacker NAME`, until it is killed.

It prints `ready` once its attack is going on. What the service answers it is of no interest: a
refusal is the service's right, and a lost connection is made again.
"""

import os
import secrets
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from sbxd.client.remote import RemoteExecutionEnvironment
from sbxd.client.workspace import RemoteWorkspace
from sbxd.port.command import ExecutionCommand
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import ExecutionRejected, PortError
from sbxd.port.limits import MIB, ResourceLimits
from tests.bench.daemon import WORKER_SOCKET, worker
from tests.bench.samples import leaves
from tests.redteam.live import default_image, specification

LARGE = ResourceLimits(
    cpu_millicores=2000,
    memory_bytes=128 * MIB,
    pids_max=64,
    workspace_bytes=256 * MIB,
    inodes_max=100_000,
    wall_clock_seconds=300,
)
LINGER_SECONDS = 600
PAIRS = 32
LISTINGS = 40
LISTED_FILES = 2_000
ERASED_FILES = 20_000
ERASED_AT_ONCE = 4
CHAIN_LENGTH = 5_000
PAUSE_SECONDS = 0.05

FOLDER = "f" * 200
FILES = f"""
import os, sys
os.mkdir({FOLDER!r})
for n in range(int(sys.argv[1])):
    open(f"{FOLDER}/{{n:0>{{sys.argv[2]}}}}", "w").close()
"""
CHAIN = """
import os, sys
for n in range(int(sys.argv[1])):
    os.mkdir("d" * 255); os.chdir("d" * 255)
"""


class Held:
    """An attack that goes on: said once."""

    def __init__(self) -> None:
        self._is_said = False

    def ready(self) -> None:
        """Say that the attack is going on."""
        if not self._is_said:
            self._is_said = True
            sys.stdout.write("ready\n")
            sys.stdout.flush()


def full_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection over loopback; what the first has sent is never read, and
    whoever closes it last waits for that."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first = socket.create_connection(listening.getsockname())
        second, _ = listening.accept()
    first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS))
    first.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            first.send(b"x" * 65536)
    return first, second


def send_descriptors(path: str) -> None:
    """Send a pair to the service in one packet and forget it. Raises OSError."""
    first, second = full_pair()
    with first, second, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
        to.connect(path)
        numbers = array("i", [first.fileno(), second.fileno()])
        to.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers.tobytes())])


async def descriptors(held: Held) -> None:
    """Descriptors in flight whose close waits."""
    while True:
        for _ in range(PAIRS):
            with suppress(OSError):
                await trio.to_thread.run_sync(send_descriptors, WORKER_SOCKET)
        held.ready()
        await trio.sleep(PAUSE_SECONDS)


async def stopped_reader(held: Held) -> None:
    """Listings asked for by a client that then stops: its process is not run any more."""
    async with worker() as remote, trio.open_nursery() as nursery:
        handle = await provisioned(remote)
        await run(remote, handle, "python3", "-c", FILES, str(LISTED_FILES), "200")
        workspace = RemoteWorkspace(remote.channel, handle)
        for _ in range(LISTINGS):
            nursery.start_soon(workspace.listdir, FOLDER)
        await trio.sleep(PAUSE_SECONDS)
        held.ready()
        os.kill(os.getpid(), signal.SIGSTOP)


async def refusals(held: Held) -> None:
    """Commands for an environment that is gone, as fast as they are refused."""
    async with worker() as remote:
        handle = await provisioned(remote)
        await remote.destroy(handle)
        held.ready()
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(refused_again_and_again, remote, handle)


async def refused_again_and_again(
    remote: RemoteExecutionEnvironment, handle: EnvironmentHandle
) -> None:
    while True:
        try:
            await run(remote, handle, "true")
        except ExecutionRejected:
            continue


async def connections(held: Held) -> None:
    """Connections that break the protocol, one after the other, until the process is killed."""
    while True:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
            to.connect(WORKER_SOCKET)
            to.send(b"\xff" * 8)
        held.ready()


async def erasing(held: Held) -> None:
    """Environments with many files, made and destroyed."""
    async with worker() as remote, trio.open_nursery() as nursery:
        for _ in range(ERASED_AT_ONCE):
            nursery.start_soon(made_and_destroyed, remote, held)


async def made_and_destroyed(remote: RemoteExecutionEnvironment, held: Held) -> None:
    while True:
        handle = await provisioned(remote)
        await run(remote, handle, "python3", "-c", FILES, str(ERASED_FILES), "10")
        held.ready()
        await remote.destroy(handle)


async def deep_tree(held: Held) -> None:
    """A chain of directories with the longest names, compared after each command."""
    while True:
        async with worker() as remote:
            handle = await provisioned(remote)
            with suppress(PortError):
                await run(remote, handle, "python3", "-c", CHAIN, str(CHAIN_LENGTH))
            held.ready()
            with suppress(PortError):
                while True:
                    await run(remote, handle, "true")


async def output(held: Held) -> None:
    """Endless output."""
    async with worker() as remote:
        handle = await provisioned(remote)
        held.ready()
        while True:
            await run(remote, handle, "yes")


async def provisioned(remote: RemoteExecutionEnvironment) -> EnvironmentHandle:
    """A large environment of a tenant of this attacker's."""
    tenant = f"attacker-{secrets.token_hex(4)}"
    return await remote.provision(specification(await image(), LARGE, tenant=tenant))


async def image() -> str:
    return sys.argv[2] if len(sys.argv) > 2 else await default_image()


async def run(remote: RemoteExecutionEnvironment, handle: EnvironmentHandle, *argv: str) -> None:
    """Execute, whatever the result."""
    await remote.execute(
        handle,
        ExecutionCommand(
            argv=argv,
            working_directory=".",
            timeout_seconds=300,
            stdin=None,
            maximum_output_bytes=MIB,
        ),
    )


Attack = Callable[[Held], Awaitable[None]]
ATTACKS: dict[str, Attack] = {
    "descriptors": descriptors,
    "stopped-reader": stopped_reader,
    "refusals": refusals,
    "connections": connections,
    "erasing": erasing,
    "deep-tree": deep_tree,
    "output": output,
}


async def again_and_again(attack: Attack) -> None:
    """Attack; once more whenever the service has ended the connection."""
    held = Held()
    while True:
        try:
            await attack(held)
        except* (PortError, OSError) as group:
            for error in leaves(group):
                print(f"attacker: {error}", file=sys.stderr)
            held.ready()
            await trio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    trio.run(again_and_again, ATTACKS[sys.argv[1]])
