"""The house rules that a machine can hold: sizes, names, what may be caught, shielded, slept.

Each rule is a function from source to violations; the tests apply it to the product (or to the
tests) and to planted text, which it must find.
"""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.gates.imports import within
from tests.gates.source import REPOSITORY, Module, aliases, called, dotted, load, suite_files

LINES_MAX = 500
LONG_MODULES = {"sbxd.jail.syscalls": "one wrapper per system call, nothing to split"}

# What must be read whole to trust the root process and what it forks, in lines.
TRUSTED = ("sbxd.launcher", "sbxd.jail", "sbxd.oci", "sbxd.rights", "sbxd.steward")
TRUSTED_LINES_MAX = 14_200

# The only place that may catch everything, to answer a peer and survive.
CATCHES_ALL = frozenset({"sbxd.service.session"})

# Shields, all with a deadline, and why each is needed.
SHIELDS: Mapping[str, str] = {
    "sbxd.egress.recording": "a record that has begun is kept or known not to be, 5 s at most",
    "sbxd.artifacts.store": "what a failed or cancelled put has begun is removed",
    "sbxd.client.local_workspace": "what a cancelled write has begun is removed",
    "sbxd.client.reconnecting": "a connection outlives the destroy of a cancelled run, 30 s",
    "sbxd.client.run_scope": "the environment of a run is destroyed on every way out",
    "sbxd.client.remote": "a cancelled command's output is waited for, 2 s; its connection, 30 s",
    "sbxd.client.leases": "an environment that is not handed out is destroyed, its lease given up",
    "sbxd.lifecycle.finalize": "an end that has begun is finished",
    "sbxd.tools.mcp_http": "the transport of a session that ends is closed",
    "sbxd.mechanism.namespaces": "what a cancelled preparation has begun is removed",
    "sbxctl.run": "the environment of an interrupted run is destroyed",
    "sbxctl.shell": "the environment of an interrupted session is destroyed",
    "sbxctl.transfer": "what an interrupted copy has begun is removed",
}

# Tests may skip for these reasons alone: (file, what the reason starts with).
SKIPS: frozenset[tuple[str, str]] = frozenset(
    {("tests/frameworks/deepagents_standard.py", "the base class of deepagents")}
)

GRAB_BAGS = frozenset({"common", "misc", "shared", "stuff", "tools", "util", "utils"})
PACKAGES = (
    "aiosqlite", "hypothesis", "msgspec", "psycopg", "pyroute2", "pyseccomp", "pystemd", "pytest",
    "pytest-trio", "trio",
)  # fmt: skip

SLEEPS = frozenset({"time.sleep", "trio.sleep", "trio.sleep_until", "anyio.sleep", "asyncio.sleep"})
# On a virtual clock these do not wait.
VIRTUAL = frozenset({"trio.sleep", "trio.sleep_until"})
CLOCKS = frozenset({"autojump_clock", "mock_clock"})
VIRTUAL_FILES = {
    "tests/kernel/test_snapshots.py": "its steward's delays; all its tests have a virtual clock",
    "tests/lifecycle/double.py": "the double's delays; only tests with a virtual clock set them",
    "tests/lifecycle/egress_double.py": "as the double's; its tests have a virtual clock",
    "tests/lifecycle/test_faults.py": "a helper of tests that all run on a virtual clock",
    "tests/lifecycle/test_reserve.py": "the walk over the reserve runs on a virtual clock",
}
SPIN = "trio.lowlevel.checkpoint()"
SPINNING_FILES = {
    "tests/egress/test_tunnels.py": "a thread that is about to end, 200 times",
    "tests/lifecycle/test_bridge.py": "a helper of tests that all run on a virtual clock",
    "tests/redteam/test_parked_process.py": "kills what lives for milliseconds alone",
    "tests/service/test_images.py": "a source of bytes without an end",
}
SLEEPING_FOLDERS = ("tests/bench/", "tests/lab/")
# Forbidden in the daemon's process, whose threads are shared and cached.
PROCESS_WIDE = frozenset(
    {f"os.{name}" for name in ("chdir", "fork", "setns", "umask", "unshare")}
)  # fmt: skip
OWN_PROCESSES = ("sbxd.launcher", "sbxd.jail", "sbxd.steward", "sbxd.probes", "sbxctl")
READS_ENVIRONMENT = re.compile(r"^os\.(environ|environb|getenv|getenvb)\b")


def too_long(name: str, lines: int) -> bool:
    return lines > LINES_MAX and name not in LONG_MODULES


