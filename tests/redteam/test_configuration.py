"""The daemon's configuration under tests: put back whoever was killed, and no table twice."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.redteam import configuration, egress
from tests.redteam.configuration import AnotherRun, current, holding, recover, with_tables

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGURATIONS = REPOSITORY / "tests/lab/configuration"
OWN = 'sandbox = "namespaces"\n\n[limits]\nslots = 2\n'
# Changes the file, says so, and then waits or is killed.
RUN = """
import os, signal, sys
from pathlib import Path
from tests.redteam.configuration import holding
with holding("changed = 1\\n", Path(sys.argv[1])):
    print("changed", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "config.toml"
    found.write_text(OWN)
    found.chmod(0o640)
    return found


@contextmanager
def another_run(file: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """One that has changed the file, until it is killed at the end of the block."""
    command = [sys.executable, "-c", RUN, str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"changed\n"
        yield run
        assert run.stdin is not None
        run.stdin.close()
        assert run.wait(60) == -signal.SIGKILL


def test_the_file_is_as_it_was_after_blocks_within_blocks(file: Path) -> None:
    before = file.stat()
    with holding("outer = 1\n", file):
        with holding("inner = 1\n", file):
            assert file.read_text() == "inner = 1\n"
        assert current(file) == "outer = 1\n"
        with pytest.raises(KeyError), holding("inner = 2\n", file):
            raise KeyError
        assert current(file) == "outer = 1\n"
    assert file.read_text() == OWN
    assert (file.stat().st_mode, file.stat().st_uid) == (before.st_mode, before.st_uid)
    assert os.listdir(file.parent) == ["config.toml"]


def test_what_a_killed_run_has_left_is_nobodys_configuration(file: Path) -> None:
    with another_run(file):
        pass
    assert file.read_text() == "changed = 1\n", "the control: nobody has put it back"
    with holding(with_tables(current(file), "[egress]"), file):
        assert file.read_text() == OWN + "\n[egress]\n"
    assert file.read_text() == OWN
    assert os.listdir(file.parent) == ["config.toml"]
    assert not recover(file)


def test_two_runs_do_not_change_it_at_once(file: Path) -> None:
    with another_run(file):
        with pytest.raises(AnotherRun), holding("mine = 1\n", file):
            raise AssertionError("it was changed")
        assert file.read_text() == "changed = 1\n"
    assert recover(file)
    assert file.read_text() == OWN


@pytest.mark.parametrize("own", sorted(CONFIGURATIONS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_table_that_is_added_again_replaces_the_first(own: Path) -> None:
    text = own.read_text()
    once = with_tables(text, egress.allowlist())
    assert with_tables(once, egress.allowlist()) == once
    wanted = tomllib.loads(egress.allowlist(more="tunnels_max = 24"))
    found = tomllib.loads(with_tables(once, egress.allowlist(more="tunnels_max = 24")))
    # The control: nothing else of the lane's own is gone.
    assert found == {**tomllib.loads(text), **wanted}


def test_a_table_goes_with_those_below_it_and_no_other() -> None:
    own = "[egress]\na = 1\n[[egress.destinations]]\nhost = 'x'\n[egress2]\nb = [\n 1 ]\n"
    assert tomllib.loads(with_tables(own, "[egress]\nc = 2")) == {
        "egress": {"c": 2},
        "egress2": {"b": [1]},
    }


def test_nothing_else_in_the_tests_writes_to_the_file() -> None:
    writes = re.compile(r"\bCONFIGURATION\.(write_|open|unlink|rename|replace|touch)|\bopen\(CONF")
    named = re.compile(r"""Path\(["']/etc/sbxd/config\.toml""")
    sources = list(REPOSITORY.joinpath("tests").rglob("*.py"))
    assert [path for path in sources if writes.search(path.read_text())] == []
    here = [path for path in sources if named.search(path.read_text()) and path != Path(__file__)]
    assert here == [Path(configuration.__file__)]


KILLED = """
import os, signal
from tests.redteam.egress import allowlist, configured
with configured(allowlist()):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.needs("daemon", "root", "lane-container")
def test_a_run_that_is_killed_does_not_stop_the_next_one() -> None:
    """As when the caller of a lane's command goes: the lane's agent kills what it has started."""
    own = current()
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=REPOSITORY, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    with egress.configured(egress.allowlist()):  # raises when the daemon does not start
        shown = subprocess.run(["sbxctl", "egress", "show", "--json"], capture_output=True)
        assert b"files.lab-allowed.com" in shown.stdout, shown
    assert current() == own
    assert own == (CONFIGURATIONS / f"{os.environ['SBXD_LANE']}.toml").read_text()
