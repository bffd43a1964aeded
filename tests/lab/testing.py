"""The test runner: collects once, places each test in the cheapest lane that has what it needs,
runs pytest once per lane, and reports which gate ran where.

Invariants: a test that was placed and reported no outcome is a failure; so is a skipped test whose
reason does not begin with `not run: `, a lane that could not be set up, a lane over its budget,
and a gate that no test ran in any lane.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from . import session
from .features import OFFERED, Feature, LaneKind, UnknownFeature, offered_natively, parse, place
from .host import LANES, REPOSITORY, LabError, interpreter
from .report import Outcome, Placed, summarise

Say = Callable[[str], None]

# Seconds: for the tests of a lane, and for building (once) and booting it.
BUDGETS = {
    LaneKind.HOST: 3000.0,
    LaneKind.NATIVE: 900.0,
    LaneKind.CONTAINER: 2100.0,
    LaneKind.GVISOR: 1800.0,
    LaneKind.UML: 2400.0,
    LaneKind.QEMU: 1500.0,
}
SETUP_BUDGET = 900.0
# Here each lane's report is kept: one line for each test, with its outcome and its seconds.
REPORTS = REPOSITORY / "build" / "tests"
# The lanes in the order in which they are begun: the longest first, so that the runners of a
# machine end at about the same time.
LONGEST_FIRST = (
    *(LaneKind.UML, LaneKind.HOST, LaneKind.CONTAINER),
    *(LaneKind.QEMU, LaneKind.GVISOR, LaneKind.NATIVE),
)
# How many lanes run side by side: one more would only make each of them slower on two processors.
LANES_AT_ONCE = 2


class Runs:
    """What is to be ended when the runner is interrupted."""

    def __init__(self) -> None:
        self.lanes: list[session.Lane] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for lane in self.lanes:
            lane.release()


def run_tests(
    only: str | None, budgets: dict[LaneKind, float], arguments: list[str], say: Say
) -> int:
    """Run the tests that pytest's `arguments` select, each where it belongs.

    Args:
        only: one lane, for all tests that need a lane and can run in it.
        budgets: seconds per lane, over those of `BUDGETS`.
    Returns: 0 when all is well, 1 when something failed.
    """
    budgets = {**BUDGETS, **budgets}
    offered = dict(OFFERED)
    if native := offered_natively():
        offered[LaneKind.NATIVE] = native
    tests = collect(arguments)
    try:
        placed = distribute(tests, offered, LaneKind(only) if only else None)
    except UnknownFeature as error:
        raise LabError(str(error)) from error
    for lane, share in placed.items():
        say(f"{lane}: {len(share)} tests, budget {budgets[lane]:.0f} s")
    outcomes = {lane: Outcome(lane, share, budgets[lane]) for lane, share in placed.items()}
    runs = Runs()
    waiting = deque(outcomes[lane] for lane in LONGEST_FIRST if lane in outcomes)
    threads = [
        threading.Thread(target=run_waiting, args=(waiting, arguments, runs, say), daemon=True)
        for _ in range(min(LANES_AT_ONCE, len(waiting)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
    except KeyboardInterrupt:
        runs.end()
        raise
    return summarise(list(outcomes.values()), print)


def collect(arguments: list[str]) -> list[Placed]:
    """What pytest finds, with what each test needs."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        command = [
            *(interpreter(), "-m", "pytest", "--collect-only", "-q", "--no-header"),
            *(f"--lab-plan={plan}", *arguments),
        ]
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode not in (0, 5) or not plan.exists():
            raise LabError(f"the tests could not be collected:\n{done.stdout}{done.stderr}")
        rows = json.loads(plan.read_text())
    return [
        Placed(row["id"], frozenset(row["needs"]), tuple(row["gates"]), frozenset(row["also"]))
        for row in rows
    ]


def distribute(
    tests: Iterable[Placed],
    offered: dict[LaneKind, frozenset[Feature]],
    only: LaneKind | None,
) -> dict[LaneKind, list[Placed]]:
    """Each test in its lane, and in those that it names besides; with `only`, every test that
    needs a lane and can run in that one."""
    placed: dict[LaneKind, list[Placed]] = {lane: [] for lane in LaneKind}
    for test in tests:
        needs = parse(test.needs)
        if only is None:
            lanes = {place(needs, offered), *(LaneKind(name) for name in test.also)}
            for lane in lanes:
                placed[lane].append(test)
        elif needs <= offered.get(only, frozenset()) and (needs or only is LaneKind.HOST):
            placed[only].append(test)
    return {lane: share for lane, share in placed.items() if share}


