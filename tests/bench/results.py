"""Everything that one run has found, as data: what --json writes."""

from collections.abc import Sequence

from msgspec import Struct

from tests.bench.load import Throughput
from tests.bench.machine import Machine
from tests.bench.memory import IdleMemory, ServiceMemory
from tests.bench.rounds import Outcome
from tests.bench.samples import Mark, Pace, Summary, summarise


class Row(Struct, frozen=True, kw_only=True):
    """One operation of a group, by mark. No mark at all when every sample failed."""

    tool: str
    program: str
    failures: int
    reasons: tuple[str, ...]
    marks: dict[Mark, Summary]


class Group(Struct, frozen=True, kw_only=True):
    """Operations that were sampled side by side. references: the tools that ratios are to."""

    name: str
    pace: Pace
    rounds: int
    references: tuple[str, ...]
    rows: tuple[Row, ...]

    def find(self, tool: str, program: str, mark: Mark) -> Summary | None:
        """One summary; None when it was not measured."""
        for row in self.rows:
            if (row.tool, row.program) == (tool, program):
                return row.marks.get(mark)
        return None


class Target(Struct, frozen=True, kw_only=True):
    """met: None when it could not be measured."""

    name: str
    wanted: str
    measured: str
    met: bool | None


class Results(Struct, frozen=True, kw_only=True):
    machine: Machine
    # Of the daemon; None when it was not measured.
    mechanism: str | None
    seed: int
    quick: bool
    groups: tuple[Group, ...]
    throughput: tuple[Throughput, ...]
    services: ServiceMemory | None
    idle: tuple[IdleMemory, ...]
    refill: Summary | None
    targets: tuple[Target, ...]
    # Whole parts that could not be run, and why.
    broken: tuple[str, ...]

    @property
    def failures(self) -> int:
        """How many operations failed."""
        samples = sum(row.failures for group in self.groups for row in group.rows)
        return len(self.broken) + samples + sum(each.failures for each in self.throughput)


def group_of(
    name: str,
    outcomes: Sequence[Outcome],
    *,
    pace: Pace,
    rounds: int,
    references: tuple[str, ...],
) -> Group:
    """A group from what was sampled."""
    return Group(
        name=name,
        pace=pace,
        rounds=rounds,
        references=references,
        rows=tuple(_row(outcome) for outcome in outcomes),
    )


def _row(outcome: Outcome) -> Row:
    failures = len(outcome.reasons)
    found = {mark: summarise(v, failures=failures) for mark, v in outcome.values.items()}
    return Row(
        tool=outcome.tool,
        program=outcome.program,
        failures=failures,
        reasons=tuple(dict.fromkeys(outcome.reasons))[:3],
        marks={mark: summary for mark, summary in found.items() if summary},
    )
