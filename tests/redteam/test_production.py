"""gate.sandbox.production_refuses_dev end to end: the installed daemon under production's settings.

`tests/gates/test_production_refuses_dev.py` has every value; here the service manager starts the
daemon, and its journal says why it does not.
"""

import subprocess
from collections.abc import Iterator

import pytest

from sbxctl.exits import Exit
from tests.redteam import operator

pytestmark = [
    pytest.mark.needs("daemon", "root"),
    pytest.mark.gate("gate.sandbox.production_refuses_dev"),
]

PRODUCTION = """
deployment_mode = "production"
auth_mode = "{auth}"
sandbox = "{sandbox}"
{more}
[limits.defaults]
memory_bytes = 134_217_728
pids_max = 64
workspace_bytes = 67_108_864
inodes_max = 1000

[reserve]
slots = 0
"""
ACCEPTING = 'accept_missing_layers = ["apparmor"]'


def production(sandbox: str = "gvisor", *, auth: str = "token", more: str = "") -> str:
    return PRODUCTION.format(sandbox=sandbox, auth=auth, more=more)


@pytest.fixture
def place() -> str:
    """Where the journal stands before the test."""
    return operator.now()


def sbxctl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sbxctl", *words], capture_output=True, text=True, timeout=300, check=False
    )


def accepted(place: str) -> list[str]:
    return [each["SBX_LAYER"] for each in operator.events(place, "MissingLayerAccepted")]


# a host with every layer -------------------------------------------------------------------------

WHOLE = pytest.mark.needs("daemon", "limits", "gvisor", "apparmor")


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Production as installed, started; where the journal stood before."""
    before = operator.now()
    with operator.configured(production()):
        assert operator.start() == 0, operator.said(before)
        yield before


@WHOLE
def test_production_starts_with_gvisor_and_runs_a_command(served: str) -> None:
    ran = sbxctl("run", "--mechanism=gvisor", "--timeout=120", "--", "cat", "/proc/version")
    assert ran.returncode == 0, ran.stderr
    assert "Linux version 4.4.0" in ran.stdout
    (started,) = operator.events(served, "ServiceStarted")
    assert started["SBX_MECHANISM"] == "gvisor"
    assert started["SBX_DEPLOYMENT_MODE"] == "production"
    assert accepted(served) == [], "nothing is lacking, so nothing is accepted"


@WHOLE
@pytest.mark.gate("gate.sandbox.limits_enforced")
def test_production_limits_are_real(served: str) -> None:
    hungry = ("python3", "-c", "x = bytearray(1 << 30)")
    assert sbxctl("run", "--memory=64M", "--", *hungry).returncode == Exit.MEMORY


@WHOLE
def test_production_runs_on_no_other_mechanism_than_it_says(served: str) -> None:
    ran = sbxctl("run", "--mechanism=namespaces", "--", "true")
    assert ran.returncode == Exit.REJECTED
    assert "this daemon runs gvisor, not namespaces" in ran.stderr


@WHOLE
@pytest.mark.parametrize("sandbox", ["namespaces", "fake", "microvm"])
def test_production_refuses_the_rest_and_names_both_settings(sandbox: str, place: str) -> None:
    with operator.configured(production(sandbox)):
        assert operator.start() != 0
        (refused, *_) = operator.events(place, "StartupRefused")
        assert f"sandbox={sandbox}" in str(refused["SBX_SETTINGS"])
        said = operator.said(place)
        if sandbox != "microvm":  # which this build has not
            assert f"deployment_mode = production and sandbox = {sandbox}" in said
        assert operator.events(place, "ServiceStarted") == []
        assert sbxctl("run", "--", "true").returncode == Exit.UNAVAILABLE


@WHOLE
def test_production_refuses_workers_without_a_credential(place: str) -> None:
    with operator.configured(production(auth="dev")):
        assert operator.start() != 0
        assert "deployment_mode = production and auth_mode = dev" in operator.said(place)


# a host without AppArmor -------------------------------------------------------------------------

WITHOUT = pytest.mark.needs("daemon", "lane-gvisor")


@WITHOUT
def test_without_apparmor_production_is_refused_with_both_ways_on(place: str) -> None:
    with operator.configured(production()):
        assert operator.start() != 0
        said = operator.said(place)
        assert "deployment_mode = production and apparmor of this host = degraded" in said
        assert "apparmor=1" in said
        assert ACCEPTING in said
        (refused, *_) = operator.events(place, "StartupRefused")
        assert "apparmor of this host=degraded" in str(refused["SBX_SETTINGS"])
        assert operator.events(place, "ServiceStarted") == []


@WITHOUT
def test_with_the_operators_written_word_it_starts_and_says_so_every_time(place: str) -> None:
    with operator.configured(production(more=ACCEPTING)):
        assert operator.start() == 0, operator.said(place)
        assert accepted(place) == ["apparmor"]
        operator.stop()
        assert operator.start() == 0
        assert accepted(place) == ["apparmor"] * 2
        assert len(operator.events(place, "ServiceStarted")) == 2
        assert "runs without apparmor, as its operator has accepted" in operator.said(place)


@WITHOUT
def test_the_written_word_lifts_nothing_else(place: str) -> None:
    with operator.configured(production("namespaces", more=ACCEPTING)):
        assert operator.start() != 0
        assert "deployment_mode = production and sandbox = namespaces" in operator.said(place)
