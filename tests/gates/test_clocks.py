"""No wall clock decides anything: every read of one is listed here with what it is for.

A wall clock is set by people, by NTP and by whoever starts a virtual machine anew. What is local is
measured by a clock that nobody sets (trio's, monotonic or boot time); what several hosts share, by
the clock of their database. A time of the day is for what is shown or recorded.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("sbxd", "sbxctl")
# Functions that read a wall clock, as they are imported or named.
READS = frozenset(
    {
        "time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime",
        "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
        "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today",
        "datetime.date.today",
    }
)  # fmt: skip
# A clock that is handed on: a name or attribute of these names, called.
INJECTED = frozenset({"wall", "wall_clock", "_wall_clock", "utc_now", "_utc_now"})

# Where a wall clock may be read: the module's path, the function, and what for.
ALLOWED: dict[tuple[str, str], str] = {
    ("sbxd/observing.py", "about"): "shown: when the service started",
    ("sbxd/audit/recorder.py", "_wall_microseconds"): "recorded: when a record was decided",
    ("sbxd/daemon.py", "_utc_now"): "recorded: created_at and expires_at of a handle",
    ("sbxd/lifecycle/provision.py", "Provisioner._hand_out"): "recorded: as above",
    ("sbxd/daemon.py", "_assemble"): "recorded: when a run was seen. Of the epochs that are "
    "old by it as many are kept as were ever allowed at once, so that a jump forgets none",
    ("sbxd/service/images.py", "ImageStore.__init__.<lambda>"): "recorded: when an image came",
    ("sbxd/artifacts/retention.py", "utc_now"): "recorded: the time within an artifact's id",
    ("sbxd/artifacts/opening.py", "open_artifacts.<lambda>"): "recorded: as above",
    ("sbxd/steward/tree.py", "Clock"): "compared with the times of files, which the same kernel "
    "takes from the same clock; a file whose time proves nothing is read",
    ("sbxctl/when.py", "When.convert"): "an operator's words: 2h, today",
    ("sbxctl/doctor.py", "doctor"): "shown: how old runsc is, as a warning",
    ("sbxd/fake/engine.py", "utc_now"): "the fake's one clock, which the test moves",
    ("sbxd/fake/engine.py", "FakeEngine.records"): "as above",
    ("sbxd/fake/engine.py", "FakeEngine.provision"): "as above",
    ("sbxd/fake/engine.py", "FakeEngine._require_room"): "as above",
    ("sbxd/fake/engine.py", "FakeEngine._play"): "as above",
    ("sbxd/fake/service.py", "_meter"): "as above",
}


class _Reads(ast.NodeVisitor):
    """Every read in one module, as (function, what)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._within: list[str] = []
        self._names: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            self._names[each.asname or each.name] = each.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module in ("time", "datetime"):
            for each in node.names:
                name = each.name if node.module == "datetime" else f"time.{each.name}"
                self._names[each.asname or each.name] = name

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._descend(node.name, node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._descend(node.name, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._descend(node.name, node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._descend("<lambda>", node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._note(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in INJECTED:
            self.found.append((".".join(self._within), f"{name}()"))
        self.generic_visit(node)

    def _descend(self, name: str, node: ast.AST) -> None:
        self._within.append(name)
        self.generic_visit(node)
        self._within.pop()

    def _note(self, node: ast.Attribute | ast.Name) -> None:
        written = ast.unparse(node)
        head, dot, rest = written.partition(".")
        name = self._names.get(head, "") + dot + rest
        if name in READS:
            self.found.append((".".join(self._within), written))


def reads(source: str) -> Iterator[tuple[str, str]]:
    visitor = _Reads()
    visitor.visit(ast.parse(source))
    yield from visitor.found


def found() -> dict[tuple[str, str], list[str]]:
    places: dict[tuple[str, str], list[str]] = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            module = path.relative_to(REPOSITORY).as_posix()
            for function, what in reads(path.read_text("utf-8")):
                places.setdefault((module, function), []).append(what)
    return places


def test_every_read_of_a_wall_clock_is_listed_with_what_it_is_for() -> None:
    places = found()
    unlisted = {place: what for place, what in places.items() if place not in ALLOWED}
    assert unlisted == {}, "measure by a monotonic clock, or by that of the database"
    assert set(ALLOWED) - set(places) == set(), "these read none any more: take them off the list"


@pytest.mark.parametrize(
    "planted",
    [
        "import time\ndef f():\n    return time.time() > end",
        "import time as t\ndef f():\n    return t.time_ns()",
        "from time import time\ndef f():\n    return time() - begun",
        "from time import time as now\ndef f():\n    return now()",
        "from datetime import datetime\ndef f():\n    return datetime.now(UTC) > expires_at",
        "import datetime\ndef f():\n    return datetime.datetime.utcnow()",
        "from datetime import datetime as d\ndef f(clock=d.now):\n    return clock()",
        "import time\ndef f():\n    return partial(Store, time.time)",
        "class A:\n    def f(self):\n        return self._wall_clock() >= self.end",
        "def f(clock):\n    return clock.wall() > end",
    ],
)
def test_a_planted_read_is_found(planted: str) -> None:
    assert list(reads(planted))


@pytest.mark.parametrize(
    "harmless",
    [
        "import time\ndef f():\n    return time.monotonic()",
        "from datetime import datetime\ndef f(at):\n    return datetime.fromtimestamp(at)",
        "import trio\ndef f():\n    return trio.current_time()",
        "def f(time):\n    return time.time",
    ],
)
def test_what_reads_no_wall_clock_is_left_alone(harmless: str) -> None:
    assert not list(reads(harmless))
