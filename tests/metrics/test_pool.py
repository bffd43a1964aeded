"""What the pool says of itself is shown as it says it."""

from sbxd.lifecycle.environments import Census, PoolCensus
from sbxd.lifecycle.pool import AGE_BOUNDS_SECONDS, PoolStatus
from sbxd.metrics import pool, readings
from sbxd.metrics.exposition import render
from sbxd.wire.observing import MetricsForm

KEPT = PoolStatus(
    slots_min=4,
    slots_max=8,
    wanted=4,
    ready=4,
    building=0,
    hits=6,
    misses=2,
    age_counts=(1, 2, 0, 0, 0, 0, 3),
    age_seconds_sum=12_000.5,
    built=9,
    failed=0,
    discarded=3,
    keys=(),
)


def test_ages_are_cumulative_and_what_is_beyond_the_last_bound_is_in_the_count() -> None:
    assert len(KEPT.age_counts) == len(AGE_BOUNDS_SECONDS) + 1
    text = render(pool.families(KEPT), MetricsForm.PROMETHEUS)
    assert 'sbxd_pool_slot_age_seconds_bucket{le="1"} 1\n' in text
    assert 'sbxd_pool_slot_age_seconds_bucket{le="3600"} 3\n' in text
    assert 'sbxd_pool_slot_age_seconds_bucket{le="+Inf"} 6\n' in text
    assert "sbxd_pool_slot_age_seconds_sum 12000.5\n" in text
    assert "sbxd_pool_slots_built_total 9\n" in text
    assert "sbxd_pool_slots_discarded_total 3\n" in text


def test_idle_memory_is_a_gauge_and_is_left_out_where_it_is_not_counted() -> None:
    assert f"sbxd_pool_idle_memory_bytes {9 << 20}\n" in _shown(9 << 20)
    assert "sbxd_pool_idle_memory_bytes 0\n" in _shown(0)
    assert "\nsbxd_pool_idle_memory_bytes " not in _shown(None)


def _shown(memory_bytes: int | None) -> str:
    """The page of a daemon whose ready slots hold so much."""
    slots = PoolCensus(building=0, target=1, ages_seconds=(3.0,), memory_bytes=memory_bytes)
    reading = readings.Reading(
        version="1",
        mechanism="gvisor",
        deployment_mode="production",
        started_at=0.0,
        census=Census(states={}, waiting=0, pool=slots),
        quarantined=(),
        erasing_volumes=0,
        erasing_bytes=0,
        environments_max=256,
        tunnels_open=0,
        store=None,
        unenforced=0,
    )
    return render(readings.families(reading), MetricsForm.PROMETHEUS)
