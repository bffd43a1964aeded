"""What the warm pool says of itself beyond its hand-outs, which the audit's events count. Pure."""

from collections.abc import Sequence
from itertools import accumulate

from sbxd.lifecycle.pool import AGE_BOUNDS_SECONDS, PoolStatus
from sbxd.metrics.families import Bucket, Distribution, Family, Kind, Sample, Unit


def families(status: PoolStatus) -> Sequence[Family]:
    """As families."""
    running = tuple(accumulate(status.age_counts))
    ages = Distribution(
        buckets=tuple(
            Bucket(bound, count) for bound, count in zip(AGE_BOUNDS_SECONDS, running, strict=False)
        ),
        count=running[-1],
        sum=status.age_seconds_sum,
    )
    return (
        Family(
            name="sbxd_pool_slot_age_seconds",
            kind=Kind.HISTOGRAM,
            help="Age of a prepared slot at its hand-out.",
            unit=Unit.SECONDS,
            distributions=(ages,),
        ),
        _counter("sbxd_pool_slots_built", "Slots that the pool prepared.", status.built),
        _counter(
            "sbxd_pool_slots_discarded",
            "Slots that ended without a tenant: too old, or not wanted any more.",
            status.discarded,
        ),
    )


def _counter(name: str, help: str, value: int) -> Family:
    return Family(name=name, kind=Kind.COUNTER, help=help, samples=(Sample(value=value),))
