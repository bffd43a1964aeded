"""A steward in a thread on a folder of the test, and a client of it.

The steward runs with the rights of the test: what needs more says so with a mark.
"""

import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from sbxd.mechanism.steward_client import StewardClient
from sbxd.port.command import FileChange
from sbxd.steward.server import serve
from sbxd.steward.tree import Bounds, Clock


class once:
    """An upload of these chunks; no generator, since it may be dropped at any point."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = iter(chunks)

    def __aiter__(self) -> "once":
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        for chunk in self._chunks:
            return chunk
        raise StopAsyncIteration


async def collect(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def listing(client: StewardClient, path: bytes) -> tuple[FileChange, ...]:
    """A directory that is one page."""
    page = await client.list_page(path, after=b"", maximum=1000, hash_bytes_max=2**26)
    assert not page.more
    assert not page.omitted
    return page.entries


def paths(entries: tuple[FileChange, ...]) -> list[tuple[str, str]]:
    return [(str(entry.change), entry.path) for entry in entries]


@asynccontextmanager
async def steward(
    root: Path,
    clock: Clock | None = None,
    hash_bytes_max: int = 2**36,
    bounds: Bounds | None = None,
) -> AsyncIterator[StewardClient]:
    """The client; the steward has ended when the block is left."""
    ours, theirs = socket.socketpair()
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    codes: list[int] = []

    def run() -> None:
        codes.append(serve(theirs.fileno(), directory, clock, os.geteuid(), bounds))

    thread = threading.Thread(target=run)
    thread.start()
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    try:
        yield StewardClient(stream, hash_bytes_max=hash_bytes_max)
    finally:
        ours.close()
        thread.join(timeout=60)
        alive = thread.is_alive()
        theirs.close()
        os.close(directory)
    assert not alive
    assert codes in ([0], [1])
