"""The gates that gVisor has to pass: each has a test that runs there, by the marks that place it.

Limits and production want a host with real controllers, which is the emulated lane; the rest runs
at native speed. That the tests pass is the lanes' business, and that each file has its positive
controls its own.
"""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from tests.lab.features import OFFERED, Feature, LaneKind, parse, place
from tests.redteam.conftest import is_otherwise

GVISOR, QEMU = LaneKind.GVISOR, LaneKind.QEMU
# gate: the file whose tests try it on gVisor, and the lane that can show it.
WANTED = {
    "gate.sandbox.escape_denied": ("tests.redteam.test_inside_probes", GVISOR),
    "gate.sandbox.workspace_isolated": ("tests.redteam.test_workspace_isolated", GVISOR),
    "gate.sandbox.no_credential_reaches": ("tests.redteam.test_no_credential", GVISOR),
    "gate.sandbox.network_denied": ("tests.redteam.test_network_denied", GVISOR),
    "gate.sandbox.egress_allowlisted": ("tests.redteam.test_egress_allowlisted", GVISOR),
    "gate.sandbox.limits_enforced": ("tests.redteam.test_gvisor_controllers", QEMU),
    "gate.sandbox.production_refuses_dev": ("tests.redteam.test_production", QEMU),
}


def marks(thing: object) -> list[pytest.Mark]:
    """What is marked on a module or a function."""
    found = getattr(thing, "pytestmark", [])
    return [getattr(each, "mark", each) for each in found]


def reaching(module: ModuleType, gate: str) -> Iterator[tuple[str, LaneKind]]:
    """Each test of the file that tries the gate on gVisor, with its lane."""
    for name, test in vars(module).items():
        if not name.startswith("test_") or getattr(test, "__module__", "") != module.__name__:
            continue
        all_marks = [*marks(module), *marks(test)]
        if gate not in [word for mark in all_marks if mark.name == "gate" for word in mark.args]:
            continue
        needs = parse(word for mark in all_marks if mark.name == "needs" for word in mark.args)
        if Feature.GVISOR in needs or Feature.LANE_GVISOR in needs:
            yield name, place(needs, OFFERED)
        elif needs <= OFFERED[GVISOR] and not is_otherwise(name):
            yield name, GVISOR


@pytest.mark.parametrize("gate", WANTED)
def test_the_gate_is_tried_on_gvisor_in_a_lane_that_can_show_it(gate: str) -> None:
    name, lane = WANTED[gate]
    assert lane in dict(reaching(import_module(name), gate)).values()


def test_a_file_that_runs_on_the_hosts_kernel_alone_reaches_nothing() -> None:
    """The control: `test_limits` wants controllers, which no lane of gVisor's own has."""
    module = import_module("tests.redteam.test_limits")
    assert list(reaching(module, "gate.sandbox.limits_enforced")) == []