def broad_handlers(tree: ast.Module) -> Iterator[int]:
    """Lines that catch everything: `except Exception`, a bare except or BaseException that
    neither raises again nor ends the process at its end, and suppress() of either."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = {"BaseException"} if node.type is None else set(names_in(node.type))
            swallowed = "BaseException" in caught and not ends_it(node.body[-1])
            if "Exception" in caught or swallowed:
                yield node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
            for argument in node.args:
                if {"Exception", "BaseException"} & set(names_in(argument)):
                    yield node.lineno


def ends_it(last: ast.stmt) -> bool:
    """Whether a statement raises what was caught, or ends the process (a forked child's)."""
    if isinstance(last, ast.Raise):
        return last.exc is None
    return (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Call)
        and dotted(last.value.func) == "os._exit"
    )


def names_in(node: ast.expr) -> Iterator[str]:
    for each in node.elts if isinstance(node, ast.Tuple) else [node]:
        yield dotted(each)


def shields(tree: ast.Module) -> Iterator[tuple[int, bool]]:
    """Line of each shield, and whether it has a deadline where it is made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if is_not_false(given.get("shield")):
                last = dotted(node.func).rpartition(".")[2]
                limited = last in ("move_on_after", "move_on_at", "fail_after", "fail_at")
                yield node.lineno, limited or "deadline" in given or "relative_deadline" in given
        elif isinstance(node, ast.Assign) and is_not_false(node.value):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "shield":
                    yield node.lineno, False


def is_not_false(node: ast.expr | None) -> bool:
    return node is not None and not (isinstance(node, ast.Constant) and node.value is False)


def sleeps(tree: ast.Module) -> Iterator[int]:
    """Lines that sleep in real time, under whatever name the function was imported. Within a
    test that takes a virtual clock, trio's sleep is a point on that clock and passes."""
    names = aliases(tree)

    def visit(node: ast.AST, slept: frozenset[str]) -> Iterator[int]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and CLOCKS & {
            argument.arg for argument in node.args.args
        }:
            slept = slept - VIRTUAL
        if isinstance(node, ast.Call) and called(node, names) in slept:
            yield node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, slept)

    yield from visit(tree, SLEEPS)


def spins(tree: ast.Module) -> Iterator[int]:
    """Lines of a loop that looks again and again without a pause: on a real clock that keeps a
    processor from whatever it waits for. `tests/pacing.py` has the pause."""

    def visit(node: ast.AST) -> Iterator[int]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and CLOCKS & {
            argument.arg for argument in node.args.args
        }:
            return
        if isinstance(node, ast.While):
            for statement in node.body:
                for part in ast.walk(statement):
                    if isinstance(part, ast.Await) and ast.unparse(part.value) == SPIN:
                        yield part.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(tree)


def skips(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and reason of each skip, skipif, xfail and importorskip."""
    names = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            full = dotted(node)
            head, dot, rest = full.partition(".")
            full = names.get(head, head) + dot + rest
            if re.fullmatch(
                r"pytest\.(mark\.)?(skip|skipif|xfail|importorskip)"
                r"|unittest\.(skip\w*|expectedFailure|SkipTest)",
                full,
            ):
                yield node.lineno, reason_at(tree, node)


def reason_at(tree: ast.Module, called_function: ast.Attribute) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.func is called_function:
            for argument in [*(k.value for k in node.keywords if k.arg == "reason"), *node.args]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    return argument.value
    return ""


def loose_patterns(tree: ast.Module) -> Iterator[int]:
    """Lines where a field's pattern ends in "$", which lets a trailing newline through (the
    library searches): \\Z does not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "Meta":
            for keyword in node.keywords:
                for part in ast.walk(keyword.value) if keyword.arg == "pattern" else ():
                    if isinstance(part, ast.Constant) and str(part.value).endswith("$"):
                        yield node.lineno


def process_wide(tree: ast.Module) -> Iterator[int]:
    names = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node, names) in PROCESS_WIDE:
            yield node.lineno


def environment_reads(tree: ast.Module) -> Iterator[int]:
    names = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            head, dot, rest = dotted(node).partition(".")
            if READS_ENVIRONMENT.match(names.get(head, head) + dot + rest):
                yield node.lineno


@pytest.fixture(scope="module")
def product() -> dict[str, Module]:
    return load()


@pytest.fixture(scope="module")
def suite() -> list[tuple[str, ast.Module]]:
    return [(str(path.relative_to(REPOSITORY)), tree) for path, tree in suite_files(REPOSITORY)]


