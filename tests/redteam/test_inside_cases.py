"""Attempts on what an environment shares with others: the programs that run it, the pages of the
image, the kernel's tables. What is to stay unchanged is read again by the host or by a neighbour.
"""

import hashlib
import sys
from pathlib import Path

import pytest

from sbxd import launcher
from sbxd.port.errors import WorkspaceCode, WorkspaceError
from sbxd.probes.files import LINKED, LINKS
from sbxd.probes.process import EXHAUSTION
from sbxd.probes.surroundings import CANARY, IMAGE_PAGES, PROGRAM_FILES
from tests.redteam.live import live
from tests.redteam.probing import find_nothing_wrong

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]


def digests_of_our_programs() -> list[str]:
    """Of the interpreter that the launcher, init and the steward are, and of the launcher."""
    programs = (Path(sys.executable).resolve(), Path(launcher.__file__).with_name("__main__.py"))
    return [hashlib.sha256(each.read_bytes()).hexdigest() for each in programs]


@pytest.mark.case("ESC-01")
async def test_no_program_that_runs_an_environment_can_be_written() -> None:
    """Through /proc/PID/exe, which names a file also where no path leads to it."""
    before = digests_of_our_programs()
    async with live() as environment:
        await find_nothing_wrong(environment, PROGRAM_FILES)
    assert before == digests_of_our_programs()


@pytest.mark.case("KRN-11")
async def test_a_page_of_the_image_is_the_same_for_the_next_environment() -> None:
    async with live() as environment, live() as neighbour:
        before = await neighbour.run("cat", CANARY)
        await find_nothing_wrong(environment, IMAGE_PAGES)
        after = await neighbour.run("cat", CANARY)
    assert b"Debian" in before.stdout, "the control: the canary is read"
    assert after.stdout == before.stdout


@pytest.mark.case("FS-05")
async def test_a_file_of_the_image_cannot_be_linked_into_the_workspace() -> None:
    async with live() as environment:
        await find_nothing_wrong(environment, LINKS)
        own, second = LINKED
        with pytest.raises(WorkspaceError) as refused:
            await environment.workspace.write(second, b"new")
        content = await environment.run("cat", own, second)
    assert refused.value.code is WorkspaceCode.HARD_LINKED
    assert content.stdout == b"ownown", "a write by the service reached the other name of the file"


@pytest.mark.case("RES-09")
async def test_descriptors_run_out_inside_and_nowhere_else() -> None:
    async with live() as environment, live() as neighbour:
        await find_nothing_wrong(environment, EXHAUSTION)
        beside = await neighbour.run("cat", "/etc/passwd")
    assert beside.exit_code == 0
