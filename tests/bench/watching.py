"""How much memory processes hold while something goes on: anonymous memory, read every 50 ms.

Anonymous pages are a process' own (heap, buffers); those of files are whoever's that maps them.
"""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio
from msgspec import Struct

INTERVAL_SECONDS = 0.05
PROC = Path("/proc")


@dataclass(frozen=True)
class Watched:
    """A process under a name; processes of one name are added up."""

    name: str
    pid: int


class Growth(Struct, frozen=True, kw_only=True):
    """KiB: at the beginning, at most, at the end."""

    name: str
    before_kib: float
    most_kib: float
    after_kib: float


def anonymous_kib(pid: int) -> float:
    """Of one process; 0 when it is gone."""
    try:
        text = (PROC / str(pid) / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@asynccontextmanager
async def watching(watched: Sequence[Watched]) -> AsyncIterator[Callable[[], tuple[Growth, ...]]]:
    """Reads for as long as the block runs. What it yields gives the result, after the block."""
    names = list(dict.fromkeys(each.name for each in watched))

    def now() -> dict[str, float]:
        return {
            name: sum(anonymous_kib(each.pid) for each in watched if each.name == name)
            for name in names
        }

    before = now()
    most, after = dict(before), dict(before)

    async def look() -> None:
        while True:
            for name, kib in now().items():
                most[name] = max(most[name], kib)
            await trio.sleep(INTERVAL_SECONDS)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        yield lambda: tuple(
            Growth(name=name, before_kib=before[name], most_kib=most[name], after_kib=after[name])
            for name in names
        )
        nursery.cancel_scope.cancel()
    after.update(now())
