"""A crash in a sandbox starts no program of the host.

Where `core_pattern` names a pipe, the kernel runs it as the host's root for each crash, with
RLIMIT_CORE 0 too (core(5)). Source: CASES ESC-10. Only in a lane with a kernel of its own, since
the setting is the kernel's.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from tests.pacing import next_look
from tests.redteam.live import live

pytestmark = [
    pytest.mark.needs("daemon", "root", "lane-uml"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]

PATTERN = Path("/proc/sys/kernel/core_pattern")


@dataclass(frozen=True)
class Handler:
    """A core handler that creates an entry of `folder` for each crash."""

    folder: Path

    def crashes(self) -> list[str]:
        return sorted(os.listdir(self.folder))


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[Handler]:
    program, folder = tmp_path / "handler", tmp_path / "crashes"
    folder.mkdir()
    program.write_text(f"#!/bin/sh\n: > {folder}/$1\ncat > /dev/null\n")
    program.chmod(0o755)
    before = PATTERN.read_text()
    PATTERN.write_text(f"|{program} %e")
    try:
        yield Handler(folder)
    finally:
        PATTERN.write_text(before)


def crash_on_the_host(name: Path) -> None:
    """Crash with RLIMIT_CORE 0, and wait until the kernel has run its handler."""
    name.symlink_to("/bin/sleep")
    process = subprocess.Popen(["prlimit", "--core=0:0", str(name), "600"])
    while Path(f"/proc/{process.pid}/comm").read_text().strip() != name.name:
        os.sched_yield()
    process.send_signal(signal.SIGSEGV)
    assert process.wait() == -signal.SIGSEGV


@pytest.mark.case("ESC-10")
@pytest.mark.parametrize("limit", ["none", "0:0"])
async def test_no_handler_runs_for_a_crash_inside(
    handler: Handler, tmp_path: Path, limit: str
) -> None:
    source = """
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ctypes.CDLL(None).prctl(15, b"inside", 0, 0, 0)
os.kill(os.getpid(), 11)
"""
    if limit == "none":
        source = source.replace("resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n", "")
    async with live() as environment:
        result = await environment.python(source)
    assert result.signal == signal.SIGSEGV
    await trio.to_thread.run_sync(crash_on_the_host, tmp_path / "outside")
    with trio.fail_after(30):
        while not handler.crashes():
            await next_look()
    assert handler.crashes() == ["outside"], "the control alone"
