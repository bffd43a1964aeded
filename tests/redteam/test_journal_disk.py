"""The creation journal's disk is full, is read-only, or holds nonsense: the installed daemon builds
nothing new, alerts, still destroys what there is, and what it cannot prove gone stays quarantined
across its next start.

The journal gets a small file system of its own, so that nothing else of the lane is touched.
Source: CASES LIF-05. The same by SQLite's own failures: `tests/lifecycle/test_journal_failures`.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio

from sbxd.client.remote import RemoteExecutionEnvironment, connect
from sbxd.port.errors import ExecutionUnavailable, PortError, UnavailableCode
from sbxd.wire.repair import ClearingWord
from tests.pacing import next_look
from tests.redteam.faults import DAEMON, SMALL
from tests.redteam.inventory import STATE, wait_settled
from tests.redteam.live import WORKER_SOCKET, Live, admin, default_image, specification

pytestmark = [pytest.mark.needs("daemon", "loop", "root")]

JOURNAL = STATE / "journal"
IMAGE = "journal.ext4"
SIZE_BYTES = 8 * 2**20
PROVISIONS_MAX = 2000


def run(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def restart() -> None:
    subprocess.run(["systemctl", "reset-failed", DAEMON], check=False, timeout=60)
    run("systemctl", "restart", DAEMON)


@contextmanager
def disk_of_its_own(directory: Path) -> Iterator[None]:
    """The journal, moved to a small file system; afterwards it is where it was, with what it says
    now. The daemon runs before and after."""
    image = directory / IMAGE
    image.write_bytes(b"")
    os.truncate(image, SIZE_BYTES)
    run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
    run("systemctl", "stop", DAEMON)
    kept = directory / "kept"
    shutil.copytree(JOURNAL, kept, copy_function=shutil.copy2)
    owner = JOURNAL.stat()
    run("mount", "-o", "loop", str(image), str(JOURNAL))
    try:
        _put(kept, owner)
        run("systemctl", "start", DAEMON)
        yield
    finally:
        run("systemctl", "stop", DAEMON)
        shutil.rmtree(kept)
        shutil.copytree(JOURNAL, kept, copy_function=shutil.copy2)
        run("umount", str(JOURNAL))
        _put(kept, owner)
        restart()


def _put(source: Path, owner: os.stat_result) -> None:
    """Make the journal what `source` holds."""
    for old in JOURNAL.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    shutil.copytree(source, JOURNAL, dirs_exist_ok=True, copy_function=shutil.copy2)
    for path in (JOURNAL, *JOURNAL.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    JOURNAL.chmod(0o700)


def fill() -> None:
    """Not a byte is left."""
    with suppress(OSError), (JOURNAL / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


def make_room() -> None:
    (JOURNAL / "filler").unlink()


def read_only() -> None:
    """As the kernel does it after an error of the device."""
    run("mount", "-o", "remount,abort", str(JOURNAL))


def repair(directory: Path) -> None:
    """What an operator does then: check the disk, and mount it again."""
    run("umount", str(JOURNAL))
    checked = subprocess.run(
        ["e2fsck", "-fy", str(directory / IMAGE)], check=False, capture_output=True, timeout=60
    )
    assert checked.returncode in (0, 1), checked
    run("mount", "-o", "loop", str(directory / IMAGE), str(JOURNAL))


def alerts() -> list[dict[str, str]]:
    run("journalctl", "--sync")
    shown = run("journalctl", "-o", "json", "--no-pager", "SBX_EVENT=JournalWriteFailed")
    return [json.loads(line) for line in shown.splitlines()]


async def refused(remote: RemoteExecutionEnvironment, image: str) -> ExecutionUnavailable:
    """Ask until the journal's last page is used up: the first refusal."""
    for _ in range(PROVISIONS_MAX):
        try:
            handle = await remote.provision(specification(image, SMALL))
        except ExecutionUnavailable as error:
            return error
        await remote.destroy(handle)
    raise AssertionError("a full disk takes everything")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[None]:
    with disk_of_its_own(tmp_path):
        yield


BREAK = {"full": fill, "read-only": read_only}


