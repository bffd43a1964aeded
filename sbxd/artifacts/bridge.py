"""Runs asyncio libraries for callers on any event loop.

aiosqlite and psycopg's asynchronous half are asyncio's; a worker may run trio. They run on an
asyncio loop in a thread of its own, and a caller waits for a whole piece of work at once. So there
is one path for both kinds of caller, and a cancellation takes effect before a transaction or after
it and never within (decision 0070).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, final

import anyio.from_thread
import anyio.to_thread
from anyio import CapacityLimiter

ResultT = TypeVar("ResultT")

_WAITING_MAX = 8


@final
class AsyncioBridge:
    """Made by `open_bridge`."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal) -> None:
        self._portal = portal
        self._limiter = CapacityLimiter(_WAITING_MAX)

    async def run(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Await `work` on the asyncio loop. At most 8 at a time; the others wait their turn.

        Cancellation: before the work has begun, or when it is done.
        """
        return await anyio.to_thread.run_sync(self._portal.call, work, limiter=self._limiter)

    def run_blocking(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """The same without giving way to other tasks: for the short work of closing, which must
        not be cancelled."""
        return self._portal.call(work)


@asynccontextmanager
async def open_bridge() -> AsyncIterator[AsyncioBridge]:
    """A bridge that lasts for the block. Leaving it waits for the thread's end."""
    with anyio.from_thread.start_blocking_portal(backend="asyncio") as portal:
        yield AsyncioBridge(portal)
