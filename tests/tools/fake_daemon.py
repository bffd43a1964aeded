"""A daemon over the fake behind a worker socket, as a program: for workers that are programs.

    python -m tests.tools.fake_daemon SOCKET LOG

Writes a line to LOG for each environment that it makes or ends. Ends with its standard input.
"""

import sys
from pathlib import Path

import trio

from sbxd.audit.events import Door
from sbxd.fake.engine import FakeEngine
from tests.service.memory import memory_daemon
from tests.tools.world import SCRIPT


async def main(path: str, log: Path) -> None:
    listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await listening.bind(path)
    listening.listen(16)
    note(log)
    async with memory_daemon(SCRIPT) as daemon, trio.open_nursery() as nursery:
        offer = daemon.listeners[Door.WORKER].offer

        async def accept() -> None:
            listener = trio.SocketListener(listening)
            while True:
                await offer(await listener.accept())

        nursery.start_soon(accept)
        print("ready", flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


def note(log: Path) -> None:
    """Have the engine write down what it makes and ends."""
    provision, remove = FakeEngine.provision, FakeEngine.remove

    def noted_provision(self: FakeEngine, *arguments: object, **keywords: object) -> object:
        handle = provision(self, *arguments, **keywords)  # type: ignore[arg-type]
        write(log, f"made {handle.run_id}")
        return handle

    def noted_remove(self: FakeEngine, record: object) -> None:
        remove(self, record)  # type: ignore[arg-type]
        write(log, "ended")

    FakeEngine.provision = noted_provision  # type: ignore[method-assign,assignment]
    FakeEngine.remove = noted_remove  # type: ignore[method-assign]


def write(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    trio.run(main, sys.argv[1], Path(sys.argv[2]))