def test_every_package_has_an_empty_init(product: dict[str, Module]) -> None:
    assert [m.name for m in product.values() if m.is_package and m.path.stat().st_size] == []
    folders = {module.path.parent for module in product.values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_no_module_is_longer_than_it_can_be_read(product: dict[str, Module]) -> None:
    assert [(m.name, m.lines) for m in product.values() if too_long(m.name, m.lines)] == []


def test_no_test_module_is_longer_either(suite: list[tuple[str, ast.Module]]) -> None:
    lines = {name: (REPOSITORY / name).read_text("utf-8").count("\n") for name, _ in suite}
    assert {name: count for name, count in lines.items() if count > LINES_MAX} == {}


def test_what_root_runs_stays_within_its_size_budget(product: dict[str, Module]) -> None:
    trusted = {name: m.lines for name, m in product.items() if within(name, TRUSTED)}
    assert trusted.keys() >= {"sbxd.launcher.loop", "sbxd.jail.construct"}
    # What a command's process is between the interpreter and its program.
    trusted["guest/command.h"] = (REPOSITORY / "guest/command.h").read_text().count("\n")
    assert sum(trusted.values()) <= TRUSTED_LINES_MAX, sorted(trusted.items(), key=lambda i: -i[1])


def test_every_module_says_what_it_is(product: dict[str, Module]) -> None:
    silent = [
        module.name
        for module in product.values()
        if not module.is_package and not ast.get_docstring(module.tree)
    ]
    assert silent == []


def test_no_module_is_a_grab_bag(product: dict[str, Module]) -> None:
    names = {name: set(name.split(".")[1:]) & GRAB_BAGS for name in product}
    # `sbxd.tools` is the package of what an agent framework calls.
    assert [n for n, bags in names.items() if bags and not n.startswith("sbxd.tools")] == []


def test_no_code_is_left_for_later(product: dict[str, Module]) -> None:
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{module.name}:{number}"
        for module in product.values()
        for number, line in enumerate(module.path.read_text("utf-8").splitlines(), start=1)
        if mark.search(line)
    ]
    assert found == []


def test_everything_is_caught_in_one_module_alone(product: dict[str, Module]) -> None:
    found = [
        f"{module.name}:{line}"
        for module in product.values()
        if module.name not in CATCHES_ALL
        for line in broad_handlers(module.tree)
    ]
    assert found == []


def test_shields_are_where_they_are_listed_and_have_a_deadline(product: dict[str, Module]) -> None:
    found = {
        (module.name, line, limited)
        for module in product.values()
        for line, limited in shields(module.tree)
    }
    assert sorted(each for each in found if each[0] not in SHIELDS or not each[2]) == []
    # A listed place without a shield is a list that nobody reads.
    assert SHIELDS.keys() - {name for name, _, _ in found} == set()


def test_the_daemon_never_forks_or_changes_what_its_threads_share(
    product: dict[str, Module],
) -> None:
    found = [
        f"{module.name}:{line}"
        for module in product.values()
        if not within(module.name, OWN_PROCESSES)
        for line in process_wide(module.tree)
    ]
    assert found == []


def test_only_a_programs_own_main_reads_the_process_environment(
    product: dict[str, Module],
) -> None:
    found = [
        f"{module.name}:{line}"
        for module in product.values()
        if not module.name.endswith(".__main__") and not within(module.name, ("sbxctl",))
        for line in environment_reads(module.tree)
    ]
    assert found == []


def test_no_pattern_of_a_field_lets_a_newline_through(product: dict[str, Module]) -> None:
    found = [
        f"{module.name}:{line}"
        for module in product.values()
        for line in loose_patterns(module.tree)
    ]
    assert found == []


def test_no_test_sleeps(suite: list[tuple[str, ast.Module]]) -> None:
    found = [
        f"{name}:{line}"
        for name, tree in suite
        if not name.startswith(SLEEPING_FOLDERS) and name not in VIRTUAL_FILES
        for line in sleeps(tree)
    ]
    assert found == []


def test_no_test_spins(suite: list[tuple[str, ast.Module]]) -> None:
    spinning = {
        name: [f"{name}:{line}" for line in spins(tree)]
        for name, tree in suite
        if name not in VIRTUAL_FILES
    }
    found = [
        each for name, lines in spinning.items() if name not in SPINNING_FILES for each in lines
    ]
    assert found == []
    assert [name for name in SPINNING_FILES if not spinning[name]] == [], "no reason is needed"


def test_no_test_is_skipped_or_expected_to_fail(suite: list[tuple[str, ast.Module]]) -> None:
    found = [
        f"{name}:{line} {reason!r}"
        for name, tree in suite
        for line, reason in skips(tree)
        if not any(name == file and reason.startswith(start) for file, start in SKIPS)
    ]
    assert found == []


def test_the_ten_packages_are_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in optional for line in extra)]
    declared = {re.split(r"[\s<>=!~\[;]", line)[0].lower() for line in lines}
    assert declared >= set(PACKAGES)
    # What a worker installs stays what it needs.
    worker = {re.split(r"[\s<>=!~\[;]", line)[0].lower() for line in project["dependencies"]}
    assert worker == {"msgspec", "anyio"}


