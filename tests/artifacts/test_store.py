"""What the store takes and refuses, and what a put that does not end well leaves: nothing."""

from collections.abc import AsyncIterator
from unittest.mock import patch

import anyio
import pytest
from msgspec.structs import replace

from sbxd.artifacts.opening import (
    Artifacts,
)
from sbxd.artifacts.retention import Retention
from sbxd.artifacts.sql import SqlMetadata
from sbxd.artifacts.store import PIECE_BYTES, DurableArtifactStore
from sbxd.artifacts.tree import ArtifactTree
from sbxd.port.artifact import (
    ArtifactIntegrityError,
    ArtifactMetadata,
    ArtifactNotFound,
    ArtifactOrigin,
    ArtifactRejected,
    ArtifactRejectedCode,
    ArtifactStore,
    ArtifactUnavailable,
    ArtifactUnavailableCode,
    ArtifactWriter,
    ContentFlag,
    ContentRule,
    TrustLevel,
)
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
    write,
)


def store_of(artifacts: Artifacts) -> DurableArtifactStore:
    return artifacts._store


def metadata_of(data: bytes) -> ArtifactMetadata:
    said = digest_of(data)
    return ArtifactMetadata(
        tenant_id=ALICE,
        run_id=RUN,
        origin=ArtifactOrigin.SANDBOX_EXPORT,
        filename="a",
        media_type="text/plain",
        size_bytes=said.size_bytes,
        sha256=said.sha256,
        trust=TrustLevel.EXTERNAL_UNTRUSTED,
        created_at=BEGIN,
        expires_at=BEGIN + DAY,
    )


def test_put_and_open_are_the_ports(backend: str, folder: Folder) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            store: ArtifactStore = store_of(artifacts)
            writer: ArtifactWriter = artifacts.writer(ALICE, RUN, ArtifactOrigin.TOOL_OUTPUT)
            assert writer is not None
            ref = await store.put(pieces(b"da", b"ta"), metadata_of(b"data"))
            assert b"".join([piece async for piece in await store.open(ref)]) == b"data"
            for wrong in (metadata_of(b"dat"), replace(metadata_of(b"data"), size_bytes=5)):
                with pytest.raises(ArtifactIntegrityError):
                    await store.put(pieces(b"data"), wrong)
            with pytest.raises(ArtifactIntegrityError):
                await store.open(replace(ref, sha256="0" * 64))
            folder.clock.time = BEGIN + DAY
            with pytest.raises(ArtifactNotFound):
                await store.open(ref)

    run(backend, main)


def test_the_cap_of_an_artifact_abandons_the_stream_and_removes_what_came(
    backend: str, folder: Folder
) -> None:
    folder.retention = Retention(artifact_bytes_max=2 * PIECE_BYTES)
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * PIECE_BYTES

    async def main() -> None:
        async with folder.opened() as artifacts:
            with pytest.raises(ArtifactRejected) as caught:
                await write(artifacts, endless())
            assert caught.value.code is ArtifactRejectedCode.TOO_LARGE
            assert (folder.objects(), folder.partials(), taken) == ([], [], 3)
            await write(artifacts, b"x" * (2 * PIECE_BYTES))

    run(backend, main)


def test_512_mib_is_the_default_cap() -> None:
    assert Retention().artifact_bytes_max == 512 * 1024 * 1024


def test_the_cap_of_a_tenant_is_met_while_it_streams(backend: str, any_folder: Folder) -> None:
    any_folder.retention = Retention(tenant_bytes_max=PIECE_BYTES + 10)

    async def main() -> None:
        async with any_folder.opened() as artifacts:
            kept = await write(artifacts, b"x" * PIECE_BYTES)
            with pytest.raises(ArtifactRejected) as caught:
                await write(artifacts, b"x" * 11)
            assert caught.value.code is ArtifactRejectedCode.TENANT_CAP
            assert len(any_folder.objects()) == 1
            await write(artifacts, b"x" * 11, tenant_id=BOB)
            await write(artifacts, b"x" * 10)
            # What has ended makes room when it is swept.
            await artifacts.service.delete(ALICE, kept.artifact_id)
            await artifacts.sweeper.sweep()
            await write(artifacts, b"x" * 11)

    run(backend, main)


def test_a_tenants_number_of_artifacts_is_capped_too(backend: str, folder: Folder) -> None:
    folder.retention = Retention(tenant_artifacts_max=2)

    async def main() -> None:
        async with folder.opened() as artifacts:
            for _ in range(2):
                await write(artifacts, b"")
            with pytest.raises(ArtifactRejected) as caught:
                await write(artifacts, b"")
            assert caught.value.code is ArtifactRejectedCode.TENANT_CAP

    run(backend, main)


def test_a_stream_that_fails_leaves_nothing_and_its_error_goes_through(
    backend: str, folder: Folder
) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"x" * PIECE_BYTES
        raise LookupError

    async def main() -> None:
        async with folder.opened() as artifacts:
            with pytest.raises(LookupError):
                await write(artifacts, failing())
            assert (folder.objects(), folder.partials()) == ([], [])
            folder.clock.time += 10 * DAY
            assert (await artifacts.sweeper.sweep()).abandoned == 0

    run(backend, main)


