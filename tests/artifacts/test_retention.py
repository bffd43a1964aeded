"""How long each kind of artifact lives, what a sweep removes, and what is exported of it."""

import tracemalloc
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from sbxd.artifacts.metrics import render
from sbxd.artifacts.opening import Artifacts, ArtifactSettings
from sbxd.artifacts.records import Usage
from sbxd.artifacts.retention import Retention, expiry
from sbxd.artifacts.store import PIECE_BYTES
from sbxd.artifacts.sweeper import SweepReport
from sbxd.port.artifact import (
    ArtifactId,
    ArtifactMetadata,
    ArtifactNotFound,
    ArtifactOrigin,
    TrustLevel,
)
from sbxd.port.ids import TenantId
from tests.artifacts.world import (
    ALICE,
    BEGIN,
    BOB,
    DAY,
    RUN,
    Folder,
    digest_of,
    exported,
    fetched,
    pieces,
    run,
)

HOUR = timedelta(hours=1)
TICK = timedelta(microseconds=1)


@pytest.mark.parametrize("origin", ArtifactOrigin)
def test_every_origin_has_a_lifetime_and_30_days_is_the_default(origin: ArtifactOrigin) -> None:
    lifetime = {
        ArtifactOrigin.UPLOAD: 24 * HOUR,
        ArtifactOrigin.KNOWLEDGE_SOURCE: None,
    }.get(origin, 30 * DAY)
    until = expiry(Retention(), origin, BEGIN)
    assert until == (None if lifetime is None else BEGIN + lifetime)


def test_the_operators_lifetimes_are_used() -> None:
    short = Retention(default_seconds=60, unclaimed_upload_seconds=30)
    assert expiry(short, ArtifactOrigin.TOOL_OUTPUT, BEGIN) == BEGIN + timedelta(seconds=60)
    assert expiry(short, ArtifactOrigin.UPLOAD, BEGIN) == BEGIN + timedelta(seconds=30)


async def is_found(artifacts: Artifacts, artifact_id: ArtifactId) -> bool:
    try:
        await fetched(artifacts, ALICE, artifact_id)
    except ArtifactNotFound:
        return False
    return True


