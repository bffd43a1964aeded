"""`sbxctl top`, `status` and `metrics` over the installed daemon, while a sandbox really runs."""

import json
import os
import re
import subprocess
from functools import partial
from typing import Any

import pytest
import trio

from sbxd.port.errors import ExecutionRejected
from tests.redteam.live import Live, live

pytestmark = [
    pytest.mark.needs("daemon", "image"),
    pytest.mark.also("gvisor"),
    pytest.mark.also("uml"),
]

HELD_BYTES = 48 << 20
SPIN = f"held = bytearray({HELD_BYTES})\nwhile True: pass"
# Where no controller counts, nothing is shown instead of a wrong number.
COUNTS = os.environ.get("SBXD_LANE") in ("uml", "qemu")


def sbxctl(*arguments: str) -> str:
    done = subprocess.run(
        ["sbxctl", *arguments], capture_output=True, text=True, timeout=180, check=False, cwd="/"
    )
    assert done.returncode in (0, 249), done.stderr
    return done.stdout


async def asked(*arguments: str) -> Any:
    return json.loads(await trio.to_thread.run_sync(partial(sbxctl, *arguments, "--json")))


async def row_of(environment: Live) -> dict[str, Any]:
    """The environment's row of `top`."""
    rows = (await asked("top"))["environments"]
    (found,) = (
        row for row in rows if row["meter"]["environment_id"] == environment.handle.environment_id
    )
    assert isinstance(found, dict)
    return found


async def running(environment: Live) -> dict[str, Any]:
    """Its row once its command uses the processor and holds what it takes."""
    with trio.fail_after(120):
        while True:
            row = await row_of(environment)
            held = row["meter"]["memory_bytes"] or 0
            if row["meter"]["state"] == "RUNNING" and (
                not COUNTS or (held >= HELD_BYTES and row["meter"]["cpu_ms"])
            ):
                return row


async def test_top_shows_what_a_running_sandbox_uses() -> None:
    async with live() as environment, trio.open_nursery() as nursery:
        idle = await row_of(environment)
        assert idle["meter"]["state"] == "LIVE"
        assert idle["meter"]["program"] is None
        nursery.start_soon(partial(environment.python, SPIN, timeout_seconds=100))
        row = await running(environment)
        meter = row["meter"]
        assert meter["program"]["text"].endswith("python3")
        assert meter["tenant_id"] == environment.handle.tenant_id
        if COUNTS:
            # Of a processor that other lanes have as well: more than nothing, no more than two.
            assert 0 < (await running(environment))["cpu_share"] <= 2.5
            assert HELD_BYTES <= meter["memory_bytes"] <= meter["memory_max_bytes"]
            assert (idle["meter"]["memory_bytes"] or 0) < HELD_BYTES
        else:
            assert meter["memory_bytes"] is None or meter["memory_bytes"] > 0
        nursery.cancel_scope.cancel()


async def test_denials_of_a_sandbox_are_its_own_and_its_tenants() -> None:
    async with live() as environment, live() as other:
        for _ in range(3):
            with pytest.raises(ExecutionRejected):
                await environment.run("no-such-program")
        assert (await row_of(environment))["meter"]["denials"] == 3
        assert (await row_of(other))["meter"]["denials"] == 0
        status = await asked("status")
        mine = [each for each in status["denials"] if each["violation"] == "COMMAND_DENIED"]
        assert sum(each["count"] for each in mine) >= 3
        text = await trio.to_thread.run_sync(partial(sbxctl, "metrics"))
        counted = re.search(r'sbxd_denials_total\{violation="COMMAND_DENIED"\} (\d+)', text)
        assert counted
        assert int(counted[1]) >= 3


SIX = (
    r'sbxd_provision_seconds_count\{mechanism="M",origin="(RESERVE|COLD)"\} [1-9]',
    r'sbxd_environment_executing_seconds_total\{mechanism="M"\} [0-9.]*[1-9]',
    r'sbxd_environment_lifetime_seconds_total\{mechanism="M"\} [0-9.]*[1-9]',
    r'sbxd_egress_connections_total\{mechanism="M",outcome="allowed",reason=""\} \d',
    r'sbxd_commands_total\{mechanism="M",killed_by="NONE"\} [1-9]',
    r'sbxd_orphans_reaped_total\{mechanism="M",cause="PEER_GONE"\} \d',
    r'sbxd_destroy_seconds_count\{mechanism="M"\} [1-9]',
)


async def test_the_six_of_the_specification_are_there_for_this_mechanism() -> None:
    async with live() as environment:
        await environment.python("pass")
    mechanism = (await asked("status"))["mechanism"]
    missing = [pattern.replace("M", mechanism) for pattern in SIX]
    # The end of an environment is recorded after whoever asked for it has its proof.
    with trio.move_on_after(60):
        while missing:
            text = await trio.to_thread.run_sync(partial(sbxctl, "metrics"))
            missing = [pattern for pattern in missing if not re.search(pattern, text)]
    assert missing == []
