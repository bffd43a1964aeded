"""No byte of an earlier tenant is ever seen in a sandbox of the pool, and no two are alike.

The full thousand is `python3 -m tests.bench --canaries 1000`; here is as many as a suite can wait
for. Source: CASES LIF-11, LIF-12, gate.sandbox.workspace_isolated.
"""

import json
import secrets

import pytest
import trio

from sbxd.client.remote import connect
from tests.pacing import next_look
from tests.redteam.canaries import UNIQUE, Canaries, one_tenant, origins, tenant_command
from tests.redteam.live import WORKER_SOCKET, admin, default_image, live, specification

pytestmark = [
    pytest.mark.needs("daemon"),
    pytest.mark.also("gvisor"),
    pytest.mark.gate("gate.sandbox.workspace_isolated"),
]

HAND_OUTS = 8


async def wait_slot() -> None:
    """Until a slot is ready."""
    async with admin() as operator:
        with trio.fail_after(60):
            while (await operator.describe()).reserve_ready == 0:
                await next_look()


@pytest.mark.case("LIF-12")
async def test_a_program_finds_what_was_planted_before_it_in_the_same_environment() -> None:
    """The control: each place in which a tenant looks would show another's canary."""
    async with admin() as operator:
        limits = (await operator.describe()).default_limits
    async with live(limits) as environment:
        first, second = ("a" * 32, "b" * 32)
        size = 3 * 2**20
        planted = await environment.remote.execute(environment.handle, tenant_command(first, size))
        assert planted.exit_code == 0, planted.stderr
        looked = await environment.remote.execute(environment.handle, tenant_command(second, size))
        assert looked.exit_code == 0, looked.stderr
        found = json.loads(looked.stdout)["seen"]
        assert set(found["/workspace"]) == {f"SBXCANARY-{first}"}
        assert json.loads(planted.stdout)["seen"] == {}


@pytest.mark.case("LIF-11")
@pytest.mark.case("LIF-12")
async def test_hand_outs_of_the_pool_show_nothing_of_earlier_tenants_and_are_all_different() -> (
    None
):
    image = await default_image()
    async with admin() as operator:
        limits = (await operator.describe()).default_limits
    seen = Canaries()
    prefix = f"canary-{secrets.token_hex(4)}"
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        for number in range(HAND_OUTS):
            await wait_slot()
            one = specification(image, limits, tenant=f"t{number}", run=f"{prefix}-{number}")
            await one_tenant(remote, await remote.provision(one), seen)
    assert seen.failures == []
    assert seen.leaks == []
    assert seen.hand_outs == HAND_OUTS
    assert origins(prefix) == ["RESERVE"] * HAND_OUTS, "not of the pool"
    assert {"/workspace/blank", "memory", "processes"} <= seen.places
    assert seen.repeated() == dict.fromkeys(UNIQUE, 0)
    assert seen.hostnames == {"sandbox"}