def run_waiting(waiting: deque[Outcome], arguments: list[str], runs: Runs, say: Say) -> None:
    """Run lane after lane until none is waiting. Several threads may share one `waiting`."""
    while True:
        try:
            outcome = waiting.popleft()
        except IndexError:
            return
        try:
            if outcome.lane in (LaneKind.HOST, LaneKind.NATIVE):
                _run_here(outcome, arguments, runs)
            else:
                _run_in_lane(outcome, arguments, runs, say)
        except (LabError, OSError, ValueError) as error:
            outcome.error = str(error)
            say(f"{outcome.lane}: {error}")


def _pytest(outcome: Outcome, arguments: list[str], folder: str) -> list[str]:
    """pytest's arguments for a lane's share. Only the files of its tests are named: to collect the
    whole suite takes an emulated machine ten minutes."""
    # With `=`: a value of its own would be taken for a test folder before the option is known.
    options = (f"--lab-select={folder}/select.json", f"--lab-report={folder}/report.jsonl")
    kept = [word for word in arguments if not (REPOSITORY / word.partition("::")[0]).exists()]
    return ["-m", "pytest", *options, *kept, *files_of(outcome)]


def files_of(outcome: Outcome) -> list[str]:
    """The files of a lane's tests, in the order in which pytest collects them all."""
    return list(dict.fromkeys(test.id.partition("::")[0] for test in outcome.tests))


def _run_here(outcome: Outcome, arguments: list[str], runs: Runs) -> None:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        _write_selection(outcome, Path(folder))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "SBXD_LANE": outcome.lane}
        process = subprocess.Popen(
            [interpreter(), *_pytest(outcome, arguments, folder)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        runs.processes.append(process)
        late = threading.Timer(outcome.budget, lambda: os.killpg(process.pid, signal.SIGKILL))
        late.start()
        prefixed = Prefixed(outcome.lane)
        assert process.stdout
        while data := os.read(process.stdout.fileno(), 65536):
            prefixed.write(data)
        process.stdout.close()
        status = process.wait()
        prefixed.end()
        late.cancel()
        outcome.seconds = time.monotonic() - begun
        report = Path(folder) / "report.jsonl"
        _keep_report(outcome, report.read_text() if report.exists() else "", status)
    if outcome.seconds >= outcome.budget:
        outcome.error = f"over its budget of {outcome.budget:.0f} s: killed"


def _run_in_lane(outcome: Outcome, arguments: list[str], runs: Runs, say: Say) -> None:
    begun = time.monotonic()
    lane = session.start(session.Wish(lane=outcome.lane), None, say)
    runs.lanes.append(lane)
    try:
        outcome.setup_seconds = time.monotonic() - begun
        if outcome.setup_seconds > SETUP_BUDGET:
            raise LabError(f"its set-up took more than {SETUP_BUDGET:.0f} s")
        _write_selection(outcome, LANES / lane.name)
        begun = time.monotonic()
        prefixed = Prefixed(outcome.lane)
        command = ["python", *_pytest(outcome, arguments, "/lab")]
        status, broken = 0, ""
        try:
            status = lane.run(command, prefixed.write, prefixed.write, seconds=outcome.budget)
        except LabError as error:
            broken = str(error)
        outcome.seconds = time.monotonic() - begun
        prefixed.end()
        report = bytearray()
        lane.run(["cat", "/lab/report.jsonl"], report.extend, prefixed.write, seconds=60)
        _keep_report(outcome, report.decode(), status)
        outcome.error = broken or outcome.error
    finally:
        lane.release()


def _write_selection(outcome: Outcome, folder: Path) -> None:
    (folder / "select.json").write_text(json.dumps([test.id for test in outcome.tests]))


def _keep_report(outcome: Outcome, text: str, status: int) -> None:
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / f"{outcome.lane}.jsonl").write_text(text)
    read_report(outcome, text, status)


def read_report(outcome: Outcome, text: str, status: int) -> None:
    for line in text.splitlines():
        row = json.loads(line)
        outcome.results[row["id"]] = (row["outcome"], row["reason"])
        outcome.took[row["id"]] = row["seconds"]
    clean = all(result != "failed" for result, _ in outcome.results.values())
    if status not in (0, 1) or (status == 1 and clean):
        outcome.error = f"pytest ended with {status}"


class Prefixed:
    """Prints lines as they end, each with the lane that it comes from."""

    def __init__(self, lane: LaneKind) -> None:
        self._prefix = f"[{lane}] ".encode()
        self._rest = bytearray()

    def write(self, data: bytes) -> None:
        self._rest += data
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        if lines:
            os.write(1, b"".join(self._prefix + line + b"\n" for line in lines))

    def end(self) -> None:
        """Print what was begun and not ended."""
        if self._rest:
            self.write(b"\n")
