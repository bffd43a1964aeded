"""The shipped probes in a live environment, and calls of foreign architectures.

What the probes try and expect is in `sbxd.probes`; here they are run, inside and, where a probe
says what root gets without a sandbox, outside. Those of the network are run by
`test_inside_network`, those of layers that not every host has by `test_inside_layers`.
"""

import pytest

from sbxd.probes import files, kernel_surface, process, surroundings, system_calls
from sbxd.probes.kernel_surface import FOREIGN, FOREIGN_CALLS
from sbxd.probes.probe import Probe, judge, program
from tests.redteam.live import live
from tests.redteam.probing import (
    answer_inside,
    answer_outside,
    find_nothing_wrong_on_either_side,
)

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]

PROBES = (
    *system_calls.PROBES,
    *kernel_surface.PROBES,
    *process.PROBES,
    *files.PROBES,
    *surroundings.PROBES,
)


@pytest.mark.also("uml")
@pytest.mark.parametrize("probe", PROBES, ids=[probe.id for probe in PROBES])
async def test_a_probe_finds_what_it_is_to_find(probe: Probe) -> None:
    await find_nothing_wrong_on_either_side(probe)


@pytest.mark.case("KRN-06")
@pytest.mark.needs("lane-container")  # user-mode Linux reads the numbers as native ones
async def test_a_foreign_call_ends_the_process_that_makes_it() -> None:
    async with live() as environment:
        found = await answer_inside(environment, FOREIGN_CALLS)
    assert judge(FOREIGN_CALLS, found) == ()
    control = answer_outside(program(FOREIGN_CALLS))
    for name in FOREIGN:
        # A kernel without the i386 table answers the trap itself, filter or not.
        without_table = control[name] == "SIGSEGV"
        assert found[name] == ("SIGSEGV" if without_table else "SIGSYS"), name
        assert without_table or control[name] in ("ok", "refused"), "the control: it ran outside"
