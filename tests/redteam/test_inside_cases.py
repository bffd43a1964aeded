"""Attempts on what an environment shares with others: the programs that run it, the pages of the
image, the kernel's tables. What is to stay unchanged is read again by the host or by a neighbour.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sbxd import launcher
from sbxd.port.errors import WorkspaceCode, WorkspaceError
from sbxd.probes.probe import PRELUDE, Probe, judge, program
from sbxd.probes.surroundings import CANARY, IMAGE_PAGES, PROGRAM_FILES
from tests.redteam.live import Live, live

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]


async def find_nothing_wrong(environment: Live, probe: Probe) -> None:
    result = await environment.run("python3", "-c", program(probe))
    assert judge(probe, json.loads(result.stdout)) == ()


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
    source = """
targets = ["/etc/passwd", "/usr/bin/env", "/proc/self/exe", "/dev/null"]
found = [attempt(os.link, target, "/workspace/link") for target in targets]
open("/workspace/own", "w").write("own")
answer([found, attempt(os.link, "/workspace/own", "/workspace/second")])
"""
    async with live() as environment:
        found, control = await environment.look(source)
        with pytest.raises(WorkspaceError) as refused:
            await environment.workspace.write("second", b"new")
        own = await environment.run("cat", "own", "second")
    assert set(found) <= {"EXDEV", "EPERM", "EROFS"}
    assert control == "ok"
    assert refused.value.code is WorkspaceCode.HARD_LINKED
    assert own.stdout == b"ownown", "a write by the service reached the other name of the file"


EXHAUST = """
import resource

def until(make):
    made = []
    try:
        while len(made) < 100000:
            made.append(make())
        return "no bound"
    except OSError as error:
        return errno.errorcode[error.errno]
    finally:
        for each in made:
            os.close(each)

found = {
    "files": until(lambda: os.open("/dev/null", os.O_RDONLY)),
    "memory files": until(lambda: os.memfd_create("x")),
    "sockets": until(lambda: socket.socket().detach()),
    "directories": until(lambda: os.open("/", os.O_PATH)),
}
queue = syscall(240, b"queue", 0o102, 0o600, 0)
answer([found, queue, attempt(open, "/etc/passwd"), resource.getrlimit(resource.RLIMIT_NOFILE)])
"""


@pytest.mark.case("RES-09")
async def test_descriptors_run_out_inside_and_nowhere_else() -> None:
    async with live() as environment, live() as neighbour:
        found, queue, control, (soft, hard) = await environment.look(EXHAUST)
        beside = await neighbour.run("cat", "/etc/passwd")
    assert set(found.values()) == {"EMFILE"}, found
    assert queue == "ENOSYS", "POSIX queues are the kernel's memory"
    assert control == "ok"
    assert soft <= hard <= 1 << 20
    assert beside.exit_code == 0


@pytest.mark.case("RES-11")
async def test_a_flush_of_everything_returns_at_once_and_flushes_nothing() -> None:
    """The control: outside, the same call waits for the file system under it."""
    source = """
import time
begun = time.monotonic()
for _ in range(2000):
    os.sync()
answer([time.monotonic() - begun, syscall(306, 1)])
"""
    async with live() as environment:
        seconds, syncfs = await environment.look(source)
    assert seconds < 1
    assert syncfs == "ENOSYS"
    assert outside("answer(syscall(306, os.open('/', 0)))") == "ok"


def outside(source: str) -> object:
    """What the program answers in the lane itself, as root."""
    command = [sys.executable, "-c", PRELUDE + source]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)
