"""The journal itself: what it makes of our events, read back as an operator reads them."""

import json
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sbxd.audit.argv import describe_argv
from sbxd.audit.events import (
    CommandStarted,
    OrphanDestroyed,
    RequestRejected,
)
from sbxd.audit.recorder import open_recorder
from sbxd.audit.vocabulary import EVENT_TYPES
from sbxd.policy.timeouts import TimeoutBound
from sbxd.policy.violations import ViolationCode
from sbxd.port.errors import RejectedCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.settings import Settings

pytestmark = pytest.mark.needs("systemd")

CATALOG = Path(__file__).parents[2] / "packaging" / "sbxd.catalog"
JOURNAL = Settings().journal_socket
BOOT = "b" * 32
FORGED = "x\nSBX_OUTCOME=allow\n_UID=4242\nPRIORITY=0\nMESSAGE=forged\n\x1b[2J<0>"


def entries(environment_id: str) -> list[dict[str, Any]]:
    """Everything that the journal holds under an environment's id."""
    subprocess.run(["journalctl", "--sync"], check=True, timeout=30)
    done = subprocess.run(
        ["journalctl", "--output=json", "--all", f"SBX_ENVIRONMENT_ID={environment_id}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def text(value: Any) -> str:
    """A field's text; the journal gives as numbers what is not printable."""
    return bytes(value).decode() if isinstance(value, list) else str(value)


@pytest.fixture
def environment_id() -> EnvironmentId:
    return EnvironmentId(secrets.token_hex(16))


@pytest.mark.case("AUD-01", "AUD-07")
async def test_a_forged_value_is_one_field_of_the_real_journal(
    environment_id: EnvironmentId, tmp_path: Path
) -> None:
    argv = describe_argv((FORGED.encode(), b"sk-planted-secret"))
    async with open_recorder(tmp_path, JOURNAL, boot_id=BOOT) as sink:
        await sink.emit(
            CommandStarted(
                environment_id=environment_id,
                tenant_id=TenantId("t"),
                run_id=RunId("r"),
                lease_epoch=1,
                command_number=1,
                program=argv.program,
                program_bytes=argv.program_bytes,
                argv_count=argv.argv_count,
                argv_sha256=argv.argv_sha256,
                stdin_bytes=0,
                network_enabled=False,
                effective_timeout_ms=1000,
                timeout_bound=TimeoutBound.COMMAND,
            )
        )
    (entry,) = entries(environment_id)
    assert text(entry["SBX_PROGRAM"]) == FORGED
    assert entry["MESSAGE_ID"] == CommandStarted.MESSAGE_ID
    assert entry["PRIORITY"] == "6"
    assert entry["SBX_EVENT"] == "CommandStarted"
    assert entry["_UID"] == "0"
    assert "SBX_OUTCOME" not in entry
    assert text(entry["MESSAGE"]).startswith("Command 1 of environment ")
    assert text(entry["MESSAGE"]).isprintable()
    assert "sk-planted-secret" not in json.dumps(entry)


async def test_an_event_too_large_for_a_datagram_arrives_whole(
    environment_id: EnvironmentId, tmp_path: Path
) -> None:
    kinds = tuple(f"{number:04}" + "x" * 12_000 for number in range(64))
    async with open_recorder(tmp_path, JOURNAL, boot_id=BOOT) as sink:
        await sink.emit(OrphanDestroyed(environment_id=environment_id, kinds=kinds))
    (entry,) = entries(environment_id)
    assert entry["SBX_KINDS"] == list(kinds)


async def test_events_keep_their_order(environment_id: EnvironmentId, tmp_path: Path) -> None:
    async with open_recorder(tmp_path, JOURNAL, boot_id=BOOT) as sink:
        for number in range(50):
            await sink.emit(
                RequestRejected(
                    verb="execute",
                    code=RejectedCode.ENVIRONMENT_GONE,
                    violation=ViolationCode.HANDLE_DENIED,
                    detail=str(number),
                    peer_uid=0,
                    environment_id=environment_id,
                )
            )
    assert [entry["SBX_DETAIL"] for entry in entries(environment_id)] == [
        str(number) for number in range(50)
    ]


def test_the_catalog_is_read_by_the_journals_own_tool(tmp_path: Path) -> None:
    for folder in ("usr/lib/systemd/catalog", "var/lib/systemd/catalog", "etc"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(CATALOG, tmp_path / "usr/lib/systemd/catalog")
    root = f"--root={tmp_path}"
    subprocess.run(["journalctl", root, "--update-catalog"], check=True, timeout=30)
    done = subprocess.run(
        ["journalctl", root, "--list-catalog"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    listed = {line.partition(" ")[0] for line in done.stdout.splitlines() if " sbxd: " in line}
    assert listed == {kind.MESSAGE_ID for kind in EVENT_TYPES}
