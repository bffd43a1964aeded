"""The process that waits for a command, killed before it has one: as a host that is short of memory
does, which takes these first.

A slot of the reserve is made anew, an environment gets another process; nobody meets a slot whose
first command cannot be started. The processes of the idle slots are then exactly theirs again, one
by one, and the control sees one that is not.
"""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from sbxd.client.remote import connect
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from tests.pacing import next_look
from tests.redteam.faults import SMALL, ids_held
from tests.redteam.inventory import CGROUP, Resident, out_of_place, residents, wait_settled
from tests.redteam.live import WORKER_SOCKET, default_image, live, specification

pytestmark = pytest.mark.needs("daemon", "root")


def parked(environment_id: str = "") -> list[Resident]:
    """The processes of commands to come, of all or of one."""
    return [
        each
        for each in residents()
        if each.place.startswith("box/exec-") and environment_id in ("", each.environment_id)
    ]


async def test_every_slot_whose_process_is_killed_is_made_anew() -> None:
    await wait_settled(within_seconds=180)
    assert out_of_place(residents(), ids_held()) == []
    before = parked()
    slots = {each.environment_id for each in before}
    assert slots == ids_held()
    for each in before:
        # Those of a guest's own kernel die with the first of them.
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    with trio.fail_after(120):
        while slots & ids_held():
            await next_look()
    await wait_settled(within_seconds=180)
    assert out_of_place(residents(), ids_held()) == []
    anew = {each.environment_id for each in parked()}
    assert anew
    assert (anew ^ ids_held(), anew & slots) == (set(), set())


async def test_an_environment_whose_next_process_is_killed_runs_its_next_command() -> None:
    async with live() as one:
        name = one.handle.environment_id
        for number in range(3):
            assert (await one.run("sh", "-c", f"exit {number}")).exit_code == number
            with trio.fail_after(60):
                while not (victims := parked(name)):
                    await next_look()
                for victim in victims:
                    os.kill(victim.pid, signal.SIGKILL)
                while {each.pid for each in parked(name)} <= {each.pid for each in victims}:
                    await next_look()
        assert (await one.run("sh", "-c", "exit 9")).exit_code == 9


CANARIES = "sbx.slice/sbx-*.scope/box/exec-0/cgroup.kill"
KILLS = 12


async def test_a_process_that_is_killed_while_it_is_looked_at_is_no_false_alarm() -> None:
    """The launcher looks at one confined process of each new slot. That it was killed by somebody
    says nothing of its confinement: the slot is not handed out, and nobody is alerted."""
    await wait_settled(within_seconds=180)
    run = ["journalctl", "-o", "cat", "--no-pager", "SBX_EVENT=ConfinementMismatched"]
    before = (await trio.run_process(run, capture_stdout=True)).stdout
    image = await default_image()
    codes: set[str] = set()
    # Of whom one was killed that lived. Each is seen again and again until it is dead, and one that
    # has been looked at already makes nothing fail.
    killed: set[Path] = set()

    async def provision() -> None:
        async with connect(WORKER_SOCKET, client_name="tests") as remote:
            while len(killed) < KILLS:
                try:
                    handle = await remote.provision(specification(image, SMALL))
                except ExecutionUnavailable as error:
                    codes.add(error.code)
                else:
                    await remote.destroy(handle)

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(provision)
            while len(killed) < KILLS:
                for leaf in CGROUP.glob(CANARIES):
                    with suppress(OSError):
                        populated = "populated 1" in (leaf.parent / "cgroup.events").read_text()
                        leaf.write_text("1")
                        if populated:
                            killed.add(leaf)
                await trio.lowlevel.checkpoint()
    assert codes == {UnavailableCode.SETUP_FAILED}
    await trio.run_process(["journalctl", "--sync"])
    assert (await trio.run_process(run, capture_stdout=True)).stdout == before
    await wait_settled(within_seconds=180)


async def test_a_process_that_is_in_no_slot_or_is_one_too_many_is_seen() -> None:
    """The control of everything that is told by identity."""
    await wait_settled(within_seconds=180)
    slots = ids_held()
    found = residents()
    assert out_of_place(found, slots) == []
    (first, *others) = sorted(slots)
    assert any(first in each for each in out_of_place(found, set(others)))
    # A process with a uid of sandboxes, outside of every slot.
    stranger = await trio.lowlevel.open_process(
        ["sleep", "600"], stdin=subprocess.DEVNULL, user=1879048192 + 5, group=1879048192 + 5
    )
    try:
        (wrong,) = out_of_place(residents(), slots)
        assert f"process {stranger.pid} (sleep" in wrong
    finally:
        stranger.kill()
        await stranger.wait()
    missing = [each for each in found if each.place != "box/init" or each.environment_id != first]
    assert [each[:37] for each in out_of_place(missing, slots)] == [f"slot {first}"]
    twice = [*found, next(each for each in found if each.place == "box/steward")]
    assert len(out_of_place(twice, slots)) == 1
