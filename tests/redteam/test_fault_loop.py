"""SIGKILL at every step of the journal and at seeded instants: nothing is orphaned, nobody else is
killed, and what is held equals what the journal says.

`python3 -m tests.bench --faults N` tries as many points as one likes.
"""

import pytest

from tests.redteam.faults import Found, ids_held, journal_ids, points, try_point
from tests.redteam.inventory import wait_settled
from tests.redteam.live import default_image, live

pytestmark = pytest.mark.needs("daemon")

POINTS = 40
SEED = 7


@pytest.mark.case("LIF-01")
async def test_a_kill_at_any_instant_leaves_nothing_that_the_journal_does_not_know() -> None:
    await wait_settled()
    image = await default_image()
    found = Found()
    for point in points(POINTS, SEED):
        await try_point(point, image, found)
    print(f"fault loop, seed {SEED}: {found}")
    assert len(found.points) == POINTS
    assert (found.orphans, found.wrong_kills, found.disagreements) == ([], [], [])


async def test_what_is_live_is_held_and_in_the_journal() -> None:
    """The control: both inventories see an environment."""
    async with live() as one:
        assert one.handle.environment_id in ids_held()
        assert one.handle.environment_id in journal_ids()


def test_the_points_meet_every_step_with_every_victim_and_are_the_same_for_a_seed() -> None:
    chosen = list(points(POINTS, SEED))
    assert chosen == list(points(POINTS, SEED))
    assert chosen != list(points(POINTS, SEED + 1))
    steps = {(point.victim, point.operation, point.after_writes) for point in chosen}
    assert len([step for step in steps if step[2] is not None]) == 24
