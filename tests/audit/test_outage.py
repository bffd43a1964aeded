"""Nobody listens on the journal's sockets: running work goes on and is recorded, new work is
refused, and afterwards not one number is missing.
"""

import json
import subprocess
import sys

import pytest
import trio

from sbxd.audit.events import CommandStarted, EnvironmentDestroyed
from sbxd.audit.stream_events import AuditRecovered
from sbxd.client.remote import connect
from sbxd.port.command import ExecutionResult
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from tests.audit.live_records import position, since
from tests.audit.scenarios import journal_away, restored, seen
from tests.pacing import next_look
from tests.redteam.faults import SMALL
from tests.redteam.live import (
    WORKER_SOCKET,
    Live,
    default_image,
    live,
    specification,
    wait_process_on_the_host,
)

pytestmark = pytest.mark.needs("daemon", "root", "lane-container")

WAITS = 'until test -e go; do sleep 0.05; done; exit 7; : "$0"'


def verified() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "sbxctl", "audit", "verify", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    verdict: dict[str, object] = json.loads(done.stdout)
    assert (done.returncode in (0, 251)) is verdict["sound"]
    return verdict


async def doctor() -> tuple[str, str, str]:
    """What `sbxctl doctor` says of the audit: state, detail, what to do."""
    done = await trio.run_process(
        [sys.executable, "-m", "sbxctl", "doctor", "--json"], capture_stdout=True, check=False
    )
    (item,) = [each for each in json.loads(done.stdout) if each["name"] == "audit"]
    # This lane lacks more, so the exit code proves nothing of it alone.
    assert done.returncode == 246
    return item["state"], item["detail"], item["fix"]


@pytest.mark.case("AUD-05")
async def test_running_work_goes_on_new_work_is_refused_and_nothing_is_missing() -> None:
    await restored()
    image = await default_image()
    results: list[ExecutionResult] = []
    codes: list[UnavailableCode] = []

    async def work(one: Live) -> None:
        results.append(await one.run("sh", "-c", WAITS, "4711"))

    async with live(SMALL) as one, live(SMALL) as idle:
        async with trio.open_nursery() as nursery:
            earlier = position().sequence
            nursery.start_soon(work, one)
            await wait_process_on_the_host("4711")
            await seen(CommandStarted, earlier)
            before = position().sequence
            with journal_away():
                # The first event that is not taken says that the journal is away.
                await idle.workspace.write("x", b"")
                async with connect(WORKER_SOCKET, client_name="new") as remote:
                    for _ in range(3):
                        with pytest.raises(ExecutionUnavailable) as refused:
                            await remote.provision(specification(image, SMALL))
                        codes.append(refused.value.code)
                with pytest.raises(ExecutionUnavailable) as refused:
                    await idle.run("true")
                codes.append(refused.value.code)
                during = await doctor()
                await one.workspace.write("go", b"")
                with trio.fail_after(60):
                    while not results:
                        await next_look()
                await one.remote.destroy(one.handle)
        await seen(AuditRecovered, before)
        await seen(EnvironmentDestroyed, before, one.handle.environment_id)
        assert (await idle.run("true")).exit_code == 0
        after = await doctor()
    assert during[0] == "missing"
    assert "new work is refused" in during[1]
    assert "systemctl status systemd-journald" in during[2]
    assert after[0] == "ok"
    assert codes == [UnavailableCode.AUDIT_UNAVAILABLE] * 4
    assert [(each.exit_code, each.killed_by) for each in results] == [(7, None)]
    records = since(before)
    ours = [
        each.event
        for each in records
        if each.fields.get("environment_id") == one.handle.environment_id
    ]
    assert ours == [
        "WorkspaceUsed",
        "CommandFinished",
        "WorkspaceUsesCounted",
        "EnvironmentDestroyed",
    ]
    (recovered,) = [each for each in records if each.event == "AuditRecovered"]
    assert int(str(recovered.fields["refused"])) >= 4
    assert recovered.fields["unrecorded"] == "0"
    verdict = verified()
    assert verdict["sound"], verdict
    assert verdict["end"]["proven"]  # type: ignore[index]
