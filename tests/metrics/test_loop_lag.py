"""The event loop's lag is what a sleeper woke too late by."""

import trio
from trio.testing import MockClock

from sbxd.metrics.loop_lag import INTERVAL_SECONDS, PASSES_KEPT, LoopLag


async def test_a_loop_that_is_on_time_has_no_lag_and_one_that_was_held_up_has(
    mock_clock: MockClock,
) -> None:
    lag = LoopLag()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lag.run)
        for late in (0.0, 0.0, 3.0):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(INTERVAL_SECONDS + late)
        await trio.testing.wait_all_tasks_blocked()
        assert lag.worst_seconds == 3.0
        nursery.cancel_scope.cancel()
    (histogram, worst) = lag.families()
    (distribution,) = histogram.distributions
    assert distribution.count == 3
    assert distribution.buckets[0].count == 2
    assert worst.samples[0].value == 3.0


def test_the_worst_is_forgotten_after_its_minute() -> None:
    lag = LoopLag()
    lag.note(9.0)
    for _ in range(PASSES_KEPT):
        lag.note(0.001)
    assert lag.worst_seconds == 0.001
