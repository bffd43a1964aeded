"""A program that is killed at a step of a put or of a sweep, for `test_crash.py`.

    python -m tests.artifacts.crashing FOLDER put|sweep [POSTGRESQL-URI]

For n = 1, 2, … it makes a store in FOLDER/n, with SQLite or in a schema of its own of that server,
and forks a process that does the work and kills itself with SIGKILL before its n-th step, where a
step is a call into the operating system that the tree makes or an exchange with the database (a
commit is one). It ends when a process came through; the last line says how many were killed.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
import anyio
import psycopg

from sbxd.artifacts import tree as tree_module
from sbxd.artifacts.identifiers import ArtifactIds
from sbxd.artifacts.opening import open_database
from sbxd.artifacts.records import Intent
from sbxd.artifacts.sql import SqlMetadata
from sbxd.artifacts.tree import ArtifactTree
from sbxd.policy.storage_key import storage_key
from sbxd.port.artifact import ArtifactOrigin, TrustLevel
from tests.artifacts import postgres
from tests.artifacts.world import ALICE, BEGIN, DAY, RUN, Folder, exported

STEPS_MAX = 300
CALLS = (
    "fchmod", "fstat", "fsync", "link", "listdir", "mkdir", "open", "read", "rename", "stat",
    "unlink", "write",
)  # fmt: skip
DATA = b"0123456789" * 500_000


class Killer:
    """Counts steps; at the one it was made for, the process is gone."""

    def __init__(self, step: int) -> None:
        self._left = step

    def step(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class CountedOs:
    """The module os as the tree sees it."""

    def __init__(self, killer: Killer) -> None:
        self._killer = killer

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._killer.step()
            return real(*args, **kwargs)

        return counted


def arm(step: int) -> None:
    """From now on this process counts."""
    killer = Killer(step)
    vars(tree_module)["os"] = CountedOs(killer)
    real = aiosqlite.Connection.execute_fetchall

    async def counted(self: aiosqlite.Connection, *args: Any) -> Any:
        killer.step()
        return await real(self, *args)

    aiosqlite.Connection.execute_fetchall = counted  # type: ignore[assignment,method-assign]
    exchange = psycopg.AsyncConnection.wait

    async def counted_wait(self: psycopg.AsyncConnection[Any], *args: Any, **kwargs: Any) -> Any:
        killer.step()
        return await exchange(self, *args, **kwargs)

    psycopg.AsyncConnection.wait = counted_wait  # type: ignore[method-assign]


async def put(folder: Folder, arm_now: Callable[[], None]) -> None:
    """One put into a new store: opening it is among the steps. Acknowledged in a file."""
    arm_now()
    async with folder.opened() as artifacts:
        artifact_id = await exported(artifacts, DATA, origin=ArtifactOrigin.KNOWLEDGE_SOURCE)
        (folder.path.parent / "acknowledged").write_text(json.dumps(artifact_id))


async def sweep(folder: Folder, arm_now: Callable[[], None]) -> None:
    """A sweep of one expired, one deleted and two abandoned artifacts (one a partial file, one
    whole but never acknowledged), beside one that stays."""
    async with folder.opened() as artifacts:
        await exported(artifacts, b"expired")
        deleted = await exported(artifacts, b"deleted", origin=ArtifactOrigin.KNOWLEDGE_SOURCE)
        kept = await exported(artifacts, DATA, origin=ArtifactOrigin.KNOWLEDGE_SOURCE)
        await artifacts.service.delete(ALICE, deleted)
    await abandoned(folder)
    folder.clock.time += 40 * DAY
    (folder.path.parent / "acknowledged").write_text(json.dumps(kept))
    arm_now()
    async with folder.opened() as artifacts:
        await artifacts.sweeper.sweep()


async def abandoned(folder: Folder) -> None:
    """What two puts leave that died before and after the rename."""
    tree = ArtifactTree(folder.path, "0" * 36)
    ids = ArtifactIds(lambda: 1_700_000_000_000, os.urandom)
    async with open_database(folder.settings()) as database:
        for committed in (False, True):
            artifact_id = ids.new()
            await SqlMetadata(database).intend(
                Intent(
                    artifact_id=artifact_id,
                    tenant_id=ALICE,
                    run_id=RUN,
                    origin=ArtifactOrigin.SANDBOX_EXPORT,
                    filename="a",
                    media_type="text/plain",
                    trust=TrustLevel.EXTERNAL_UNTRUSTED,
                    begun_at=BEGIN,
                    created_at=BEGIN,
                    expires_at=None,
                )
            )
            partial_fd = tree.begin(artifact_id)
            tree.append(partial_fd, b"never acknowledged")
            if committed:
                tree.commit(partial_fd, artifact_id, storage_key(ALICE, artifact_id))
            os.close(partial_fd)
    tree.close()


def schema_of(uri: str, step: int) -> str:
    """What names the metadata of a step's store: SQLite where there is no server."""
    return postgres.with_schema(uri, f"crash_{step}") if uri else ""


def main() -> None:
    base, work = Path(sys.argv[1]), {"put": put, "sweep": sweep}[sys.argv[2]]
    uri = sys.argv[3] if len(sys.argv) > 3 else ""
    for step in range(1, STEPS_MAX):
        place = base / str(step)
        place.mkdir()
        if uri:
            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute(f"CREATE SCHEMA crash_{step}".encode())
        child = os.fork()
        if child == 0:
            folder = Folder(place / "store", schema_of(uri, step))
            anyio.run(work, folder, lambda step=step: arm(step))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            continue
        assert os.waitstatus_to_exitcode(status) == 0, status
        print(step - 1)
        return
    raise AssertionError("more steps than were thought of")


if __name__ == "__main__":
    main()