@pytest.mark.parametrize("origin", ArtifactOrigin)
def test_an_artifact_is_found_to_its_last_moment_and_not_a_moment_longer(
    backend: str, folder: Folder, origin: ArtifactOrigin
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            run_id = None if origin is ArtifactOrigin.UPLOAD else RUN
            artifact_id = await exported(artifacts, origin=origin, run_id=run_id)
            until = expiry(folder.retention, origin, BEGIN)
            folder.clock.time = (until or BEGIN + 4000 * DAY) - TICK
            await artifacts.sweeper.sweep()
            assert await is_found(artifacts, artifact_id)
            folder.clock.time += TICK
            assert await is_found(artifacts, artifact_id) is (until is None)
            # Not found at once; its bytes go with the sweep.
            assert len(folder.objects()) == 1
            await artifacts.sweeper.sweep()
            assert len(folder.objects()) == (1 if until is None else 0)

    run(backend, main)


def test_an_export_that_a_reply_attached_and_an_upload_that_was_claimed_live_until_deleted(
    backend: str, any_folder: Folder
) -> None:
    async def main() -> None:
        async with any_folder.opened() as artifacts:
            service = artifacts.service
            kept = [
                await exported(artifacts),
                await exported(artifacts, origin=ArtifactOrigin.MODEL_OUTPUT),
                await exported(artifacts, origin=ArtifactOrigin.UPLOAD, run_id=None),
                await exported(artifacts, origin=ArtifactOrigin.KNOWLEDGE_SOURCE, run_id=None),
            ]
            other = await exported(artifacts)
            await service.attach(ALICE, RUN, kept[:2])
            await service.claim(ALICE, kept[2], RUN)
            any_folder.clock.time += 4000 * DAY
            assert (await artifacts.sweeper.sweep()).by_retention == 1
            assert not await is_found(artifacts, other)
            for artifact_id in kept:
                assert await is_found(artifacts, artifact_id)
                await service.delete(ALICE, artifact_id)
                assert not await is_found(artifacts, artifact_id)
            assert await artifacts.sweeper.sweep() == SweepReport(
                by_request=4, removed_bytes=4 * len(b"data")
            )
            assert any_folder.objects() == []

    run(backend, main)


def test_a_sweep_of_more_than_a_batch_removes_all(backend: str, folder: Folder) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            for _ in range(300):
                await exported(artifacts, b"")
            folder.clock.time += 31 * DAY
            assert (await artifacts.sweeper.sweep()).by_retention == 300
            assert await artifacts.sweeper.sweep() == SweepReport()

    run(backend, main)


def test_an_object_that_cannot_be_removed_is_counted_and_stops_no_other(
    backend: str, folder: Folder
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            stuck = await exported(artifacts)
            (path,) = folder.objects()
            path.unlink()
            path.mkdir()
            await exported(artifacts)
            folder.clock.time += 31 * DAY
            assert await artifacts.sweeper.sweep() == SweepReport(
                by_retention=1, removed_bytes=4, failed=1
            )
            assert not await is_found(artifacts, stuck)
            path.rmdir()
            assert (await artifacts.sweeper.sweep()).by_retention == 1

    run(backend, main)


def test_a_put_that_is_going_on_is_not_swept(backend: str, folder: Folder) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts, folder.opened() as other:
            writer = artifacts.writer(ALICE, RUN, ArtifactOrigin.TOOL_OUTPUT)

            async def stream() -> AsyncIterator[bytes]:
                yield b"x" * 2_000_000
                folder.clock.time += 23 * HOUR
                assert await other.sweeper.sweep() == SweepReport()
                yield b"y"

            ref = await writer.create(stream(), "a", "text/plain", TrustLevel.INTERNAL_TOOL)
            assert ref.size_bytes == 2_000_001

    run(backend, main)


def test_a_writer_cannot_be_turned_to_another_run_and_only_lowers_trust(
    backend: str, folder: Folder
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            writer = artifacts.writer(ALICE, RUN, ArtifactOrigin.MODEL_OUTPUT)
            with pytest.raises(AttributeError):
                writer.tenant_id = BOB  # type: ignore[attr-defined]
            public = {name for name in dir(writer) if not name.startswith("_")}
            assert public == {"create"}
            trusted = artifacts.writer(
                ALICE, RUN, ArtifactOrigin.MODEL_OUTPUT, trust_max=TrustLevel.INTERNAL_TOOL
            )
            for maker, said, kept in (
                (writer, TrustLevel.INTERNAL_TOOL, TrustLevel.EXTERNAL_UNTRUSTED),
                (trusted, TrustLevel.INTERNAL_TOOL, TrustLevel.INTERNAL_TOOL),
                (trusted, TrustLevel.EXTERNAL_UNTRUSTED, TrustLevel.EXTERNAL_UNTRUSTED),
            ):
                ref = await maker.create(pieces(b"x"), "a", "text/plain", said)
                found = await artifacts.service.describe(ALICE, ref.artifact_id)
                assert (found.trust, found.tenant_id, found.run_id) == (kept, ALICE, RUN)

    run(backend, main)


def test_the_metrics_say_what_is_stored_and_which_share_retention_removed(
    backend: str, any_folder: Folder
) -> None:
    async def main() -> None:
        async with any_folder.opened() as artifacts:
            await exported(artifacts, b"x" * 30)
            deleted = await exported(artifacts, b"x" * 10)
            await exported(artifacts, b"x" * 5, tenant_id=BOB)
            await artifacts.service.delete(ALICE, deleted)
            any_folder.clock.time += 29 * DAY
            await exported(artifacts, b"x" * 7)
            any_folder.clock.time += 2 * DAY
            before = (await artifacts.metrics()).splitlines()
            assert 'sbxd_artifact_stored_bytes{tenant="alice"} 47' in before
            assert not any("ratio{" in line for line in before)
            await artifacts.sweeper.sweep()
            lines = (await artifacts.metrics()).splitlines()
            assert [line for line in lines if not line.startswith("#")] == [
                'sbxd_artifact_stored_bytes{tenant="alice"} 7',
                'sbxd_artifact_stored_bytes{tenant="bob"} 0',
                'sbxd_artifact_stored{tenant="alice"} 1',
                'sbxd_artifact_stored{tenant="bob"} 0',
                'sbxd_artifact_removed_bytes_total{tenant="alice",by="retention"} 30',
                'sbxd_artifact_removed_bytes_total{tenant="alice",by="request"} 10',
                'sbxd_artifact_removed_bytes_total{tenant="bob",by="retention"} 5',
                'sbxd_artifact_removed_bytes_total{tenant="bob",by="request"} 0',
                'sbxd_artifact_removed_by_retention_ratio{tenant="alice"} 0.75',
                'sbxd_artifact_removed_by_retention_ratio{tenant="bob"} 1.0',
            ]
            assert lines[-1] == "# EOF"

    run(backend, main)


def test_tenants_beyond_the_bound_are_one_series() -> None:
    rest = Usage(tenant_id=TenantId("*"), stored_bytes=9, stored_count=2)
    text = render([Usage(tenant_id=ALICE, stored_bytes=10)], rest)
    assert 'sbxd_artifact_stored_bytes{tenant="_others"} 9' in text
    assert "*" not in text


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ("mysql://x", "postgresql"),
        ("postgresql://u:secret@h/d", "password"),
        ("postgresql://:secret@/d", "password"),
        ("postgresql:///d?host=/x&password=secret", "password"),
        ("postgres:///d?sslpassword=secret", "password"),
    ],
)
def test_a_metadata_setting_that_is_no_database_or_holds_a_secret_is_refused(
    metadata: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        ArtifactSettings(directory="x", metadata=metadata)
    assert "secret" not in str(caught.value)
    ArtifactSettings(directory="x", metadata="postgresql://u@h:5432/d?host=/x")  # the control


def test_a_put_with_an_old_date_of_its_sender_is_not_taken_for_abandoned(
    backend: str, folder: Folder
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts, folder.opened() as other:

            async def stream() -> AsyncIterator[bytes]:
                yield b"da"
                assert await other.sweeper.sweep() == SweepReport()
                yield b"ta"

            said = digest_of(b"data")
            ref = await artifacts._store.put(
                stream(),
                ArtifactMetadata(
                    tenant_id=ALICE,
                    run_id=RUN,
                    origin=ArtifactOrigin.KNOWLEDGE_SOURCE,
                    filename="a",
                    media_type="text/plain",
                    size_bytes=said.size_bytes,
                    sha256=said.sha256,
                    trust=TrustLevel.EXTERNAL_UNTRUSTED,
                    created_at=BEGIN - 900 * DAY,
                    expires_at=None,
                ),
            )
            found = await artifacts.service.describe(ALICE, ref.artifact_id)
            assert found.created_at == BEGIN - 900 * DAY

    run(backend, main)


def test_memory_is_flat_in_both_directions(backend: str, folder: Folder) -> None:
    size = 64 * PIECE_BYTES

    async def stream() -> AsyncIterator[bytes]:
        for _ in range(size // 65_536):
            yield bytes(65_536)

    async def main() -> None:
        async with folder.opened() as artifacts:
            writer = artifacts.writer(ALICE, RUN, ArtifactOrigin.TOOL_OUTPUT)
            tracemalloc.start()
            try:
                ref = await writer.create(
                    stream(), "a", "text/plain", TrustLevel.EXTERNAL_UNTRUSTED
                )
                count = 0
                async with artifacts.service.content(ALICE, ref.artifact_id) as content:
                    async for piece in content.chunks:
                        count += len(piece)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert count == size
            assert peak < size // 4

    run(backend, main)
