"""Metrics as data: families of samples, and the instruments that count them. Pure.

Invariants: an increment is one lookup in a dictionary and an addition, and never raises for a
value of a label, whatever it is; the number of series of an instrument is bounded, and what is
beyond the bound is counted as `_others` in every label; a counter never goes down. One event loop
increments and reads, so nothing here locks. Deliberately absent: a registry of the process
(whoever makes an instrument holds it) and a clock.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct

OTHERS = "_others"
# All families together stay within one frame of the protocol (a test fills them).
SERIES_MAX = 48

_NAME = re.compile(r"sbxd_[a-z0-9_]*[a-z0-9]", re.ASCII)
_LABEL = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Unit(StrEnum):
    """The base unit, which ends a family's name. NONE: a number of things."""

    NONE = ""
    SECONDS = "seconds"
    BYTES = "bytes"


class Label(Struct, frozen=True):
    name: str
    value: str


class Sample(Struct, frozen=True, kw_only=True):
    """One series now."""

    labels: tuple[Label, ...] = ()
    value: float


class Bucket(Struct, frozen=True):
    """How many observations were at most `upper`."""

    upper: float
    count: int


class Distribution(Struct, frozen=True, kw_only=True):
    """One histogram now. buckets: cumulative, without the last one, whose count is `count`."""

    labels: tuple[Label, ...] = ()
    buckets: tuple[Bucket, ...]
    count: int
    sum: float


