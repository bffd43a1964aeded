"""What is denied at the door is charged, and audited under one closed code."""

import msgspec
from trio.testing import MockClock

from sbxd.audit.events import PathDenied, RequestRejected
from sbxd.policy.violations import ViolationCode
from sbxd.port.errors import RejectedCode
from sbxd.port.limits import EnvironmentBudgets
from sbxd.wire import messages as m
from tests.service.memory import memory_daemon
from tests.service.raw import greeted_client
from tests.service.requests import SCRIPT, SPECIFICATION, command

BUDGETS = EnvironmentBudgets(operations_max=2, returned_bytes_max=1000, wall_seconds_max=60)


async def test_a_path_out_and_a_malformed_command_are_charged_and_audited(
    autojump_clock: MockClock,
) -> None:
    specification = msgspec.structs.replace(SPECIFICATION, budgets=BUDGETS)
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        await raw.send(m.Provision(request_id=1, specification=specification))
        provisioned = await raw.receive()
        assert isinstance(provisioned, m.Provisioned)
        handle = provisioned.handle
        await raw.send(m.WorkspaceList(request_id=2, handle=handle, path=b"../out"))
        assert isinstance(await raw.receive(), m.WorkspaceEscaped)
        await raw.send(m.Execute(request_id=3, handle=handle, command=command("./relative")))
        invalid = await raw.receive()
        assert isinstance(invalid, m.Rejected)
        assert invalid.code is RejectedCode.INVALID_COMMAND
        for request_id in (4, 5):
            await raw.send(m.Execute(request_id=request_id, handle=handle, command=command("true")))
            over = await raw.receive()
            assert isinstance(over, m.Rejected)
            assert over.code is RejectedCode.BUDGET_EXHAUSTED
            assert over.field == "budgets.operations_max"
        (path,) = daemon.audit.of(PathDenied)
        assert path.violation is ViolationCode.PATH_TRAVERSAL
        assert (path.verb, path.environment_id) == ("workspace_list", handle.environment_id)
        assert "out" not in str(path)
        assert [each.violation for each in daemon.audit.of(RequestRejected)] == [
            ViolationCode.COMMAND_DENIED,
            ViolationCode.OPERATIONS_MAX,
            ViolationCode.OPERATIONS_MAX,
        ]
