"""The shipped probes in a live environment, and calls of foreign architectures.

What the probes try and expect is in `sbxd.probes`; here they are run, inside and, where a probe
says what root gets without a sandbox, outside.
"""

import json
import subprocess
import sys

import pytest

from sbxd.probes import surroundings, system_calls
from sbxd.probes.probe import Probe, judge, judge_outside, program, program_outside
from tests.redteam.live import live

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]

PROBES = (*system_calls.PROBES, *surroundings.PROBES)


def run_outside(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """A Python program in the lane itself, as root."""
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, cwd="/")


def outside(source: str) -> object:
    done = run_outside(source)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


@pytest.mark.also("uml")
@pytest.mark.parametrize("probe", PROBES, ids=[probe.id for probe in PROBES])
async def test_a_probe_finds_what_it_is_to_find(probe: Probe) -> None:
    async with live() as environment:
        result = await environment.python(program(probe))
    assert result.exit_code == 0, result
    assert judge(probe, json.loads(result.stdout)) == ()
    if probe.outside:  # the negative control: without the layer the attempts succeed
        assert judge_outside(probe, outside(program_outside(probe))) == ()


# Numbers of mount, socket(AF_ALG) and unshare in both foreign call tables, and what loads them.
FOREIGN = {
    "x32 mount": (0x40000000 + 165, bytes.fromhex("0f05")),
    "x32 socket": (0x40000000 + 41, bytes.fromhex("0f05")),
    "x32 unshare": (0x40000000 + 272, bytes.fromhex("0f05")),
    "i386 mount": (21, bytes.fromhex("cd80")),
    "i386 socket": (359, bytes.fromhex("cd80")),
    "i386 unshare": (310, bytes.fromhex("cd80")),
}
RUN_CODE = """
import ctypes, mmap, sys
page = mmap.mmap(-1, 4096, prot=7)
def run(code):
    page.seek(0)
    page.write(bytes.fromhex(code))
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
if run("b8270000000f05c3") > 0:  # native getpid
    print("native works", flush=True)
print(run(sys.argv[1]), flush=True)
"""
SIGSEGV, SIGSYS = 11, 31


@pytest.mark.case("KRN-06")
@pytest.mark.needs("lane-container")  # user-mode Linux reads the numbers as native ones
@pytest.mark.parametrize("name", FOREIGN)
async def test_a_foreign_call_ends_the_process_that_makes_it(name: str) -> None:
    number, instruction = FOREIGN[name]
    code = (b"\xb8" + number.to_bytes(4, "little") + instruction + b"\xc3").hex()
    async with live() as environment:
        result = await environment.run("python3", "-c", RUN_CODE, code)
    control = run_outside(RUN_CODE, code)
    assert result.stdout == b"native works\n", result
    # A kernel without the i386 table answers the trap itself, filter or not.
    without_table = control.returncode == -SIGSEGV
    assert result.signal == (SIGSEGV if without_table else SIGSYS)
    assert without_table or control.stdout.count(b"\n") == 2, "the control: it ran outside"
