"""The runner's last page: what each lane came to, which gate ran where, and what went wrong.

Pure but for the given `show`: a verdict over outcomes, so it can be tested without a lane.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .features import LaneKind

# A skipped test is a failure unless its reason begins so; the report then lists it.
NOT_RUN = "not run: "
# So many tests without an outcome are named; of more, the count says it.
_SILENT_SHOWN = 5
# Of each lane, so many of the tests that took longest are named, if they took so many seconds.
_SLOWEST_SHOWN = 8
_SLOW_SECONDS = 5.0


@dataclass(frozen=True)
class Placed:
    id: str
    needs: frozenset[str]
    gates: tuple[str, ...]
    also: frozenset[str] = frozenset()  # lanes in which it runs besides the cheapest


@dataclass
class Outcome:
    """What one lane's run came to. `budget` and the other times are in seconds; `error`
    is set when the lane or its run broke down. `took` has the seconds of each test that ended, its
    fixtures' included."""

    lane: LaneKind
    tests: list[Placed]
    budget: float = 600.0
    setup_seconds: float = 0.0
    seconds: float = 0.0
    results: dict[str, tuple[str, str]] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    error: str = ""


def summarise(outcomes: Sequence[Outcome], show: Callable[[str], None]) -> int:
    """Show the tables and return the exit status."""
    wrong: list[str] = []
    not_run: list[str] = []
    gates: dict[str, dict[str, list[str]]] = {}
    passed = failed = 0
    show("")
    show(f"{'lane':<10} {'tests':>6} {'passed':>7} {'failed':>7} {'not run':>8} {'seconds':>16}")
    for outcome in outcomes:
        counts = {"passed": 0, "failed": 0, "not run": 0}
        silent = [test for test in outcome.tests if test.id not in outcome.results]
        unsaid = set(silent[_SILENT_SHOWN:])
        if unsaid:
            wrong.append(f"{outcome.lane}: {len(silent)} tests were placed here without an outcome")
        if outcome.error:
            wrong.append(f"{outcome.lane}: {outcome.error}")
        for test in outcome.tests:
            verdict, reason = judge(outcome.results.get(test.id))
            counts[verdict] += 1
            if verdict == "failed" and test not in unsaid:
                wrong.append(f"{outcome.lane}: {test.id}: {reason or 'failed'}")
            elif verdict == "not run":
                not_run.append(f"{outcome.lane}: {test.id}: {reason}")
            ran = verdict if test.id in outcome.results else "not run"
            for gate in test.gates:
                gates.setdefault(gate, {}).setdefault(outcome.lane, []).append(ran)
        passed += counts["passed"]
        failed += counts["failed"]
        spent = f"{outcome.seconds:.0f} of {outcome.budget:.0f}"
        show(
            f"{outcome.lane:<10} {len(outcome.tests):>6} {counts['passed']:>7}"
            f" {counts['failed']:>7} {counts['not run']:>8} {spent:>16}"
            f"  (set-up {outcome.setup_seconds:.0f})"
        )
    if gates:
        show("\ngates")
    for gate, lanes in sorted(gates.items()):
        show(f"  {gate:<50} {', '.join(_gate_cell(lane, lanes[lane]) for lane in lanes)}")
        if not any(verdict != "not run" for verdicts in lanes.values() for verdict in verdicts):
            wrong.append(f"gate {gate} ran in no lane")
    slow = [line for outcome in outcomes for line in _slowest(outcome)]
    for title, lines in (("slowest", slow), ("not run", not_run), ("wrong", wrong)):
        if lines:
            show(f"\n{title}")
        for line in lines:
            show(f"  {line}")
    if not outcomes:
        wrong.append("no test was selected")
        show("\nwrong\n  no test was selected")
    show(f"\n{passed} passed, {failed} failed, {len(not_run)} skipped")
    return 1 if wrong else 0


def _slowest(outcome: Outcome) -> list[str]:
    longest = sorted(outcome.took.items(), key=lambda row: -row[1])[:_SLOWEST_SHOWN]
    return [
        f"{outcome.lane}: {seconds:.0f} s {name}"
        for name, seconds in longest
        if seconds >= _SLOW_SECONDS
    ]


def judge(result: tuple[str, str] | None) -> tuple[str, str]:
    """A verdict (passed, failed, not run) and its reason for what a lane reported of a test."""
    if result is None:
        return "failed", "placed here, and no outcome was reported"
    outcome, reason = result
    if outcome == "skipped":
        if reason.startswith(NOT_RUN):
            return "not run", reason.removeprefix(NOT_RUN)
        return "failed", f"skipped ({reason}): a skip counts as a failure, see tests/lab/README.md"
    return ("passed", reason) if outcome == "passed" else ("failed", reason)


def _gate_cell(lane: str, verdicts: list[str]) -> str:
    good = sum(verdict == "passed" for verdict in verdicts)
    return f"{lane} {good}/{len(verdicts)}"
