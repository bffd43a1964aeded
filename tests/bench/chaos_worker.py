"""One worker of a chaos soak: `python3 -m tests.bench.chaos_worker SEED`, until it is killed.

Each operation is a line of JSON on stdout: what, milliseconds, and how it ended. A lost connection
is made anew; the parent kills this process in the middle of whatever it does.
"""

import json
import random
import sys
import time

import trio

from sbxd.client.remote import RemoteExecutionEnvironment, connect
from sbxd.port.command import ExecutionCommand
from sbxd.port.errors import ExecutionUnavailable, PortError, UnavailableCode
from tests.bench.samples import leaves
from tests.redteam.faults import SMALL
from tests.redteam.live import WORKER_SOCKET, default_image, specification

COMMANDS = (
    ("true",),
    ("sh", "-c", "echo out; echo err >&2; exit 3"),
    ("sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x"),
    ("sh", "-c", "i=0; while [ $i -lt 50 ]; do echo $i > f$i; i=$((i+1)); done"),
    ("sh", "-c", "sleep 0.3 & sleep 0.1"),
    ("sleep", "2"),
)
PAUSE_SECONDS = 0.2


def say(what: str, begun: float, outcome: str) -> None:
    line = json.dumps([what, (time.perf_counter() - begun) * 1000, outcome])
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def one_life(remote: RemoteExecutionEnvironment, image: str, rng: random.Random) -> None:
    """Provision, up to three commands, destroy. Raises ExecutionUnavailable(UNREACHABLE)."""
    begun = time.perf_counter()
    try:
        handle = await remote.provision(specification(image, SMALL))
    except PortError as error:
        say("provision", begun, error.code)
        _raise_if_ended(error)
        with trio.move_on_after(PAUSE_SECONDS):
            await trio.sleep_forever()
        return
    say("provision", begun, "ok")
    for _ in range(rng.randrange(4)):
        begun = time.perf_counter()
        command = ExecutionCommand(
            argv=rng.choice(COMMANDS),
            working_directory=".",
            timeout_seconds=1,
            stdin=b"x" * rng.choice((0, 10, 100_000)),
            maximum_output_bytes=200_000,
        )
        try:
            with trio.move_on_after(rng.choice((0.05, 10.0))):
                result = await remote.execute(handle, command)
                say("execute", begun, result.killed_by or "ok")
        except PortError as error:
            say("execute", begun, error.code)
            _raise_if_ended(error)
            break
    begun = time.perf_counter()
    await remote.destroy(handle)
    say("destroy", begun, "ok")


def _raise_if_ended(error: PortError) -> None:
    """A connection that has ended says why to every further call."""
    ended = (UnavailableCode.UNREACHABLE, UnavailableCode.SHUTTING_DOWN)
    if isinstance(error, ExecutionUnavailable) and error.code in ended:
        raise error


async def main(seed: int) -> None:
    rng = random.Random(seed)
    while True:
        try:
            image = await default_image()
            async with connect(WORKER_SOCKET, client_name="chaos") as remote:
                while True:
                    await one_life(remote, image, rng)
        except* PortError as group:
            for error in leaves(group):
                say("connection", time.perf_counter(), getattr(error, "code", "?"))
        with trio.move_on_after(PAUSE_SECONDS):
            await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
