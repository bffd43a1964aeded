"""A directory that is swapped for a link while the service looks: never a step outside.

Source: CASES FS-02, FS-03, FS-06, EXP-04. The image's own /etc/passwd is the canary: its text must
come back from no call, and the control is that the command itself reads it by the same path.
"""

import os
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import trio

from sbxd.port.errors import WorkspaceError, WorkspaceEscape
from tests.pacing import next_look
from tests.redteam.live import Live, live

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.workspace_isolated"),
]

# Three targets, each round a read, a write and a listing, and the reads of one file: some 3,600
# attempts where it is quick. A user-mode kernel takes six times as long for each.
QUICK = os.environ.get("SBXD_LANE") != "uml"
ROUNDS = 350 if QUICK else 100
RACING_SECONDS = 30
FILE_READS = 500 if QUICK else 150
SWAPPER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.mkdir("real")
with open("real/passwd", "w") as file:
    file.write("INSIDE")
os.symlink(sys.argv[1], "link")
os.rename("real", "swap")
seen = set()
while not os.path.exists("stop"):
    if libc.renameat2(-100, b"swap", -100, b"link", 2):  # RENAME_EXCHANGE
        raise OSError(ctypes.get_errno(), "renameat2")
    with open("swap/passwd") as file:
        seen.add(file.read(4))
print(sorted(seen))
"""


@pytest.mark.case("FS-03")
@pytest.mark.parametrize("target", ["/etc", "../etc", "/proc/self/root/etc"])
async def test_no_call_follows_a_directory_that_becomes_a_link(target: str) -> None:
    outcomes: Counter[str] = Counter()
    async with live() as environment, trio.open_nursery() as nursery:
        workspace = environment.workspace
        seen: list[bytes] = []

        async def swap() -> None:
            result = await environment.run("python3", "-c", SWAPPER, target)
            assert result.exit_code == 0, result
            seen.append(result.stdout)

        nursery.start_soon(swap)
        await _wait_entry(environment, "swap")
        # On a busy machine fewer than so many, but before the swapper's own time is up.
        enough_at = trio.current_time() + RACING_SECONDS
        rounds = 0
        while rounds < ROUNDS and trio.current_time() < enough_at:
            rounds += 1
            outcomes[await _told("read", lambda: workspace.read("swap/passwd"))] += 1
            outcomes[await _told("write", lambda: workspace.write("swap/new", b"x"))] += 1
            outcomes[await _told("list", lambda: _names(environment, "swap"))] += 1
        await workspace.write("stop", b"")
    assert outcomes.total() == 3 * rounds
    # How /etc/passwd of every image begins.
    assert b"sand" in seen[0], "the control: the command reads the canary through the link"
    read = {outcome for outcome in outcomes if outcome.startswith("read ")}
    assert read <= {"read b'INSIDE'", "read refused"}, outcomes
    listed = {outcome for outcome in outcomes if outcome.startswith("list ")}
    for outcome in listed - {"list refused"}:
        assert "shadow" not in outcome
        assert "hosts" not in outcome
    assert outcomes["read b'INSIDE'"] > rounds // 20, outcomes
    for verb in ("read", "write", "list"):
        assert outcomes[f"{verb} refused"] > rounds // 20, "the swap was hardly met"
        assert outcomes[f"{verb} refused"] < rounds, "the directory was never met"


@pytest.mark.case("FS-02", "FS-06")
async def test_a_file_that_is_swapped_for_a_link_or_a_pipe_is_never_followed_or_waited_for() -> (
    None
):
    source = """
import os
def content(text):
    with open("new", "w") as file:
        file.write(text)
    os.rename("new", "file")
while not os.path.exists("stop"):
    content("INSIDE")
    os.symlink("/etc/passwd", "new"); os.rename("new", "file")
    os.mkfifo("new"); os.rename("new", "file")
"""
    outcomes: Counter[str] = Counter()
    async with live() as environment, trio.open_nursery() as nursery:
        nursery.start_soon(environment.python, source)
        await _wait_entry(environment, "file")
        for _ in range(FILE_READS):
            with trio.fail_after(30):  # a pipe is waited for until somebody writes to it
                outcome = await _told("read", lambda: environment.workspace.read("file"))
            outcomes[outcome] += 1
        await environment.workspace.write("stop", b"")
    assert set(outcomes) <= {"read b'INSIDE'", "read refused"}, outcomes
    assert len(outcomes) == 2, "one kind was never met"


@pytest.mark.case("FS-03")
async def test_a_working_directory_that_becomes_a_link_is_never_outside() -> None:
    """The next command starts while what the last one left is a link; only one runs at a time."""
    async with live() as environment:
        await environment.run("sh", "-c", "mkdir a; ln -s /etc b; ln -s a c; ln -s b d; ln -s . e")
        for name, where in (("a", b"/workspace/a\n"), ("c", b"/workspace/a\n")):
            assert (await environment.run("pwd", "-P", directory=name)).stdout == where
        assert (await environment.run("pwd", "-P", directory="e")).stdout == b"/workspace\n"
        for name in ("b", "d", "b/ssl", "missing"):
            with pytest.raises(Exception, match="WORKING_DIRECTORY_NOT_FOUND"):
                await environment.run("pwd", directory=name)


async def _told(verb: str, call: Callable[[], Awaitable[object]]) -> str:
    try:
        answer = await call()
    except (WorkspaceError, WorkspaceEscape):
        return f"{verb} refused"
    return f"{verb} {answer!r}"


async def _names(environment: Live, path: str) -> list[str]:
    return sorted(entry.path for entry in await environment.workspace.listdir(path))


async def _wait_entry(environment: Live, name: str) -> None:
    with trio.fail_after(30):
        while name not in await _names(environment, "."):
            await next_look()
