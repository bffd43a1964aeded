"""The memory that the daemon gives to what commands will read.

Invariant: what is held at once never exceeds the bound; who finds no room is told when to ask
again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from sbxd.port.errors import ExecutionUnavailable, UnavailableCode

STDIN_RETRY_SECONDS = 1.0


class StdinBudget:
    """How many bytes of stdin the daemon holds for commands that run or wait."""

    def __init__(self, bytes_max: int) -> None:
        self._left = bytes_max

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Hold `size` bytes while the block runs. Raises ExecutionUnavailable(CAPACITY)."""
        if size > self._left:
            raise ExecutionUnavailable(
                UnavailableCode.CAPACITY,
                "too much stdin is held for other commands: write a file to the workspace instead",
                retry_after_seconds=STDIN_RETRY_SECONDS,
            )
        self._left -= size
        try:
            yield
        finally:
            self._left += size
