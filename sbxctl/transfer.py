"""Files between the operator's machine and a workspace, in pieces and with flat memory."""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import click
import trio

from sbxd.client.workspace import RemoteWorkspace
from sbxd.port.artifact import ContentDigest

FILE_BYTES_MAX = 2**40
_CHUNK = 256 * 1024

Moved = Callable[[int], None]


def _unseen(size: int) -> None:
    """Nobody watches how it goes."""


@dataclass(frozen=True)
class Transfer:
    """One file between the operator's machine and the workspace."""

    host: Path
    workspace: str


async def put_file(
    workspace: RemoteWorkspace, transfer: Transfer, *, moved: Moved = _unseen
) -> int:
    """Copy one file of the operator's into the workspace; returns its size. `moved` is told each
    piece's size as it goes out."""
    size = transfer.host.stat().st_size
    async with await trio.open_file(transfer.host, "rb") as file:

        async def chunks() -> AsyncIterator[bytes]:
            while chunk := await file.read(_CHUNK):
                yield chunk
                moved(len(chunk))

        await workspace.write_stream(transfer.workspace, size_bytes=size, data=chunks())
    return size


async def get_file(
    workspace: RemoteWorkspace, transfer: Transfer, *, moved: Moved = _unseen
) -> ContentDigest:
    """Copy one file of the workspace to the operator's machine; returns what the daemon says that
    it read.

    The destination is replaced once the file is complete; a link there is replaced, never
    followed. Raises click.ClickException when it cannot be written, and the workspace's errors;
    then, and when cancelled, the destination is as it was.
    """
    destination = transfer.host
    partial = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}")
    try:
        async with AsyncExitStack() as stack:
            file = await stack.enter_async_context(await trio.open_file(partial, "xb"))
            source = workspace.read_stream(transfer.workspace, maximum_bytes=FILE_BYTES_MAX)
            content = await stack.enter_async_context(source)
            async for chunk in content:
                await file.write(chunk)
                moved(len(chunk))
        await trio.Path(partial).replace(destination)
        return content.digest()
    except OSError as error:
        raise click.ClickException(f"{destination}: {error.strerror}") from None
    finally:
        # What could not be made there cannot be removed either.
        with trio.move_on_after(5, shield=True), suppress(OSError):
            await trio.Path(partial).unlink()