def test_a_cancelled_put_leaves_nothing(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        reached = anyio.Event()

        async def hanging() -> AsyncIterator[bytes]:
            yield b"x" * (2 * PIECE_BYTES)
            reached.set()
            await anyio.sleep_forever()

        async with any_folder.opened() as artifacts:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, artifacts, hanging())
                await reached.wait()
                assert len(any_folder.partials()) == 1  # the control: it had begun
                tasks.cancel_scope.cancel()
            assert (any_folder.objects(), any_folder.partials()) == ([], [])
            any_folder.clock.time += 10 * DAY
            assert (await artifacts.sweeper.sweep()).abandoned == 0

    run(backend, main)


def test_a_put_that_takes_too_long_ends_before_a_sweep_could_take_its_row(
    backend: str, folder: Folder
) -> None:
    folder.retention = Retention(abandoned_put_seconds=1)  # a stream may take half of it

    async def hanging() -> AsyncIterator[bytes]:
        yield b"x" * (2 * PIECE_BYTES)
        await anyio.sleep_forever()

    async def main() -> None:
        async with folder.opened() as artifacts:
            with pytest.raises(ArtifactUnavailable) as caught:
                await write(artifacts, hanging())
            assert caught.value.code is ArtifactUnavailableCode.ABANDONED
            assert (folder.objects(), folder.partials()) == ([], [])

    run(backend, main)


