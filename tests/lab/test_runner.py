"""The runner's verdicts: whatever did not run, or ran nowhere, fails the run."""

import ast
import subprocess
import threading
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab import session, testing
from tests.lab.channel import Broken, Decoder, Frame, Kind
from tests.lab.features import OFFERED, Feature, LaneKind, UnknownFeature, parse, place
from tests.lab.host import REPOSITORY, LabError, interpreter
from tests.lab.report import Outcome, Placed, judge, summarise
from tests.lab.testing import distribute

TEST = Placed("tests/x.py::test_x", frozenset(), ("gate.sandbox.x",))


def verdict(*outcomes: Outcome) -> tuple[int, str]:
    lines: list[str] = []
    return summarise(outcomes, lines.append), "\n".join(lines)


def outcome(result: tuple[str, str] | None, error: str = "") -> Outcome:
    results = {TEST.id: result} if result else {}
    return Outcome(LaneKind.UML, [TEST], results=results, error=error)


def test_all_passed_is_status_0_and_names_the_gates_lane() -> None:
    status, page = verdict(outcome(("passed", "")))
    assert status == 0
    assert "gate.sandbox.x" in page
    assert "uml 1/1" in page
    assert page.endswith("1 passed, 0 failed, 0 skipped")


def test_a_lane_is_given_the_files_of_its_tests_and_no_others() -> None:
    """What was named on the command line has been collected from already."""
    ids = ("tests/lab/test_runner.py::test_b", "tests/docs/test_x.py::test_a[1]")
    share = Outcome(LaneKind.UML, [Placed(name, frozenset(), ()) for name in (*ids, ids[0])])
    given = testing._pytest(share, ["-x", "tests/lab/test_runner.py::test_b", "tests"], "/lab")
    assert given[4:] == ["-x", "tests/lab/test_runner.py", "tests/docs/test_x.py"]


def test_the_tests_that_took_longest_are_named_with_their_seconds() -> None:
    slow, quick = "tests/x.py::test_slow", "tests/x.py::test_quick"
    timed = outcome(("passed", ""))
    timed.took = {quick: 0.2, slow: 61.4}
    _, page = verdict(timed)
    assert f"uml: 61 s {slow}" in page
    assert quick not in page


@pytest.mark.parametrize(
    "result", [None, ("failed", ""), ("skipped", "no such thing here"), ("", "")]
)
def test_whatever_is_no_pass_fails_the_run(result: tuple[str, str] | None) -> None:
    status, page = verdict(outcome(result))
    assert status == 1
    assert TEST.id in page.partition("wrong")[2]


def test_a_skip_with_a_listed_reason_is_shown_as_not_run() -> None:
    assert judge(("skipped", "not run: needs a second machine")) == (
        "not run",
        "needs a second machine",
    )


def test_a_gate_that_ran_in_no_lane_fails_the_run() -> None:
    status, page = verdict(outcome(("skipped", "not run: whatever")))
    assert status == 1
    assert "gate gate.sandbox.x ran in no lane" in page


def test_a_gate_whose_tests_reported_nothing_ran_in_no_lane() -> None:
    assert "gate gate.sandbox.x ran in no lane" in verdict(outcome(None))[1]


def test_many_tests_without_an_outcome_are_counted() -> None:
    tests = [Placed(f"test_{number}", frozenset(), ()) for number in range(100)]
    status, page = verdict(Outcome(LaneKind.UML, tests))
    assert status == 1
    assert "100 tests were placed here without an outcome" in page
    assert "test_99" not in page
    assert page.endswith("0 passed, 100 failed, 0 skipped")


def test_a_lane_that_broke_down_fails_the_run_though_its_tests_passed() -> None:
    assert verdict(outcome(("passed", ""), error="over its budget"))[0] == 1


def test_a_run_of_no_tests_fails() -> None:
    assert verdict()[0] == 1


def test_a_lane_that_cannot_be_set_up_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(wish: session.Wish, name: str | None, say: session.Say) -> session.Lane:
        raise LabError("no disk left")

    monkeypatch.setattr(session, "start", refuse)
    broken = Outcome(LaneKind.CONTAINER, [TEST])
    testing.run_waiting(deque([broken]), [], testing.Runs(), lambda text: None)
    status, page = verdict(broken)
    assert status == 1
    assert "no disk left" in page


def test_a_run_over_its_budget_is_killed_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(testing, "interpreter", lambda: str(sleeper))
    slow = Outcome(LaneKind.HOST, [TEST], budget=0.2)
    testing.run_waiting(deque([slow]), [], testing.Runs(), lambda text: None)
    assert slow.error == "over its budget of 0 s: killed"
    assert slow.seconds < 60


def test_every_lane_is_in_the_order_of_lengths() -> None:
    assert sorted(testing.LONGEST_FIRST) == sorted(LaneKind)


