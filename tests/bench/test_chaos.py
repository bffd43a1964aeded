"""What a chaos soak is judged by."""

import msgspec
import pytest

from tests.bench.chaos import EXPECTED, Chaos, render
from tests.redteam.faults import Found

CLEAN = Chaos(
    seconds=10.0,
    seed=1,
    operations=3,
    latencies={},
    outcomes={"provision ok": 1, "execute UNREACHABLE": 1, "destroy ok": 1},
    kills={"daemon": 1},
    admin_answers=None,
    memory_growth_kib={"daemon": 12.0},
    leftovers=(),
)


def test_what_a_kill_explains_is_sound() -> None:
    assert CLEAN.sound
    assert "nothing is left over" in "\n".join(render(CLEAN))


@pytest.mark.parametrize(
    "change",
    [
        {"leftovers": ("orphan a",)},
        {"outcomes": {"execute STALE_LEASE": 1}},
        {"outcomes": {"provision TENANT_MISMATCH": 1}},
        {"operations": 0},
    ],
    ids=str,
)
def test_a_leftover_an_alarm_and_an_empty_soak_are_not(change: dict[str, object]) -> None:
    found = msgspec.structs.replace(CLEAN, **change)
    assert not found.sound
    text = "\n".join(render(found))
    assert ("LEFT OVER" in text) == bool(found.leftovers)
    assert ("UNEXPECTED" in text) == bool(found.unexpected)


def test_no_alarm_is_expected() -> None:
    assert EXPECTED.isdisjoint(
        {"PROCESS_SURVIVED", "TENANT_MISMATCH", "WORKSPACE_IDENTITY_CHANGED"}
    )


def test_the_fault_loop_says_what_it_found() -> None:
    found = Found(points=["a", "b"], orphans=["x"])
    assert str(found).startswith("2 points, 1 orphans, 0 wrong kills")
