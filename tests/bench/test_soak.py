"""A soak is sound only when every cycle succeeded and nothing is left, and says what is."""

import msgspec
import pytest

from tests.bench.samples import summarise
from tests.bench.soak import MEMORY_FIELDS, Service, Soak, Standing, render

LAUNCHER = Service(
    memory_kib=dict.fromkeys(MEMORY_FIELDS, 14000.0), descriptors=7, threads=1, processes=1
)
BEFORE = Standing(
    kernel={"scopes": 4, "loop_devices": 4},
    leftovers=(),
    services={
        "daemon": Service(
            memory_kib=dict.fromkeys(MEMORY_FIELDS, 25000.0),
            descriptors=80,
            threads=2,
            processes=1,
        ),
        "launcher": LAUNCHER,
    },
)


def soak(after: Standing, *, done: int = 500, failures: dict[str, int] | None = None) -> Soak:
    return Soak(
        wanted=500,
        done=done,
        at_once=32,
        seconds=25.0,
        cycle=summarise([900.0], failures=0),
        destroy=summarise([60.0], failures=0),
        failures=failures or {},
        refusals={"CAPACITY": 3},
        examples=(),
        before=BEFORE,
        after=after,
    )


def launcher(**changes: object) -> Standing:
    """What stands after, with another launcher."""
    services = {**BEFORE.services, "launcher": msgspec.structs.replace(LAUNCHER, **changes)}
    return msgspec.structs.replace(BEFORE, services=services)


def test_an_equal_standing_and_all_cycles_are_sound_and_refusals_do_not_matter() -> None:
    found = soak(BEFORE)
    assert found.sound
    text = "\n".join(render(found))
    assert "20.0 a second" in text
    assert "retried refusals: CAPACITY 3" in text
    assert "nothing is left over" in text


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (
            msgspec.structs.replace(BEFORE, kernel={"scopes": 4, "loop_devices": 5}),
            "loop_devices: 4 before, 5 after",
        ),
        (msgspec.structs.replace(BEFORE, leftovers=("host mount x1",)), "host mount x1"),
        (launcher(descriptors=8), "launcher descriptors: 7 before, 8 after"),
        (launcher(processes=2), "launcher processes: 1 before, 2 after"),
    ],
)
def test_whatever_is_left_is_told_and_makes_it_unsound(after: Standing, said: str) -> None:
    found = soak(after)
    assert found.leftovers == (said,)
    assert not found.sound
    assert f"LEFT OVER: {said}" in "\n".join(render(found))


def test_a_failure_and_a_cycle_that_was_not_done_are_unsound() -> None:
    assert not soak(BEFORE, failures={"ENVIRONMENT_LOST": 1}).sound
    assert not soak(BEFORE, done=499).sound


def test_growth_is_in_per_cent_and_held_against_its_goal() -> None:
    grown = {**LAUNCHER.memory_kib, "Anonymous": 15400.0, "Pss": 28000.0}
    found = soak(launcher(memory_kib=grown))
    assert found.growth_per_cent("launcher", "Anonymous") == pytest.approx(10)
    text = "\n".join(render(found))
    assert "launcher Anonymous: 14000 KiB before, 15400 after: +10.0 % (goal 5 %: MISSED)" in text
    assert "launcher Pss: 14000 KiB before, 28000 after: +100.0 %\n" in text
    assert "daemon Anonymous: 25000 KiB before, 25000 after: +0.0 % (goal 5 %: met)" in text