def test_two_runners_take_each_waiting_lane_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long lane keeps one runner; the other takes all the rest meanwhile."""
    begun: list[LaneKind] = []
    rest_done = threading.Event()

    def run(outcome: Outcome, *_: object) -> None:
        begun.append(outcome.lane)
        if outcome.lane is LaneKind.UML:
            assert rest_done.wait(60)
        elif len(begun) == len(lanes):
            rest_done.set()

    monkeypatch.setattr(testing, "_run_here", run)
    monkeypatch.setattr(testing, "_run_in_lane", run)
    lanes = [lane for lane in testing.LONGEST_FIRST if lane is not LaneKind.NATIVE]
    waiting = deque(Outcome(lane, [TEST]) for lane in lanes)
    threads = [
        threading.Thread(target=testing.run_waiting, args=(waiting, [], testing.Runs(), print))
        for _ in range(testing.LANES_AT_ONCE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert sorted(begun) == sorted(lanes)


def test_a_test_goes_to_the_cheapest_lane_that_has_what_it_needs() -> None:
    assert place(parse([]), OFFERED) is LaneKind.HOST
    assert place(parse(["daemon"]), OFFERED) is LaneKind.CONTAINER
    assert place(parse(["daemon", "limits"]), OFFERED) is LaneKind.UML


def test_on_a_native_host_a_test_runs_natively() -> None:
    native = frozenset({Feature.SYSTEMD, Feature.CGROUP2, Feature.LIMITS, Feature.ROOT})
    assert place(parse(["limits"]), {**OFFERED, LaneKind.NATIVE: native}) is LaneKind.NATIVE


def test_needs_that_no_lane_has_together_are_an_error() -> None:
    with pytest.raises(UnknownFeature):
        place(parse(["image-workloads", "quota"]), OFFERED)


def test_every_feature_of_the_table_is_had_by_some_lane() -> None:
    assert frozenset().union(*OFFERED.values()) == set(Feature)


@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=50))),
    st.integers(1, 20),
)
def test_frames_survive_any_split_of_the_stream(
    rows: list[tuple[Kind, int, bytes]], step: int
) -> None:
    sent = [Frame(*row) for row in rows]
    stream = b"".join(frame.encode() for frame in sent)
    decoder = Decoder()
    got = [
        frame
        for start in range(0, len(stream), step)
        for frame in decoder.feed(stream[start : start + step])
    ]
    assert got == sent


def test_a_frame_beyond_the_cap_is_refused_before_it_is_read() -> None:
    with pytest.raises(Broken):
        list(Decoder().feed(b"\xff\xff\xff\xff\x11\x00\x00\x00\x00"))


def run_pytest(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_planted.py").write_text(text)
    command = [
        *(interpreter(), "-m", "pytest", "-p", "tests.lab.plugin", "-p", "no:cacheprovider"),
        *("-c", "/dev/null", "--rootdir", str(folder), "-o", "markers=needs gate"),
        *arguments,
        str(folder / "test_planted.py"),
    ]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_an_unknown_feature_stops_the_collection(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.needs('limit')\ndef test_x(): pass\n"
    done = run_pytest(tmp_path, text)
    assert done.returncode == 4
    assert "limit" in done.stderr


def test_the_report_has_each_outcome(tmp_path: Path) -> None:
    text = (
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_skipped(): pytest.skip('because')\n"
        "@pytest.fixture\n"
        "def broken():\n    yield\n    raise OSError\n"
        "def test_teardown(broken): pass\n"
    )
    (tmp_path / "select.json").write_text(
        '["test_planted.py::test_good", "test_planted.py::test_bad",'
        ' "test_planted.py::test_skipped", "test_planted.py::test_teardown"]'
    )
    report = tmp_path / "report.jsonl"
    done = run_pytest(
        tmp_path,
        text,
        *("--lab-select", str(tmp_path / "select.json"), "--lab-report", str(report)),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    result = Outcome(LaneKind.HOST, [])
    testing.read_report(result, report.read_text(), 1)
    rows = {name.partition("::")[2]: row for name, row in result.results.items()}
    assert {name: outcome for name, (outcome, _) in rows.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_skipped": "skipped",
        "test_teardown": "failed",
    }
    assert result.took.keys() == result.results.keys()
    assert all(seconds >= 0 for seconds in result.took.values())
    assert rows["test_skipped"][1] == "because"
    assert "assert False" in rows["test_bad"][1], "why it failed is in the summary"


def test_a_test_runs_also_where_it_asks_to() -> None:
    everywhere = Placed("test_x", frozenset({"daemon"}), (), frozenset({"uml"}))
    once = Placed("test_y", frozenset({"daemon"}), ())
    placed = distribute([everywhere, once], dict(OFFERED), None)
    assert placed == {LaneKind.CONTAINER: [everywhere, once], LaneKind.UML: [everywhere]}
    assert distribute([everywhere], dict(OFFERED), LaneKind.CONTAINER) == {
        LaneKind.CONTAINER: [everywhere]
    }


def _awaited() -> dict[str, frozenset[Feature]]:
    """The features that each test awaits (`@pytest.mark.awaits`), by `file::test`."""
    found = {}
    for path in sorted(Path(__file__).parents[1].rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.awaits":
                    words = [ast.literal_eval(word) for word in mark.args]
                    found[f"{path.name}::{getattr(node, 'name', '')}"] = parse(words)
    return found


def test_what_a_test_awaits_is_in_no_lane_yet() -> None:
    """When one has it, the mark is to become `also`."""
    awaited = _awaited()
    assert awaited, "nothing is awaited: the mark can go"
    for test, features in awaited.items():
        assert not any(features <= offered for offered in OFFERED.values()), test
