"""Operations are interleaved, and one that fails does not stop the others."""

import random
from dataclasses import dataclass, field

from tests.bench.rounds import GIVE_UP_AFTER, SPACING_SECONDS, take
from tests.bench.samples import Mark, Marks, OperationFailed, Pace


@dataclass
class Recorder:
    """An operation that writes down when it ran, and fails where it is told to."""

    tool: str
    log: list[str]
    fails: frozenset[int] = frozenset()
    program: str = "true"
    runs: int = 0
    cleaned: int = field(default=0)

    async def ready(self) -> None:
        self.log.append(f"ready {self.tool}")

    async def run(self) -> Marks:
        self.runs += 1
        self.log.append(self.tool)
        if self.runs in self.fails:
            raise OperationFailed("told to")
        return {Mark.REPLY: float(self.runs)}

    async def clean(self) -> Marks:
        self.cleaned += 1
        return {Mark.DESTROY: 0.5}


async def no_rest(seconds: float) -> None:
    raise AssertionError("a tight run does not rest")


async def test_each_round_holds_each_operation_once_and_orders_differ() -> None:
    log: list[str] = []
    operations = [Recorder(name, log) for name in ("a", "b", "c")]
    await take(operations, rounds=30, pace=Pace.TIGHT, rng=random.Random(7), rest=no_rest)
    ran = [entry for entry in log if not entry.startswith("ready")]
    rounds = [tuple(ran[n : n + 3]) for n in range(0, len(ran), 3)]
    assert len(rounds) == 30
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3


async def test_a_spaced_sample_rests_between_ready_and_run() -> None:
    log: list[str] = []

    async def rest(seconds: float) -> None:
        log.append(f"rest {seconds}")

    await take([Recorder("a", log)], rounds=2, pace=Pace.SPACED, rng=random.Random(1), rest=rest)
    assert log == ["ready a", f"rest {SPACING_SECONDS}", "a"] * 2


async def test_a_failure_is_counted_and_cleaned_and_gives_no_value() -> None:
    log: list[str] = []
    failing = Recorder("a", log, fails=frozenset({2}))
    [outcome] = await take([failing], rounds=4, pace=Pace.TIGHT, rng=random.Random(1), rest=no_rest)
    assert outcome.values == {Mark.REPLY: [1.0, 3.0, 4.0], Mark.DESTROY: [0.5] * 3}
    assert outcome.reasons == ["told to"]
    assert failing.cleaned == 4


async def test_an_operation_that_keeps_failing_is_left_out_and_others_go_on() -> None:
    log: list[str] = []
    broken = Recorder("broken", log, fails=frozenset(range(100)))
    whole = Recorder("whole", log)
    outcomes = await take(
        [broken, whole], rounds=20, pace=Pace.TIGHT, rng=random.Random(1), rest=no_rest
    )
    assert broken.runs == GIVE_UP_AFTER
    assert len(outcomes[0].reasons) == GIVE_UP_AFTER
    assert len(outcomes[1].values[Mark.REPLY]) == 20