# --- negative controls: each rule finds what is planted -----------------------------------------


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (broad_handlers, "try:\n    x()\nexcept Exception:\n    pass\n"),
        (broad_handlers, "try:\n    x()\nexcept (ValueError, Exception) as e:\n    raise\n"),
        (broad_handlers, "try:\n    x()\nexcept:\n    pass\n"),
        (broad_handlers, "try:\n    x()\nexcept BaseException:\n    log()\n"),
        (broad_handlers, "with contextlib.suppress(Exception):\n    x()\n"),
        (sleeps, "import time\ntime.sleep(1)\n"),
        (sleeps, "from trio import sleep as wait\nasync def f():\n    await wait(1)\n"),
        (sleeps, "import trio\nasync def test_x():\n    await trio.sleep(1)\n"),
        (sleeps, "import time\nasync def test_x(autojump_clock):\n    time.sleep(1)\n"),
        (sleeps, "import anyio as a\nasync def f():\n    await a.sleep(0)\n"),
        (spins, "async def f():\n    while x():\n        await trio.lowlevel.checkpoint()\n"),
        (skips, "import pytest\n@pytest.mark.skip\ndef test_x(): pass\n"),
        (skips, "import pytest\n@pytest.mark.skipif(True, reason='r')\ndef test_x(): pass\n"),
        (skips, "import pytest\npytestmark = pytest.mark.xfail\n"),
        (skips, "from pytest import mark\n@mark.xfail(strict=True)\ndef test_x(): pass\n"),
        (skips, "import pytest\ndef test_x():\n    pytest.skip('no kernel')\n"),
        (skips, "import pytest\nx = pytest.importorskip('x')\n"),
        (shields, "with trio.CancelScope(shield=True):\n    pass\n"),
        (shields, "with trio.move_on_after(1, shield=True):\n    pass\n"),
        (shields, "scope.shield = True\n"),
        (shields, "with anyio.fail_after(1, shield=flag):\n    pass\n"),
        (loose_patterns, "x = Annotated[str, Meta(pattern=r'^[a-z]+$')]\n"),
        (loose_patterns, "x = Annotated[str, msgspec.Meta(max_length=3, pattern='^a$')]\n"),
        (process_wide, "import os\nos.fork()\n"),
        (process_wide, "from os import umask\numask(0)\n"),
        (environment_reads, "import os\nos.environ['X']\n"),
        (environment_reads, "from os import environ as e\nx = e.get('X')\n"),
        (environment_reads, "import os\nos.getenv('X')\n"),
    ],
)
def test_what_is_planted_is_found(
    rule: Callable[[ast.Module], Iterator[object]], text: str
) -> None:
    assert list(rule(ast.parse(text)))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (broad_handlers, "try:\n    x()\nexcept ValueError:\n    pass\n"),
        (broad_handlers, "try:\n    x()\nexcept BaseException:\n    undo()\n    raise\n"),
        (sleeps, "import trio\nasync def f():\n    await trio.sleep_forever()\n"),
        (sleeps, "import trio\nasync def test_x(mock_clock):\n    await trio.sleep(1)\n"),
        (spins, "async def f():\n    while x():\n        await next_look()\n"),
        (spins, "async def f():\n    for _ in x:\n        await trio.lowlevel.checkpoint()\n"),
        (broad_handlers, "try:\n    x()\nexcept BaseException:\n    os._exit(1)\n"),
        (skips, "import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_x(x): pass\n"),
        (shields, "with trio.CancelScope(shield=False):\n    pass\n"),
        (loose_patterns, "x = Annotated[str, Meta(pattern=r'^[a-z$]+\\Z')]\n"),
        (process_wide, "import os\nos.read(0, 1)\n"),
        (environment_reads, "environ = {}\nenviron['X'] = 1\n"),
    ],
)
def test_control_what_is_fine_is_not_found(
    rule: Callable[[ast.Module], Iterator[object]], text: str
) -> None:
    assert list(rule(ast.parse(text))) == []


def test_a_shield_without_a_deadline_is_told_from_one_with() -> None:
    bare = "trio.CancelScope(shield=True)\n"
    limited = "trio.move_on_after(1, shield=True)\ntrio.CancelScope(deadline=1, shield=True)\n"
    assert list(shields(ast.parse(bare))) == [(1, False)]
    assert list(shields(ast.parse(limited))) == [(1, True), (2, True)]


def test_a_long_module_is_found_unless_it_is_listed() -> None:
    assert too_long("sbxd.policy.egress", LINES_MAX + 1)
    assert not too_long("sbxd.policy.egress", LINES_MAX)
    assert not too_long("sbxd.jail.syscalls", LINES_MAX + 1)
