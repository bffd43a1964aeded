"""The metadata port: one contract suite for SQLite and PostgreSQL, under asyncio and trio."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import anyio
import pytest
from msgspec.structs import replace

from sbxd.artifacts.identifiers import ArtifactIds
from sbxd.artifacts.opening import open_database
from sbxd.artifacts.records import Caps, Doomed, Intent, Removal, Usage
from sbxd.artifacts.sql import SqlMetadata
from sbxd.port.artifact import (
    ArtifactId,
    ArtifactOrigin,
    ArtifactRejected,
    ArtifactRejectedCode,
    ArtifactUnavailable,
    ArtifactUnavailableCode,
    ContentFlag,
    TrustLevel,
)
from sbxd.port.ids import RunId, TenantId
from tests.artifacts.world import ALICE, BEGIN, BOB, DAY, RUN, Folder, run

SHA = "0" * 64
WIDE = Caps(bytes_max=2**40, count_max=1000)
IDS = ArtifactIds(lambda: 1_700_000_000_000, lambda n: b"\xa5" * n)


def intent(
    *,
    origin: ArtifactOrigin = ArtifactOrigin.SANDBOX_EXPORT,
    expires_at: datetime | None = BEGIN + DAY,
    run_id: RunId | None = RUN,
) -> Intent:
    return Intent(
        artifact_id=IDS.new(),
        tenant_id=ALICE,
        run_id=run_id,
        origin=origin,
        filename="a.txt",
        media_type="text/plain",
        trust=TrustLevel.EXTERNAL_UNTRUSTED,
        begun_at=BEGIN,
        created_at=BEGIN,
        expires_at=expires_at,
    )


@asynccontextmanager
async def opened(folder: Folder) -> AsyncIterator[SqlMetadata]:
    async with open_database(folder.settings()) as database:
        yield SqlMetadata(database)


async def stored(
    metadata: SqlMetadata, what: Intent, size: int = 10, caps: Caps = WIDE
) -> ArtifactId:
    await metadata.intend(what)
    await metadata.acknowledge(
        what.artifact_id, size_bytes=size, sha256=SHA, flags=frozenset(), caps=caps
    )
    return what.artifact_id


def test_a_row_is_found_with_all_that_was_said_of_it_and_only_when_acknowledged(
    backend: str, any_folder: Folder
) -> None:
    hostile = '../x\x00\r\n"\ud800\u202e\U0001f600' + "n" * 300
    what = replace(intent(), filename=hostile, created_at=BEGIN + timedelta(microseconds=7))
    flags = frozenset({ContentFlag.FORMULA_LIKE, ContentFlag.BYTE_ORDER_MARK})

    async def main() -> None:
        async with opened(any_folder) as metadata:
            await metadata.intend(what)
            assert await metadata.find(what.artifact_id, now=BEGIN) is None
            await metadata.acknowledge(
                what.artifact_id, size_bytes=2**40, sha256=SHA, flags=flags, caps=WIDE
            )
            found = await metadata.find(what.artifact_id, now=BEGIN)
        assert found is not None
        known = found.metadata
        assert (known.tenant_id, known.run_id, known.origin) == (ALICE, RUN, what.origin)
        assert (known.filename, known.media_type, known.trust) == (
            hostile,
            "text/plain",
            TrustLevel.EXTERNAL_UNTRUSTED,
        )
        assert (known.size_bytes, known.sha256, known.flags) == (2**40, SHA, flags)
        assert (known.created_at, known.expires_at) == (what.created_at, BEGIN + DAY)

    run(backend, main)


def test_rows_outlive_the_connection(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            artifact_id = await stored(metadata, intent())
        async with opened(any_folder) as metadata:
            assert await metadata.find(artifact_id, now=BEGIN) is not None

    run(backend, main)


def test_expired_is_not_found_at_once(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            artifact_id = await stored(metadata, intent())
            just_before = BEGIN + DAY - timedelta(microseconds=1)
            assert await metadata.find(artifact_id, now=just_before) is not None
            assert await metadata.find(artifact_id, now=BEGIN + DAY) is None

    run(backend, main)


def test_a_second_acknowledgment_and_one_of_nothing_are_abandoned(
    backend: str, any_folder: Folder
) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            what = intent()
            await stored(metadata, what)
            for artifact_id in (what.artifact_id, IDS.new()):
                with pytest.raises(ArtifactUnavailable) as caught:
                    await metadata.acknowledge(
                        artifact_id, size_bytes=1, sha256=SHA, flags=frozenset(), caps=WIDE
                    )
                assert caught.value.code is ArtifactUnavailableCode.ABANDONED
            assert (await metadata.usage(ALICE)).stored_bytes == 10

    run(backend, main)


@pytest.mark.parametrize(
    "caps", [Caps(bytes_max=25, count_max=100), Caps(bytes_max=100, count_max=2)]
)
def test_a_tenant_is_charged_to_its_cap_and_not_beyond(
    backend: str, any_folder: Folder, caps: Caps
) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            for _ in range(2):
                await stored(metadata, intent(), caps=caps)
            what = intent()
            with pytest.raises(ArtifactRejected) as caught:
                await stored(metadata, what, caps=caps)
            assert caught.value.code is ArtifactRejectedCode.TENANT_CAP
            # All of the transaction is undone: the row is as it was.
            assert await metadata.find(what.artifact_id, now=BEGIN) is None
            assert await metadata.abandon(what.artifact_id)
            usage = await metadata.usage(ALICE)
            assert (usage.stored_bytes, usage.stored_count) == (20, 2)
            # Another tenant has a cap of its own.
            await stored(metadata, replace(intent(), tenant_id=BOB), caps=caps)

    run(backend, main)


def test_a_cap_holds_against_many_at_once(backend: str, any_folder: Folder) -> None:
    caps = Caps(bytes_max=55, count_max=100)
    outcomes: list[str] = []

    async def main() -> None:
        async with opened(any_folder) as metadata:

            async def one() -> None:
                try:
                    await stored(metadata, intent(), caps=caps)
                except ArtifactRejected as rejected:
                    outcomes.append(rejected.code)
                else:
                    outcomes.append("stored")

            async with anyio.create_task_group() as tasks:
                for _ in range(12):
                    tasks.start_soon(one)
            assert (await metadata.usage(ALICE)).stored_bytes == 50

    run(backend, main)
    assert sorted(outcomes) == ["TENANT_CAP"] * 7 + ["stored"] * 5


def test_an_upload_is_claimed_by_one_run_and_then_lives(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            upload = await stored(metadata, intent(origin=ArtifactOrigin.UPLOAD, run_id=None))
            export = await stored(metadata, intent())
            late = BEGIN + DAY
            other = RunId("run-2")
            assert not await metadata.claim(BOB, upload, RUN, now=BEGIN)
            assert not await metadata.claim(ALICE, export, RUN, now=BEGIN)
            assert not await metadata.claim(ALICE, upload, RUN, now=late)
            assert await metadata.claim(ALICE, upload, RUN, now=BEGIN)
            assert await metadata.claim(ALICE, upload, RUN, now=late)
            assert not await metadata.claim(ALICE, upload, other, now=late)
            found = await metadata.find(upload, now=late + 400 * DAY)
            assert found is not None
            assert (found.metadata.run_id, found.metadata.expires_at) == (RUN, None)

    run(backend, main)


def test_exports_are_attached_together_or_not_at_all(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            export = await stored(metadata, intent())
            text = await stored(metadata, intent(origin=ArtifactOrigin.MODEL_OUTPUT))
            output = await stored(metadata, intent(origin=ArtifactOrigin.TOOL_OUTPUT))
            late = BEGIN + 2 * DAY
            assert not await metadata.attach(ALICE, RUN, [export, output], now=BEGIN)
            assert not await metadata.attach(ALICE, RunId("run-2"), [export], now=BEGIN)
            assert not await metadata.attach(BOB, RUN, [export], now=BEGIN)
            assert await metadata.find(export, now=late) is None
            assert await metadata.attach(ALICE, RUN, [text, export, text], now=BEGIN)
            assert await metadata.find(export, now=late) is not None
            assert await metadata.find(text, now=late) is not None

    run(backend, main)


def test_what_ends_is_doomed_in_order_and_forgotten_once(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            kept = await stored(metadata, intent(expires_at=None))
            expired = await stored(metadata, intent(), size=7)
            deleted = await stored(metadata, intent(expires_at=None), size=5)
            pending = intent(expires_at=None)
            await metadata.intend(pending)
            assert not await metadata.expire(BOB, deleted, now=BEGIN)
            assert await metadata.expire(ALICE, deleted, now=BEGIN)
            assert not await metadata.expire(ALICE, deleted, now=BEGIN)

            assert await metadata.doomed(after=None, limit=10) == []
            assert await metadata.doom_expired(now=BEGIN + DAY, limit=1) == 1
            assert await metadata.doom_expired(now=BEGIN + DAY, limit=10) == 1
            assert await metadata.doom_expired(now=BEGIN + DAY, limit=10) == 0
            assert await metadata.pending(begun_before=BEGIN, after=None, limit=10) == []
            begun = await metadata.pending(begun_before=BEGIN + DAY, after=None, limit=10)
            assert begun == [Doomed(artifact_id=pending.artifact_id, tenant_id=ALICE)]
            last = begun[-1].artifact_id
            assert await metadata.pending(begun_before=BEGIN + DAY, after=last, limit=10) == []
            assert await metadata.abandon(last)

            rows = await metadata.doomed(after=None, limit=10)
            ids = sorted([expired, deleted, pending.artifact_id])
            assert rows == [Doomed(artifact_id=each, tenant_id=ALICE) for each in ids]
            assert await metadata.doomed(after=ids[0], limit=1) == [rows[1]]

            assert await metadata.forget(kept) is None
            assert await metadata.forget(expired) == (Removal.RETENTION, 7)
            assert await metadata.forget(expired) is None
            assert await metadata.forget(deleted) == (Removal.REQUEST, 5)
            assert await metadata.forget(pending.artifact_id) == (Removal.ABANDONED, 0)
            assert await metadata.usage(ALICE) == Usage(
                tenant_id=ALICE,
                stored_bytes=10,
                stored_count=1,
                removed_by_retention_bytes=7,
                removed_by_request_bytes=5,
            )

    run(backend, main)


def test_a_put_that_ended_badly_is_abandoned_unless_it_was_acknowledged(
    backend: str, any_folder: Folder
) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            done = await stored(metadata, intent())
            begun = intent()
            await metadata.intend(begun)
            assert not await metadata.abandon(done)
            assert await metadata.abandon(begun.artifact_id)
            assert await metadata.abandon(begun.artifact_id)
            assert await metadata.abandon(IDS.new())
            assert await metadata.find(done, now=BEGIN) is not None
            assert [d.artifact_id for d in await metadata.doomed(after=None, limit=9)] == [
                begun.artifact_id
            ]

    run(backend, main)


def test_the_largest_tenants_are_listed_and_the_others_summed(
    backend: str, any_folder: Folder
) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            assert await metadata.usages(limit=5) == ([], Usage(tenant_id=TenantId("*")))
            await stored(metadata, intent(), size=5)
            await stored(metadata, replace(intent(), tenant_id=BOB), size=9)
            listed, rest = await metadata.usages(limit=1)
            assert [(u.tenant_id, u.stored_bytes) for u in listed] == [(BOB, 9)]
            assert (rest.stored_bytes, rest.stored_count) == (5, 1)

    run(backend, main)


def test_the_first_tree_that_is_adopted_stays(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            assert await metadata.store_id() is None
            assert await metadata.adopt("one") == "one"
            assert await metadata.adopt("two") == "one"
            assert await metadata.store_id() == "one"

    run(backend, main)


def test_a_cancelled_caller_leaves_a_whole_transaction_or_none(
    backend: str, any_folder: Folder
) -> None:
    async def main() -> None:
        async with opened(any_folder) as metadata:
            what = intent()
            await metadata.intend(what)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await metadata.acknowledge(
                    what.artifact_id, size_bytes=3, sha256=SHA, flags=frozenset(), caps=WIDE
                )
            found = await metadata.find(what.artifact_id, now=BEGIN)
            charged = (await metadata.usage(ALICE)).stored_bytes
            assert (found is None, charged) in {(True, 0), (False, 3)}
            await stored(metadata, intent())  # and the connection is as good as before

    run(backend, main)


def test_a_time_without_a_zone_is_refused(backend: str, folder: Folder) -> None:
    async def main() -> None:
        async with opened(folder) as metadata:
            with pytest.raises(ValueError, match="zone"):
                await metadata.find(IDS.new(), now=BEGIN.replace(tzinfo=None))

    run(backend, main)
