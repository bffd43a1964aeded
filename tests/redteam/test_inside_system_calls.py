"""What the host's kernel says of a command, beyond what the probes ask (`test_inside_probes`).

Source: DESIGN 3.10.
"""

import secrets

import pytest
import trio

from tests.redteam.live import Live, live, wait_process_on_the_host

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("uml"),
    pytest.mark.gate("gate.sandbox.escape_denied"),
]


async def test_the_workload_on_the_host_is_a_stranger_with_no_power() -> None:
    """What the host's kernel says of the process itself, not what it says inside."""
    marker = f"marker-{secrets.token_hex(8)}"
    async with live() as environment, trio.open_nursery() as nursery:
        nursery.start_soon(_sleep, environment, marker)
        process = await wait_process_on_the_host(marker)
        lines = (process / "status").read_text().splitlines()
        fields = {
            line.split(":\t")[0]: line.split(":\t")[1].split() for line in lines if "\t" in line
        }
        init = (process / "cgroup").read_text()
        nursery.cancel_scope.cancel()
    assert 1879048192 <= int(fields["Uid"][0]) <= 2147483647
    assert len(set(fields["Uid"] + fields["Gid"])) == 1
    assert fields["CapEff"] == fields["CapBnd"] == ["0" * 16]
    assert fields["NoNewPrivs"] == ["1"]
    assert fields["Seccomp"] == ["2"]
    assert f"sbx-{environment.handle.environment_id}.scope/box/exec-" in init


async def _sleep(environment: Live, marker: str) -> None:
    await environment.run("python3", "-c", "import time; time.sleep(600)", marker)
