"""The shipped timer and service of the sweep, under systemd; a disk that is full."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.artifacts.store import PIECE_BYTES
from sbxd.port.artifact import ArtifactUnavailable, ArtifactUnavailableCode
from tests.artifacts.world import ALICE, Folder, exported, fetched, run

UNIT = "sbxd-worker-artifacts.service"
TIMER = "sbxd-worker-artifacts.timer"
CONFIG = Path("/etc/sbxd/worker.toml")
STORE = Path("/var/lib/sbxd-worker/artifacts")

in_a_lane = pytest.mark.needs("daemon", "systemd", "root")


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd="/")


@pytest.fixture
def config() -> Iterator[Path]:
    CONFIG.write_text(f'[artifacts]\ndirectory = "{STORE}"\n')
    yield CONFIG
    CONFIG.unlink()


@in_a_lane
def test_the_service_sweeps_as_the_workers_user_and_root_is_refused(config: Path) -> None:
    started = command("systemctl", "start", UNIT)
    assert started.returncode == 0, started.stderr
    shown = command("systemctl", "show", "-p", "Result,ExecMainStatus,User", UNIT).stdout
    assert set(shown.split()) == {"Result=success", "ExecMainStatus=0", "User=sbxd-worker"}
    for path in [STORE, *STORE.rglob("*")]:
        assert path.owner() == "sbxd-worker"
        assert path.stat().st_mode & 0o077 == 0
    refused = command("sbxd-worker", "artifacts", "sweep")
    assert refused.returncode == 241
    assert "another user" in refused.stderr


@in_a_lane
def test_without_a_configuration_the_service_is_skipped_and_not_failed() -> None:
    assert not CONFIG.exists()
    assert command("systemctl", "start", UNIT).returncode == 0
    shown = command("systemctl", "show", "-p", "ConditionResult,ActiveState", UNIT).stdout
    assert set(shown.split()) == {"ConditionResult=no", "ActiveState=inactive"}


@in_a_lane
def test_the_timer_drives_the_service(config: Path) -> None:
    assert command("systemctl", "start", TIMER).returncode == 0
    try:
        listed = json.loads(command("systemctl", "list-timers", "-o", "json", TIMER).stdout)
        assert [(each["unit"], each["activates"]) for each in listed] == [(TIMER, UNIT)]
    finally:
        command("systemctl", "stop", TIMER)


@pytest.mark.needs("root")
def test_a_full_disk_is_a_typed_error_and_loses_nothing(tmp_path: Path, backend: str) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = command(
        "mount", "-t", "tmpfs", "-o", f"size={6 * PIECE_BYTES},mode=0700", "none", str(place)
    )
    assert mounted.returncode == 0, mounted.stderr
    folder = Folder(place)
    try:

        async def main() -> None:
            async with folder.opened() as artifacts:
                kept = await exported(artifacts, b"x" * PIECE_BYTES)
                with pytest.raises(ArtifactUnavailable) as caught:
                    await exported(artifacts, b"y" * (6 * PIECE_BYTES))
                assert caught.value.code is ArtifactUnavailableCode.NO_SPACE
                assert [path.name for path in folder.objects()] == [kept]
                assert folder.partials() == []
                # There is room again at once, and what was there is as it was.
                await exported(artifacts, b"z" * PIECE_BYTES)
                assert await fetched(artifacts, ALICE, kept) == b"x" * PIECE_BYTES

        run(backend, main)
    finally:
        command("umount", str(place))
