"""Takes samples of several operations side by side: each once a round, in random order.

Interleaving makes ratios fair on a machine whose speed wanders. Preparing and clearing up are off
the clock. An operation that fails is counted, and is left out of the rest after `GIVE_UP_AFTER`
failures in a row; the others go on.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.bench.samples import Mark, Marks, OperationFailed, Pace

SPACING_SECONDS = 0.06
GIVE_UP_AFTER = 5

Rest = Callable[[float], Awaitable[None]]


class Operation(Protocol):
    """Something that is timed. `tool` and `program` name it in the table."""

    @property
    def tool(self) -> str: ...

    @property
    def program(self) -> str: ...

    async def ready(self) -> None:
        """Make the next sample possible. Off the clock. Raises OperationFailed."""
        ...

    async def run(self) -> Marks:
        """Take one sample, in ms. Raises OperationFailed."""
        ...

    async def clean(self) -> Marks:
        """Undo it, off the clock; what it measured of that. Raises OperationFailed."""
        ...


@dataclass
class Outcome:
    """All samples of one operation."""

    tool: str
    program: str
    values: dict[Mark, list[float]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    failures_in_a_row: int = 0

    def add(self, marks: Marks) -> None:
        for mark, value in marks.items():
            self.values.setdefault(mark, []).append(value)


async def take(
    operations: Sequence[Operation],
    *,
    rounds: int,
    pace: Pace,
    rng: random.Random,
    rest: Rest,
) -> list[Outcome]:
    """`rounds` samples of each operation.

    Args: rest: called with the seconds to rest before a spaced sample.
    """
    outcomes = [Outcome(operation.tool, operation.program) for operation in operations]
    pairs = list(zip(operations, outcomes, strict=True))
    for _ in range(rounds):
        for operation, outcome in rng.sample(pairs, len(pairs)):
            if outcome.failures_in_a_row < GIVE_UP_AFTER:
                await _sample(operation, outcome, pace, rest)
    return outcomes


async def _sample(operation: Operation, outcome: Outcome, pace: Pace, rest: Rest) -> None:
    try:
        await operation.ready()
        if pace is Pace.SPACED:
            await rest(SPACING_SECONDS)
        try:
            marks = await operation.run()
        finally:
            cleaned = await operation.clean()
    except OperationFailed as error:
        outcome.reasons.append(str(error))
        outcome.failures_in_a_row += 1
        return
    outcome.failures_in_a_row = 0
    outcome.add({**marks, **cleaned})
