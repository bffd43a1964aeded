"""The second yes for the network as a model's tool gives it: an approval for one call reaches the
listed destination, the same call without it reaches nothing, and no argument is an approval."""

from collections.abc import Iterator

import msgspec
import pytest

from sbxd.client.remote import connect
from sbxd.client.run_scope import RunScope, remote_workspaces
from sbxd.port.egress import DENY_ALL, EgressPolicy
from sbxd.port.environment import EnvironmentSpec
from sbxd.tools.tool import SideEffect, ToolName, ToolValidationError
from sbxd.tools.toolbox import Toolbox
from tests.lab import internet as lab
from tests.lab.internet import Internet
from tests.lab.internet_content import GREETING
from tests.redteam.egress import CLIENT, allowlist, configured
from tests.redteam.live import WORKER_SOCKET, default_image, specification
from tests.redteam.test_egress_allowlisted import FETCH

pytestmark = pytest.mark.needs("daemon", "root")

YES = frozenset({SideEffect.SANDBOX_NETWORK})
CALL: dict[str, object] = {"command": ["python3", "-c", CLIENT + FETCH], "timeout_seconds": 60}


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with lab.internet() as built, configured(allowlist()):
        yield built


async def wanted(egress: EgressPolicy) -> EnvironmentSpec:
    return msgspec.structs.replace(specification(await default_image()), egress=egress)


async def test_an_approval_is_for_one_call_and_reaches_what_it_showed(internet: Internet) -> None:
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        specified = await wanted(await remote.network_grant())
        async with RunScope(remote, specified, remote_workspaces(remote)) as scope:
            tools = Toolbox(scope, None)
            await (await scope.workspace()).write("ca.pem", internet.ca)
            shown = [each.host for each in tools.network_grant.destinations]
            assert "files.lab-allowed.com" in shown
            with pytest.raises(ToolValidationError):
                await tools.call(ToolName.RUN_COMMAND, {**CALL, "network_enabled": True})
            without = await tools.call(ToolName.RUN_COMMAND, CALL)
            assert without.value["exit_code"] == 1
            assert "ConnectionRefusedError" in without.value["stderr"]
            approved = await tools.call(ToolName.RUN_COMMAND, CALL, approved=YES)
            assert approved.value["stdout"].encode() == GREETING
            after = await tools.call(ToolName.RUN_COMMAND, CALL)
            assert "ConnectionRefusedError" in after.value["stderr"]


async def test_an_approval_widens_nothing_where_the_run_was_specified_without(
    internet: Internet,
) -> None:
    async with (
        connect(WORKER_SOCKET, client_name="tests") as remote,
        RunScope(remote, await wanted(DENY_ALL), remote_workspaces(remote)) as scope,
    ):
        tools = Toolbox(scope, None)
        assert tools.network_grant == DENY_ALL
        await (await scope.workspace()).write("ca.pem", internet.ca)
        result = await tools.call(ToolName.RUN_COMMAND, CALL, approved=YES)
        assert result.value["exit_code"] == 1
        assert "ConnectionRefusedError" in result.value["stderr"]
