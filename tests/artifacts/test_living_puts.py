"""A put that a process is at is alive, whatever the clocks say; whose clock decides the rest."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from sbxd.artifacts.opening import open_artifacts, open_database
from sbxd.artifacts.sql import SqlMetadata
from sbxd.artifacts.store import PIECE_BYTES
from sbxd.port.artifact import ArtifactOrigin
from tests.artifacts.world import ALICE, DAY, Folder, exported, fetched, run, write


@pytest.mark.parametrize("jump", [2 * DAY, 400 * DAY, -2 * DAY], ids=["2 days", "a year", "back"])
def test_a_living_put_is_not_swept_whatever_the_clock_does(
    backend: str, folder: Folder, jump: timedelta
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts, folder.opened() as other:

            async def slow() -> AsyncIterator[bytes]:
                for piece in (b"x" * (2 * PIECE_BYTES), b"y"):
                    yield piece
                    folder.clock.time += jump
                    assert (await other.sweeper.sweep()).abandoned == 0

            ref = await write(artifacts, slow(), origin=ArtifactOrigin.KNOWLEDGE_SOURCE)
            assert len(await fetched(artifacts, ALICE, ref.artifact_id)) == 2 * PIECE_BYTES + 1

    run(backend, main)


def test_a_put_is_alive_until_it_is_acknowledged(
    backend: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the rename and the acknowledgment, where there is no partial any more."""
    acknowledge = SqlMetadata.acknowledge

    async def main() -> None:
        async with folder.opened() as artifacts, folder.opened() as other:

            async def late(self: SqlMetadata, *given: Any, **named: Any) -> None:
                assert len(folder.objects()) == 1
                folder.clock.time += 10 * DAY
                assert (await other.sweeper.sweep()).abandoned == 0
                await acknowledge(self, *given, **named)

            with monkeypatch.context() as patched:
                patched.setattr(SqlMetadata, "acknowledge", late)
                await write(artifacts, b"data", origin=ArtifactOrigin.KNOWLEDGE_SOURCE)
            assert len(folder.objects()) == 1

    run(backend, main)


def test_by_default_the_databases_clock_decides(backend: str, any_folder: Folder) -> None:
    """Not that of the host that asks."""

    async def main() -> None:
        async with open_artifacts(any_folder.settings()) as artifacts:
            kept = await exported(artifacts)
            found = await artifacts.service.describe(ALICE, kept)
            async with open_database(any_folder.settings()) as database:
                now = await SqlMetadata(database).now()
            assert timedelta() <= now - found.created_at < timedelta(hours=1)
            assert (await artifacts.sweeper.sweep()).by_retention == 0

    run(backend, main)
