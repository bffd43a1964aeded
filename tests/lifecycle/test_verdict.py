"""What ended a command: the first wins, and evidence corrects nothing but an own end."""

from hypothesis import given
from hypothesis import strategies as st

from sbxd.lifecycle.verdict import End, ForkRefusals, Lost, Verdict, settle
from sbxd.mechanism.protocol import CommandExit, Counters
from sbxd.port.command import KillReason

EXIT = CommandExit(exit_code=0, signal=None)
FAILED = CommandExit(exit_code=1, signal=None)
DIED = CommandExit(exit_code=None, signal=7)
ends = st.one_of(
    st.sampled_from(list(KillReason)), st.sampled_from((EXIT, FAILED, DIED)), st.builds(Lost)
)


@given(st.lists(ends, min_size=1))
def test_the_first_end_stands(told: list[End]) -> None:
    verdict = Verdict()
    assert [verdict.decide(end) for end in told] == [True] + [False] * (len(told) - 1)
    assert verdict.end is told[0]


@given(ends, st.sampled_from([None, 0, 3]), st.booleans(), st.booleans())
def test_only_an_own_end_is_corrected(
    end: End, oom_kill: int | None, exceeded: bool, full: bool
) -> None:
    settled = settle(
        end, Counters(oom_kill=oom_kill), output_exceeded=exceeded, volume_exhausted=full
    )
    if not isinstance(end, CommandExit):
        assert settled is end
    elif oom_kill:
        assert settled is KillReason.MEMORY
    elif exceeded:
        assert settled is KillReason.OUTPUT_LIMIT
    elif full and end is not EXIT:
        assert settled is KillReason.DISK
    else:
        assert settled is end


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 60)), max_size=60),
    st.integers(1, 100),
    st.floats(0.1, 3),
)
def test_refusals_are_counted_in_the_window_alone(
    steps: list[tuple[float, int]], refusals_max: int, window: float
) -> None:
    watch = ForkRefusals(refusals_max=refusals_max, window_seconds=window)
    history = [(float("-inf"), 0)]
    now, total = 0.0, 0
    for pause, refused in steps:
        now, total = now + pause, total + refused
        before = [count for at, count in history if at <= now - window][-1]
        assert watch.exceeded(now, total) == (total - before >= refusals_max)
        history.append((now, total))
