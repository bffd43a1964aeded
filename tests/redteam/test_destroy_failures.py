"""After how many failures of a destruction the operator is alerted is the operator's to say."""

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from sbxd.client.remote import connect
from sbxd.port.errors import PortError
from sbxd.wire.repair import ClearingWord
from tests.pacing import next_look
from tests.redteam.configuration import current
from tests.redteam.faults import SMALL
from tests.redteam.inventory import STATE, wait_settled
from tests.redteam.live import WORKER_SOCKET, admin, default_image, specification, until
from tests.redteam.operator import configured, events, now, said, start

pytestmark = pytest.mark.needs("daemon", "root", "loop", "lane-container")


def chattr(how: str, file: Path) -> None:
    subprocess.run(["chattr", how, str(file)], check=True, timeout=60)


@pytest.mark.parametrize("failures", [1, 2])
async def test_the_configured_number_of_failures_is_an_alert(failures: int) -> None:
    text = current()
    assert "[limits]\n" in text
    limits = f"[limits]\ndestroy_failures_max = {failures}\n"
    with configured(text.replace("[limits]\n", limits)):
        assert start() == 0, said()
        image = await default_image()
        since = now()
        async with connect(WORKER_SOCKET, client_name="tests") as remote:
            handle = await remote.provision(specification(image, SMALL))
            name = handle.environment_id
            (volume,) = (STATE / "volumes").glob(f"{name}*")
            # Nobody can remove it, which is what a broken disk comes to.
            chattr("+i", volume)
            try:
                with suppress(PortError):  # told or not: what counts is what is recorded
                    await remote.destroy(handle)
                await _quarantined(name)
            finally:
                chattr("-i", volume)
        failed = events(since, "EnvironmentDestroyFailed")
        assert [each["SBX_ATTEMPT"] for each in failed] == [
            str(number) for number in range(1, failures + 1)
        ]
        await until(lambda: events(since, "EnvironmentQuarantined"))
        (alert,) = events(since, "EnvironmentQuarantined")
        assert alert["PRIORITY"] == "1"
        async with admin() as client:
            assert "SbxdQuarantineNotEmpty" in {
                each.name for each in (await client.status()).alerts
            }
            await client.clear_quarantine(name, ClearingWord.ONLY_WITH_PROOF)
        await wait_settled(within_seconds=180)


async def _quarantined(name: str) -> None:
    with trio.fail_after(120):
        async with admin() as client:
            while name not in {each.name for each in await client.quarantine()}:
                await next_look()
