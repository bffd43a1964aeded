"""Runs the shipped probes, inside a live environment and, as root, in the lane itself."""

import json
import subprocess
import sys

from sbxd.probes.probe import Probe, judge, judge_outside, program, program_outside
from tests.redteam.live import Live, live


async def answer_inside(environment: Live, probe: Probe) -> dict[str, str]:
    result = await environment.run("python3", "-c", program(probe))
    assert result.exit_code == 0, result
    found: dict[str, str] = json.loads(result.stdout)
    return found


def answer_outside(source: str) -> dict[str, str]:
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, timeout=60, cwd="/")
    assert done.returncode == 0, done
    found: dict[str, str] = json.loads(done.stdout)
    return found


async def find_nothing_wrong(environment: Live, probe: Probe) -> None:
    assert judge(probe, await answer_inside(environment, probe)) == ()


async def find_nothing_wrong_on_either_side(probe: Probe) -> None:
    """In an environment of its own, and what the probe says of a place without a sandbox."""
    async with live() as environment:
        await find_nothing_wrong(environment, probe)
    if probe.outside:  # the negative control: without the layer the attempts succeed
        assert judge_outside(probe, answer_outside(program_outside(probe))) == ()