class Family(Struct, frozen=True, kw_only=True):
    """Series of one name. name: without the suffix that an exposition gives a counter (`_total`).

    samples: of a counter or a gauge. distributions: of a histogram.
    """

    name: str
    kind: Kind
    help: str
    unit: Unit = Unit.NONE
    samples: tuple[Sample, ...] = ()
    distributions: tuple[Distribution, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.endswith(("_total", "_bucket", "_count")):
            raise ValueError(f"{self.name!r} is no name of a family")
        if self.unit and not self.name.endswith(f"_{self.unit}"):
            raise ValueError(f"{self.name} does not end in its unit, {self.unit}")
        if bool(self.distributions) and self.kind is not Kind.HISTOGRAM:
            raise ValueError(f"{self.name} is a {self.kind} with a distribution")


def gauge(
    name: str,
    help: str,
    *samples: tuple[float, tuple[str, ...]],
    unit: Unit = Unit.NONE,
    labels: Sequence[str] = (),
) -> Family:
    """A family of numbers that were read now. samples: each a value and the values of `labels`."""
    return Family(
        name=name,
        kind=Kind.GAUGE,
        help=help,
        unit=unit,
        samples=tuple(
            Sample(labels=_labels(labels, values), value=value) for value, values in samples
        ),
    )


class _Instrument:
    """What counters and histograms share: the name, the labels and the bound."""

    def __init__(
        self, name: str, help: str, *labels: str, unit: Unit = Unit.NONE, series_max: int
    ) -> None:
        if not all(_LABEL.fullmatch(each) for each in labels):
            raise ValueError(f"{name} has a label that is none: {labels}")
        self.name = name
        self.help = help
        self.labels = labels
        self.unit = unit
        self._series_max = series_max
        self._others = (OTHERS,) * len(labels)

    def _admitted(self, key: tuple[str, ...], present: int) -> tuple[str, ...]:
        """The key of a series that does not exist yet."""
        if len(key) != len(self.labels):
            raise TypeError(f"{self.name} has the labels {self.labels}, not {len(key)}")
        return key if present < self._series_max else self._others


class Counter(_Instrument):
    """Numbers that only grow, one for each combination of labels' values."""

    def __init__(
        self,
        name: str,
        help: str,
        *labels: str,
        unit: Unit = Unit.NONE,
        series_max: int = SERIES_MAX,
    ) -> None:
        super().__init__(name, help, *labels, unit=unit, series_max=series_max)
        self._values: dict[tuple[str, ...], float] = {}
        if not labels:
            self._values[()] = 0

    def declare(self, *keys: tuple[str, ...]) -> "Counter":
        """These series exist from now on, at 0: a rate sees their first increment."""
        for key in keys:
            self._values.setdefault(self._admitted(key, len(self._values)), 0)
        return self

    def add(self, *key: str, by: float = 1) -> None:
        """Count `by` more (at least 0). key: a value for each label, in their order."""
        values = self._values
        if key in values:
            values[key] += by
        else:
            key = self._admitted(key, len(values))
            values[key] = values.get(key, 0) + by

    @property
    def total(self) -> float:
        """Of all series together."""
        return sum(self._values.values())

    def value(self, *key: str) -> float:
        """One series, 0 for one that there is not."""
        return self._values.get(key, 0)

    def family(self) -> Family:
        """What it has counted."""
        return Family(
            name=self.name,
            kind=Kind.COUNTER,
            help=self.help,
            unit=self.unit,
            samples=tuple(
                Sample(labels=_labels(self.labels, key), value=value)
                for key, value in self._values.items()
            ),
        )


class Histogram(_Instrument):
    """Distributions over fixed upper bounds, one for each combination of labels' values."""

    def __init__(
        self,
        name: str,
        help: str,
        *labels: str,
        bounds: Sequence[float],
        unit: Unit = Unit.SECONDS,
        series_max: int = SERIES_MAX,
    ) -> None:
        super().__init__(name, help, *labels, unit=unit, series_max=series_max)
        if list(bounds) != sorted(set(bounds)) or not all(math.isfinite(b) for b in bounds):
            raise ValueError(f"the bounds of {name} do not rise")
        self._bounds = tuple(bounds)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self.declare(())

    def declare(self, *keys: tuple[str, ...]) -> "Histogram":
        """These series exist from now on, without an observation."""
        for key in keys:
            self._begin(self._admitted(key, len(self._counts)))
        return self

    def _begin(self, key: tuple[str, ...]) -> None:
        if key not in self._counts:
            self._counts[key] = [0] * (len(self._bounds) + 1)
            self._sums[key] = 0.0

    def observe(self, value: float, *key: str) -> None:
        """Count one observation (at least 0)."""
        if key not in self._counts:
            key = self._admitted(key, len(self._counts))
            self._begin(key)
        self._counts[key][bisect_left(self._bounds, value)] += 1
        self._sums[key] += value

    def count(self, *key: str) -> int:
        """How many observations one series has."""
        return sum(self._counts.get(key, ()))

    def quantile(self, share: float, *keys: tuple[str, ...]) -> float | None:
        """The upper bound below which `share` of the observations of these series lie, as near as
        the bounds tell; None without any. What is beyond the last bound is infinity."""
        merged = [0] * (len(self._bounds) + 1)
        for key in keys or tuple(self._counts):
            for place, count in enumerate(self._counts.get(key, ())):
                merged[place] += count
        wanted, seen = share * sum(merged), 0
        if not any(merged):
            return None
        for bound, count in zip((*self._bounds, math.inf), merged, strict=True):
            seen += count
            if seen >= wanted:
                return bound
        return math.inf

    def family(self) -> Family:
        """What it has observed."""
        return Family(
            name=self.name,
            kind=Kind.HISTOGRAM,
            help=self.help,
            unit=self.unit,
            distributions=tuple(self._distributions()),
        )

    def _distributions(self) -> Iterable[Distribution]:
        for key, counts in self._counts.items():
            running, buckets = 0, []
            for bound, count in zip(self._bounds, counts, strict=False):
                running += count
                buckets.append(Bucket(bound, running))
            yield Distribution(
                labels=_labels(self.labels, key),
                buckets=tuple(buckets),
                count=running + counts[-1],
                sum=self._sums[key],
            )


def _labels(names: Sequence[str], values: Sequence[str]) -> tuple[Label, ...]:
    return tuple(Label(name, value) for name, value in zip(names, values, strict=True))
