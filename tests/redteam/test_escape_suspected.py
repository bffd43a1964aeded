"""A broken invariant ends the environment and is an alert in the journal.

Source: S1 (`SandboxEscapeSuspected`), DESIGN section 7. The invariants are broken here by the
host's root, since nothing inside can.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sbxd.port.errors import (
    EscapeCode,
    ExecutionRejected,
    RejectedCode,
    SandboxEscapeSuspected,
)
from sbxd.port.ids import TenantId
from tests.redteam.live import Live, live

VOLUMES = Path("/var/lib/sbxd/volumes")


def alerts(environment_id: str) -> list[dict[str, Any]]:
    """What the journal holds of this environment at priority alert."""
    subprocess.run(["journalctl", "--sync"], check=True, timeout=60)
    found = subprocess.run(
        ["journalctl", "--output=json", "PRIORITY=1", f"SBX_ENVIRONMENT_ID={environment_id}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def has_scope(environment_id: str) -> bool:
    return os.path.lexists(f"/sys/fs/cgroup/sbx.slice/sbx-{environment_id}.scope")


async def _is_over(environment: Live, code: EscapeCode) -> None:
    handle = environment.handle
    await environment.remote.destroy(handle)
    with pytest.raises(ExecutionRejected) as caught:
        await environment.run("true")
    assert caught.value.code is RejectedCode.ENVIRONMENT_GONE
    (alert,) = alerts(handle.environment_id)
    assert alert["SBX_EVENT"] == "SandboxEscapeWasSuspected"
    assert alert["SBX_CODE"] == code
    assert not has_scope(handle.environment_id)


@pytest.mark.needs("daemon", "quota", "root")
async def test_a_workspace_whose_root_was_removed_is_a_suspected_escape() -> None:
    async with live() as environment:
        assert (await environment.run("true")).exit_code == 0
        assert alerts(environment.handle.environment_id) == []
        assert has_scope(environment.handle.environment_id)
        os.rmdir(VOLUMES / environment.handle.environment_id / "workspace")
        with pytest.raises(SandboxEscapeSuspected) as caught:
            await environment.run("true")
        assert caught.value.code is EscapeCode.WORKSPACE_IDENTITY_CHANGED
        await _is_over(environment, EscapeCode.WORKSPACE_IDENTITY_CHANGED)


@pytest.mark.needs("daemon", "quota", "root")
async def test_a_handle_of_another_tenant_is_a_suspected_escape() -> None:
    async with live() as environment:
        other = msgspec.structs.replace(environment.handle, tenant_id=TenantId("other"))
        with pytest.raises(SandboxEscapeSuspected) as caught:
            await Live(environment.remote, other).run("true")
        assert caught.value.code is EscapeCode.TENANT_MISMATCH
        await _is_over(environment, EscapeCode.TENANT_MISMATCH)
