"""pytest's side of the lab: says what each test needs, runs a given selection, reports outcomes.

Without the runner's options (a plain `pytest`, here or in a lane) the tests that need more than
this place offers are deselected, and the last line of the run says how many and how to run them.

Invariant: a report has one line for each test that ran to an outcome, written when it is known, so
a run that dies is seen to have left tests without one.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

import pytest

from .features import LaneKind, UnknownFeature, offered_by, parse

_kept_back = pytest.StashKey[int]()
_report_file = pytest.StashKey[TextIO]()
_CRASH_SHOWN = 400
_outcomes = pytest.StashKey[dict[str, tuple[str, str]]]()
_seconds = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lab", "the lab's runner (tests/lab/run --tests)")
    group.addoption("--lab-plan", metavar="FILE", help="write what each test needs to FILE")
    group.addoption("--lab-select", metavar="FILE", help="run only the tests listed in FILE")
    group.addoption("--lab-report", metavar="FILE", help="write each test's outcome to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("lab_report"):
        config.stash[_report_file] = open(path, "w", encoding="utf-8")  # noqa: SIM115
        config.stash[_outcomes] = {}
        config.stash[_seconds] = {}


def pytest_unconfigure(config: pytest.Config) -> None:
    if _report_file in config.stash:
        config.stash[_report_file].close()


def marked(item: pytest.Item, name: str) -> list[str]:
    """The arguments of all marks of that name, from the test, its class and its module."""
    return [str(word) for mark in item.iter_markers(name) for word in mark.args]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        needs = {item.nodeid: parse(marked(item, "needs")) for item in items}
    except UnknownFeature as error:
        raise pytest.UsageError(str(error)) from error
    if path := config.getoption("lab_plan"):
        plan = [
            {
                "id": i.nodeid,
                "needs": sorted(needs[i.nodeid]),
                "gates": marked(i, "gate"),
                "also": marked(i, "also"),
            }
            for i in items
        ]
        Path(path).write_text(json.dumps(plan))
        return
    if path := config.getoption("lab_select"):
        wanted = set(json.loads(Path(path).read_text()))
        chosen = [item for item in items if item.nodeid in wanted]
    else:
        here = offered_by(os.environ.get("SBXD_LANE", LaneKind.NATIVE))
        chosen = [item for item in items if needs[item.nodeid] <= here]
        config.stash[_kept_back] = len(items) - len(chosen)
    if len(chosen) < len(items):
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if count := config.stash.get(_kept_back, 0):
        terminalreporter.write_line(
            f"{count} tests need more than this place has: `tests/lab/run --tests` runs them"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _report_file not in item.config.stash:
        return report
    outcomes = item.config.stash[_outcomes]
    outcome, reason = outcomes.get(item.nodeid, ("", ""))
    if report.failed:
        outcome, reason = "failed", reason or _crash(report)
    elif hasattr(report, "wasxfail") and outcome != "failed":
        outcome, reason = "passed", "expected to fail"
    elif report.skipped and outcome != "failed":
        outcome, reason = "skipped", _skip_reason(report)
    elif report.when == "call" and not outcome:
        outcome = "passed"
    outcomes[item.nodeid] = (outcome, reason)
    seconds = item.config.stash[_seconds]
    seconds[item.nodeid] = seconds.get(item.nodeid, 0.0) + report.duration
    if report.when == "teardown":
        file = item.config.stash[_report_file]
        line = {
            "id": item.nodeid,
            "outcome": outcome,
            "reason": reason,
            "seconds": round(seconds[item.nodeid], 3),
        }
        file.write(json.dumps(line) + "\n")
        file.flush()
    return report


def _crash(report: pytest.TestReport) -> str:
    """Where and how it failed, short: a summary is often all that is kept of a run."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = f"line {crash.lineno}: {crash.message}" if crash else str(report.longrepr)
    return f"{report.when}: {' '.join(said.split())[:_CRASH_SHOWN]}"


def _skip_reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)
