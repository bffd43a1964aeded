"""What was measured, and its summary. Pure.

All times are milliseconds. A percentile is the nearest rank: a value that was really measured,
never one between two (p99 of fewer than 100 values is their largest).
"""

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct


class Pace(StrEnum):
    """How samples follow each other. SPACED: the machine rests 60 ms before each."""

    SPACED = "spaced"
    TIGHT = "tight"


class Mark(StrEnum):
    """What a time is measured to, from the request; FIRST_BYTE, REPLY, DESTROY and EMPTY are
    results, the others steps for the profile."""

    FIRST_BYTE = "first byte"
    REPLY = "reply"
    PROVISION = "provision"
    EXECUTE = "execute"
    TO_OUTPUT = "execute to first byte"
    AFTER_OUTPUT = "first byte to reply"
    DESTROY = "destroy"
    EMPTY = "empty"
    DAEMON = "execute, by the daemon's clock"


Marks = dict[Mark, float]
PROFILE_MARKS = (
    Mark.PROVISION,
    Mark.EXECUTE,
    Mark.DAEMON,
    Mark.TO_OUTPUT,
    Mark.AFTER_OUTPUT,
)


class OperationFailed(Exception):
    """One sample could not be taken. The text says why, for the report."""


def leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    """The errors of a group and of the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


class Summary(Struct, frozen=True, kw_only=True):
    """Of one series; `values_ms` in the order of measurement."""

    n: int
    failures: int
    minimum: float
    p50: float
    p95: float
    p99: float
    values_ms: tuple[float, ...]


def percentile(values: Sequence[float], per_cent: float) -> float:
    """The nearest-rank percentile.

    Args: values: not empty, in any order. per_cent: above 0, at most 100.
    """
    ordered = sorted(values)
    return ordered[max(1, math.ceil(per_cent / 100 * len(ordered))) - 1]


def summarise(values: Sequence[float], *, failures: int) -> Summary | None:
    """None when nothing was measured."""
    if not values:
        return None
    return Summary(
        n=len(values),
        failures=failures,
        minimum=min(values),
        p50=percentile(values, 50),
        p95=percentile(values, 95),
        p99=percentile(values, 99),
        values_ms=tuple(round(value, 4) for value in values),
    )
