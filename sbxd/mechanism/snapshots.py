"""What the workspace was like before a command: taken ahead, while nobody waits for it.

Between commands only the daemon's own writes change a workspace: no process of the environment is
alive that could. So a snapshot that was taken since the last command and the last write is as good
as one that is taken when the next command comes, and the command need not wait for it. Should
something else have changed the workspace since, that counts as the next command's, not as nobody's.

Invariants: none is taken while a command runs, which would hide what that one changes; one that a
write has overtaken is taken again; the volume's root is compared at each start, not ahead.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from sbxd.mechanism.protocol import MechanismError
from sbxd.mechanism.steward_client import StewardClient
from sbxd.mechanism.volume import Identity, Volume

# How long the next command is waited for first, which then takes its own. Entries that changed
# within the last ticks of the kernel's clock are compared by their contents, which costs more.
AHEAD_SECONDS = 0.02


class Snapshots:
    """Of one environment. Its methods may be awaited concurrently."""

    def __init__(self, steward: StewardClient, volume: Volume) -> None:
        self._steward = steward
        self._volume = volume
        self._turn = trio.Lock()
        self._idle = True  # no command runs
        self._asked = trio.Event()  # a command wants to start
        self._writes = 0
        self._taken: tuple[int, Identity] | None = None  # with how many writes there were

    async def before_command(self) -> None:
        """The state before the command is known, and the root is the one that was prepared. From
        here on a command runs, until `command_over`. Raises WorkspaceChanged, MechanismError."""
        self._asked.set()
        async with self._turn:
            self._idle = False
            taken, self._taken = self._taken, None
            if taken is None or taken[0] != self._writes:
                taken = await self._take()
        self._volume.check(taken[1])

    def command_over(self) -> None:
        """The command is over and compared, or was not started. Never blocks."""
        self._idle = True
        self._asked = trio.Event()

    async def take_ahead(self) -> None:
        """Take one for the next command unless that comes at once. What fails is taken again, and
        told of, when the command comes."""
        with trio.move_on_after(AHEAD_SECONDS):
            await self._asked.wait()
        async with self._turn:
            if self._idle and not self._asked.is_set():
                try:
                    self._taken = await self._take()
                except MechanismError:
                    return

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The daemon changes the workspace within the block."""
        self._writes += 1
        try:
            yield
        finally:
            self._writes += 1

    async def _take(self) -> tuple[int, Identity]:
        writes = self._writes
        return writes, await self._steward.snapshot()
