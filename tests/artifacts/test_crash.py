"""SIGKILL at every step of a put and of a sweep, to a real process: nothing that was acknowledged
is lost, and after a sweep nothing is left that nobody can find."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from sbxd.artifacts.opening import Artifacts
from sbxd.artifacts.sweeper import SweepReport
from sbxd.port.artifact import ArtifactId, ArtifactNotFound
from tests.artifacts import postgres
from tests.artifacts.crashing import DATA, schema_of
from tests.artifacts.world import ALICE, DAY, Folder, exported, fetched, run
from tests.gates.source import REPOSITORY


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a process that is killed loses nothing that the
    kernel has, so a disk would only be slower."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sbxd-crash-") as place:
        yield Path(place)


@pytest.fixture(params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URI of a server that this test alone has; empty for SQLite."""
    if request.param == "sqlite":
        yield ""
        return
    with postgres.server() as uri:
        yield uri


def killed(base: Path, work: str, uri: str) -> int:
    """How many processes were killed, each a step later than the one before."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.artifacts.crashing", base, work, *([uri] if uri else [])],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def folders(base: Path, uri: str) -> list[Folder]:
    places = sorted(base.iterdir(), key=lambda path: int(path.name))
    found = [Folder(place / "store", schema_of(uri, int(place.name))) for place in places]
    for folder in found:
        folder.clock.time += 41 * DAY
    return found


def acknowledged(folder: Folder) -> ArtifactId | None:
    path = folder.path.parent / "acknowledged"
    return ArtifactId(json.loads(path.read_text())) if path.exists() else None


def names(folder: Folder) -> set[str]:
    return {path.name for path in [*folder.objects(), *folder.partials()]}


async def recovered(folder: Folder) -> bool:
    """Open what a dead process left, sweep, and check everything. Whether the artifact is there."""
    known = acknowledged(folder)
    async with folder.opened() as artifacts:
        if known is not None:
            assert await fetched(artifacts, ALICE, known) == DATA
        await artifacts.sweeper.sweep()
        assert folder.partials() == []
        left = names(folder)
        if known is not None:
            assert left == {known}
        # Without an acknowledgment it may be there or not, but whole and known.
        for name in left:
            assert await fetched(artifacts, ALICE, ArtifactId(name)) == DATA
        assert f'stored{{tenant="{ALICE}"}} {len(left)}' in await artifacts.metrics() or not left
        again = await artifacts.sweeper.sweep()
        assert (again.abandoned, again.by_retention, again.by_request, again.failed) == (0, 0, 0, 0)
    return bool(left)


def test_a_put_that_is_killed_at_any_step_is_whole_or_gone(memory: Path, server: str) -> None:
    count = killed(memory, "put", server)
    assert count > 40
    found = folders(memory, server)
    assert len(found) == count + 1
    # The control: the kills were spread over the put.
    states = {
        bool(folder.path.joinpath("incoming").is_dir() and folder.partials())
        for folder in found
        if (folder.path / "incoming").is_dir()
    }
    assert states == {False, True}

    there = [run("asyncio", partial(recovered, folder)) for folder in found]
    assert there[-1]
    assert not there[0]
    assert there == sorted(there), "once it is there, a later death does not lose it"


def test_a_sweep_that_is_killed_at_any_step_is_finished_by_the_next(
    memory: Path, server: str
) -> None:
    count = killed(memory, "sweep", server)
    assert count > 40
    found = folders(memory, server)
    # The control: some died with nothing removed, some with all.
    assert {len(names(folder)) for folder in found} >= {5, 1}
    assert all(run("trio", partial(recovered, folder)) for folder in found)


def test_two_sweeps_at_once_do_the_work_once(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        reports: list[SweepReport] = []
        async with any_folder.opened() as one, any_folder.opened() as other:
            gone = [await exported(one, bytes([number])) for number in range(30)]
            any_folder.clock.time += 29 * DAY
            kept = await exported(one)
            any_folder.clock.time += 2 * DAY

            async def sweep(artifacts: Artifacts) -> None:
                reports.append(await artifacts.sweeper.sweep())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sweep, one)
                tasks.start_soon(sweep, other)
            assert sum(report.by_retention for report in reports) == 30
            assert sum(report.removed_bytes for report in reports) == 30
            assert all(report.failed == 0 for report in reports)
            assert [path.name for path in any_folder.objects()] == [kept]
            for artifact_id in gone:
                with pytest.raises(ArtifactNotFound):
                    await one.service.describe(ALICE, artifact_id)

    run(backend, main)
