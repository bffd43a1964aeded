"""What a database has to be for the metadata: transactions of named statements.

Invariant: this module and those above it know no driver; each driver has one adapter file.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

ResultT = TypeVar("ResultT")

Value = str | int | bytes | None
Row = Sequence[object]


class Dialect(StrEnum):
    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


class Session(Protocol):
    """One open transaction."""

    async def execute(self, sql: str, values: Mapping[str, Value] | None = None) -> Sequence[Row]:
        """Run a statement with `:name` parameters; its rows, none for one that returns none."""
        ...


class Database(Protocol):
    @property
    def now_statement(self) -> str:
        """Selects the database's own time: one row of microseconds since 1970 UTC."""
        ...

    async def transaction(self, work: Callable[[Session], Awaitable[ResultT]]) -> ResultT:
        """Await `work` in a transaction: committed and durable when it returns, undone when it
        raises. `work` may run more than once and awaits nothing but its session.

        Raises: what `work` raises; ArtifactUnavailable(METADATA or NO_SPACE).
        Cancellation: before the transaction or after it.
        """
        ...