@pytest.mark.case("LIF-05")
@pytest.mark.parametrize("how", BREAK)
async def test_nothing_is_built_somebody_is_alerted_and_what_there_is_is_used_and_destroyed(
    journal: None, how: str
) -> None:
    before = await wait_settled(within_seconds=180)
    image = await default_image()
    alerted = len(alerts())
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        handle = await remote.provision(specification(image, SMALL))
        BREAK[how]()
        error = await refused(remote, image)
        assert error.code is UnavailableCode.SETUP_FAILED
        assert "journal" in error.detail
        assert len(alerts()) > alerted
        assert (await Live(remote, handle).run("sh", "-c", "exit 5")).exit_code == 5
        await remote.destroy(handle)
        async with admin() as client:
            assert await client.list() == ()
    if how == "full":
        make_room()
        after = await wait_settled(within_seconds=180)
        assert after.report() == before.report()


@pytest.mark.case("LIF-05", "LIF-10")
@pytest.mark.parametrize("how", BREAK)
async def test_what_cannot_be_destroyed_meanwhile_is_quarantined_by_the_next_start(
    tmp_path: Path, how: str
) -> None:
    image = await default_image()
    with disk_of_its_own(tmp_path):
        await wait_settled(within_seconds=180)
        async with connect(WORKER_SOCKET, client_name="tests") as remote:
            handle = await remote.provision(specification(image, SMALL))
            name = handle.environment_id
            (volume,) = (STATE / "volumes").glob(f"{name}*")
            # Its volume cannot be removed by anybody, which is what a broken disk comes to.
            run("chattr", "+i", str(volume))
            try:
                BREAK[how]()
                if how == "full":
                    await refused(remote, image)
                with suppress(PortError):
                    await remote.destroy(handle)
                # A full disk may have kept one page for it: then the database says it, and
                # otherwise the marker. (Which of the two: `tests/lifecycle/test_journal_failures`.)
                await _quarantined(name)
                if how == "full":
                    make_room()
                else:
                    run("systemctl", "stop", DAEMON)
                    repair(tmp_path)
                restart()
                # What said it is left as it is; without either its removal is tried and fails.
                await _quarantined(name)
                async with admin() as client:
                    assert name in {each.name for each in await client.quarantine()}
                assert volume.exists()
            finally:
                run("chattr", "-i", str(volume))
                with suppress(PortError):
                    async with admin() as client:
                        await client.clear_quarantine(name, ClearingWord.ONLY_WITH_PROOF)
            assert not volume.exists()
    await wait_settled(within_seconds=180)


async def _quarantined(name: str) -> None:
    with trio.fail_after(120):
        while True:
            with suppress(PortError):
                async with admin() as client:
                    infos = await client.quarantine()
                if name in {each.name for each in infos}:
                    return
                async with admin() as client:
                    listed = [
                        (each.handle.environment_id, each.state) for each in await client.list()
                    ]
                if (name, "QUARANTINED") in listed:
                    return
            await next_look()


@pytest.mark.case("LIF-05")
async def test_a_journal_of_nonsense_keeps_the_daemon_from_starting_until_it_is_put_away(
    journal: None,
) -> None:
    before = await wait_settled(within_seconds=180)
    image = await default_image()
    async with connect(WORKER_SOCKET, client_name="tests") as remote:
        handle = await remote.provision(specification(image, SMALL))
        run("systemctl", "kill", "--signal=KILL", DAEMON)
        run("systemctl", "stop", DAEMON)
    database = JOURNAL / "journal.sqlite"
    size = max(database.stat().st_size, 3 * 4096)
    database.write_bytes(b"\xa5" * size)
    for name in ("journal.sqlite-wal", "journal.sqlite-shm"):
        (JOURNAL / name).unlink(missing_ok=True)
    failed = await trio.run_process(["systemctl", "start", DAEMON], check=False)
    assert failed.returncode != 0, "a daemon whose books say nothing starts"
    run("systemctl", "stop", DAEMON)
    said = run("journalctl", "-u", DAEMON, "-n", "20", "--no-pager", "-o", "cat")
    assert "the journal" in said
    # The launcher ended everything when the daemon went; the operator puts the file away.
    database.unlink()
    restart()
    after = await wait_settled(within_seconds=180)
    assert after.report() == before.report()
    assert not list((STATE / "volumes").glob(f"{handle.environment_id}*"))