@pytest.mark.parametrize(
    "code", [ArtifactUnavailableCode.NO_SPACE, ArtifactUnavailableCode.METADATA]
)
def test_an_acknowledgment_that_fails_leaves_an_object_only_where_it_may_have_come_through(
    backend: str, folder: Folder, code: ArtifactUnavailableCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise ArtifactUnavailable(code, "as if")

    async def main() -> None:
        async with folder.opened() as artifacts:
            with monkeypatch.context() as patched:
                patched.setattr(SqlMetadata, "acknowledge", fail)
                patched.setattr(SqlMetadata, "abandon", fail)
                with pytest.raises(ArtifactUnavailable):
                    await write(artifacts, b"data")
            # A database that says "full" has not taken it; one that does not answer may have.
            certain = code is ArtifactUnavailableCode.NO_SPACE
            assert len(folder.objects()) == (0 if certain else 1)
            folder.clock.time += 2 * DAY
            assert (await artifacts.sweeper.sweep()).abandoned == 1
            assert folder.objects() == []

    run(backend, main)


def test_a_put_whose_row_was_swept_stores_nothing(backend: str, folder: Folder) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts, folder.opened() as other:

            async def slow() -> AsyncIterator[bytes]:
                yield b"x" * (2 * PIECE_BYTES)
                folder.clock.time += 10 * DAY
                with patch.object(ArtifactTree, "is_being_put", return_value=False):
                    assert (await other.sweeper.sweep()).abandoned == 1
                yield b"y"

            with pytest.raises(ArtifactUnavailable) as caught:
                await write(artifacts, slow())
            assert caught.value.code is ArtifactUnavailableCode.ABANDONED
            assert (folder.objects(), folder.partials()) == ([], [])

    run(backend, main)


@pytest.mark.case("EXP-10")
@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/passwd",
        'a"b\r\nSet-Cookie: x',
        "n" * 300,
        "evil\u202egnp.exe",
        "",
        "..",
        "a\x00b",
        "\ud800",
    ],
)
def test_a_hostile_name_is_kept_as_metadata_and_has_no_effect_on_the_key(
    backend: str, any_folder: Folder, name: str
) -> None:
    async def main() -> None:
        async with any_folder.opened() as artifacts:
            ref = await write(artifacts, b"data", name=name)
            (path,) = any_folder.objects()
            assert path.relative_to(any_folder.path).parts == (
                "objects",
                ALICE,
                ref.artifact_id[-2:],
                ref.artifact_id,
            )
            described = await artifacts.service.describe(ALICE, ref.artifact_id)
            assert described.filename == name
            async with artifacts.service.content(ALICE, ref.artifact_id) as content:
                for value in content.headers.values():
                    assert value.isascii()
                    assert value.isprintable()
        # Nothing appeared outside, and no name but ours inside.
        assert sorted(path.name for path in any_folder.path.parent.iterdir()) == ["store"]

    run(backend, main)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"name": "n" * 4097}, ArtifactRejectedCode.INVALID_NAME),
        ({"media_type": "text"}, ArtifactRejectedCode.INVALID_MEDIA_TYPE),
        ({"media_type": "text/plain\r\nX: y"}, ArtifactRejectedCode.INVALID_MEDIA_TYPE),
        ({"media_type": "text/plain\n"}, ArtifactRejectedCode.INVALID_MEDIA_TYPE),
        ({"tenant_id": "../x"}, ArtifactRejectedCode.INVALID_IDENTIFIER),
        ({"tenant_id": ".."}, ArtifactRejectedCode.INVALID_IDENTIFIER),
        ({"tenant_id": "a\n"}, ArtifactRejectedCode.INVALID_IDENTIFIER),
        ({"tenant_id": ""}, ArtifactRejectedCode.INVALID_IDENTIFIER),
        ({"run_id": "a/b"}, ArtifactRejectedCode.INVALID_IDENTIFIER),
        ({"run_id": None}, ArtifactRejectedCode.INVALID_IDENTIFIER),
    ],
)
def test_what_is_not_of_its_grammar_is_refused_before_anything_is_written(
    backend: str, folder: Folder, change: dict[str, str], code: ArtifactRejectedCode
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            with pytest.raises(ArtifactRejected) as caught:
                await write(artifacts, b"data", **change)  # type: ignore[arg-type]
            assert caught.value.code is code
            assert list((folder.path / "objects").iterdir()) == []

    run(backend, main)


@pytest.mark.case("EXP-07")
@pytest.mark.parametrize(
    ("data", "flags"),
    [
        (b"a\x00b", None),
        (b"\xff\xfea\x00", None),
        (b"\xc0\xaf", None),
        (b"\xed\xa0\x80", None),
        (b"cut \xe2\x82", None),
        (b"\xef\xbb\xbfa", {ContentFlag.BYTE_ORDER_MARK}),
        (b"a\rb", {ContentFlag.LONE_CARRIAGE_RETURN}),
        ("a\u2028b".encode(), {ContentFlag.UNICODE_LINE_SEPARATOR}),
        ("a\u202eb".encode(), {ContentFlag.BIDIRECTIONAL_CONTROL}),
        (b"\x1b[31m", {ContentFlag.ESCAPE_SEQUENCE}),
        (b"plain\r\ntext\n", set()),
    ],
)
def test_text_without_nul_and_in_utf8_is_stored_with_its_flags_and_other_bytes_are_not(
    backend: str, any_folder: Folder, data: bytes, flags: set[ContentFlag] | None
) -> None:
    async def main() -> None:
        async with any_folder.opened() as artifacts:
            if flags is None:
                with pytest.raises(ArtifactRejected) as caught:
                    await write(artifacts, data, rule=ContentRule.TEXT)
                assert caught.value.code is ArtifactRejectedCode.NOT_TEXT
                assert any_folder.objects() == []
            else:
                ref = await write(artifacts, data, rule=ContentRule.TEXT)
                found = await artifacts.service.describe(ALICE, ref.artifact_id)
                assert found.flags == flags
                assert await fetched(artifacts, ALICE, ref.artifact_id) == data
            # Where text is not asked for, any bytes are kept as they are.
            other = await write(artifacts, data, media_type="application/octet-stream")
            assert await fetched(artifacts, ALICE, other.artifact_id) == data

    run(backend, main)


@pytest.mark.case("EXP-08")
@pytest.mark.parametrize(
    "data",
    [b"=1+1", b"a,+1", b"a\n-1", b"a,b\r\n@x", b'a,"=1"', b'a,  "  =1"', b"a,\tb", b"a,\rb"],
)
def test_cells_that_a_spreadsheet_runs_are_flagged_untrusted_and_not_altered(
    backend: str, folder: Folder, data: bytes
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            ref = await write(artifacts, data, media_type="text/csv")
            found = await artifacts.service.describe(ALICE, ref.artifact_id)
            assert ContentFlag.FORMULA_LIKE in found.flags
            assert found.trust is TrustLevel.EXTERNAL_UNTRUSTED
            assert await fetched(artifacts, ALICE, ref.artifact_id) == data
            harmless = await write(artifacts, b"a,b\r\n1,x=2\r\n", media_type="text/csv")
            found = await artifacts.service.describe(ALICE, harmless.artifact_id)
            assert found.flags == frozenset()

    run(backend, main)


def test_another_folders_database_and_another_databases_folder_are_refused(
    backend: str, any_folder: Folder, folder: Folder
) -> None:
    async def main() -> None:
        async with any_folder.opened() as artifacts:
            await exported(artifacts)
        other = Folder(any_folder.path.parent / "other", any_folder.metadata)
        if not any_folder.metadata:
            async with other.opened():
                pass
            (any_folder.path / "metadata.sqlite").replace(other.path / "metadata.sqlite")
        for wrong in (other, Folder(any_folder.path)):
            with pytest.raises(ArtifactUnavailable) as caught:
                async with wrong.opened():
                    raise AssertionError
            assert caught.value.code is ArtifactUnavailableCode.MISMATCH
        assert len(any_folder.objects()) == 1

    run(backend, main)


def test_puts_at_once_do_not_disturb_each_other(backend: str, any_folder: Folder) -> None:
    async def main() -> None:
        found: dict[str, bytes] = {}

        async with any_folder.opened() as artifacts:

            async def one(number: int) -> None:
                data = bytes([number]) * (number * 1000)
                ref = await write(artifacts, data)
                found[ref.artifact_id] = data

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(one, number)
            assert len(found) == 20
            for artifact_id, data in found.items():
                got = await fetched(artifacts, ALICE, artifact_id)  # type: ignore[arg-type]
                assert got == data

    run(backend, main)
