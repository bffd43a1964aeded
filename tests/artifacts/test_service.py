"""gate.sandbox.artifact_checksum: an artifact's bytes, fetched through the service, are the bytes
that were exported; a mismatch stores nothing. And whom the service gives what."""

import ast
import os
from collections.abc import AsyncIterator

import anyio
import pytest

from sbxd.artifacts.opening import Artifacts
from sbxd.artifacts.store import PIECE_BYTES
from sbxd.port.artifact import (
    ArtifactId,
    ArtifactIntegrityError,
    ArtifactNotFound,
    ArtifactOrigin,
    ArtifactRejected,
    ArtifactRejectedCode,
    ContentDigest,
    TrustLevel,
)
from sbxd.port.ids import RunId, TenantId
from tests.artifacts.world import (
    ALICE,
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
from tests.gates.source import Module, called, load

SEVERAL_PIECES = os.urandom(3 * PIECE_BYTES + 12_345)


async def in_pieces(data: bytes, length: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), length):
        yield data[start : start + length]


async def export(
    artifacts: Artifacts, stream: AsyncIterator[bytes], expected: ContentDigest
) -> ArtifactId:
    writer = artifacts.writer(ALICE, RUN, ArtifactOrigin.SANDBOX_EXPORT)
    ref = await writer.create(
        stream,
        "out.bin",
        "application/octet-stream",
        TrustLevel.EXTERNAL_UNTRUSTED,
        expected=lambda: expected,
    )
    assert (ref.sha256, ref.size_bytes) == (expected.sha256, expected.size_bytes)
    return ref.artifact_id


@pytest.mark.gate("gate.sandbox.artifact_checksum")
@pytest.mark.parametrize("length", [1021, 65_536, 2 * PIECE_BYTES + 1])
def test_what_is_fetched_is_what_was_exported_for_a_file_of_several_pieces(
    backend: str, folder: Folder, length: int
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            sent = digest_of(SEVERAL_PIECES)
            artifact_id = await export(artifacts, in_pieces(SEVERAL_PIECES, length), sent)
        async with folder.opened() as artifacts:
            got = await fetched(artifacts, ALICE, artifact_id)
        assert got == SEVERAL_PIECES

    run(backend, main)


@pytest.mark.gate("gate.sandbox.artifact_checksum")
@pytest.mark.case("EXP-11")
@pytest.mark.parametrize("damage", ["flip", "truncate", "append", "first", "all"])
def test_a_mismatch_on_the_way_to_the_store_stores_nothing(
    backend: str, folder: Folder, damage: str
) -> None:
    sent = digest_of(SEVERAL_PIECES)
    middle = len(SEVERAL_PIECES) // 2
    flipped = bytearray(SEVERAL_PIECES)
    flipped[middle] ^= 1
    came = {
        "flip": bytes(flipped),
        "truncate": SEVERAL_PIECES[:-1],
        "append": SEVERAL_PIECES + b"\0",
        "first": SEVERAL_PIECES[1:],
        "all": b"",
    }[damage]

    async def main() -> None:
        async with folder.opened() as artifacts:
            with pytest.raises(ArtifactIntegrityError):
                await export(artifacts, in_pieces(came, 65_536), sent)
            assert (folder.objects(), folder.partials()) == ([], [])
            assert "alice" not in await artifacts.metrics()
            assert (await artifacts.sweeper.sweep()).abandoned == 0
            # The control: the same bytes unharmed are stored.
            await export(artifacts, in_pieces(SEVERAL_PIECES, 65_536), sent)
            assert len(folder.objects()) == 1

    run(backend, main)


@pytest.mark.gate("gate.sandbox.artifact_checksum")
@pytest.mark.case("EXP-11")
@pytest.mark.parametrize("damage", ["flip", "truncate", "append", "gone"])
def test_bytes_that_changed_in_the_store_are_never_given_out_whole(
    backend: str, folder: Folder, damage: str
) -> None:
    async def main() -> None:
        got = bytearray()

        async def fetch(artifacts: Artifacts, artifact_id: ArtifactId) -> None:
            async with artifacts.service.content(ALICE, artifact_id) as content:
                async for piece in content.chunks:
                    got.extend(piece)

        async with folder.opened() as artifacts:
            artifact_id = await exported(artifacts, SEVERAL_PIECES)
            (path,) = folder.objects()
            if damage == "flip":
                with path.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(bytes([SEVERAL_PIECES[-1] ^ 1]))
            elif damage == "truncate":
                os.truncate(path, len(SEVERAL_PIECES) - 1)
            elif damage == "append":
                os.truncate(path, len(SEVERAL_PIECES) + 1)
            else:
                path.unlink()
            with pytest.raises(ArtifactIntegrityError):
                await fetch(artifacts, artifact_id)
        assert len(got) < len(SEVERAL_PIECES)

    run(backend, main)


def test_an_object_that_shrinks_while_it_is_read_is_an_integrity_error(
    backend: str, folder: Folder
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            artifact_id = await exported(artifacts, SEVERAL_PIECES)
            async with artifacts.service.content(ALICE, artifact_id) as content:
                await anext(content.chunks)
                os.truncate(folder.objects()[0], PIECE_BYTES)
                with pytest.raises(ArtifactIntegrityError):
                    await anext(content.chunks)

    run(backend, main)


@pytest.mark.parametrize("data", [b"", b"x", b"x" * PIECE_BYTES])
def test_the_edges_of_a_piece(backend: str, folder: Folder, data: bytes) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            artifact_id = await exported(artifacts, data)
            assert await fetched(artifacts, ALICE, artifact_id) == data

    run(backend, main)


def test_another_tenants_an_expired_and_no_artifact_are_the_same(
    backend: str, any_folder: Folder
) -> None:
    async def main() -> None:
        async with any_folder.opened() as artifacts:
            service = artifacts.service
            artifact_id = await exported(artifacts)
            absent = ArtifactId("01a2286f-40de-7000-b4d2-48ae17006208")
            texts = set()
            cases = [
                (BOB, artifact_id),
                (ALICE, absent),
                (ALICE, ArtifactId("../../etc/passwd")),
                (ALICE, ArtifactId(artifact_id.upper())),
                (ALICE, ArtifactId(artifact_id + "\n")),
                (TenantId(""), artifact_id),
            ]
            for tenant_id, name in cases:
                for call in (service.describe, service.refer, service.delete):
                    with pytest.raises(ArtifactNotFound) as caught:
                        await call(tenant_id, name)
                    texts.add(str(caught.value))
                with pytest.raises(ArtifactNotFound):
                    await fetched(artifacts, tenant_id, name)
                with pytest.raises(ArtifactNotFound):
                    await service.claim(tenant_id, name, RUN)
                with pytest.raises(ArtifactNotFound):
                    await service.attach(tenant_id, RUN, [name])
            assert await fetched(artifacts, ALICE, artifact_id) == b"data"  # the control
            any_folder.clock.time += 30 * DAY
            with pytest.raises(ArtifactNotFound) as caught:
                await fetched(artifacts, ALICE, artifact_id)
            texts.add(str(caught.value))
            assert len(texts) == 1

    run(backend, main)


def test_content_leaves_as_an_attachment_with_its_real_name(backend: str, folder: Folder) -> None:
    name = '../../été\r\n"x".html'

    async def main() -> None:
        async with folder.opened() as artifacts:
            writer = artifacts.writer(ALICE, RUN, ArtifactOrigin.SANDBOX_EXPORT)
            ref = await writer.create(
                pieces(b"<script>"), name, "text/html", TrustLevel.INTERNAL_TOOL
            )
            described = await artifacts.service.describe(ALICE, ref.artifact_id)
            assert described.filename == name
            assert described.trust is TrustLevel.EXTERNAL_UNTRUSTED
            async with artifacts.service.content(ALICE, ref.artifact_id) as content:
                headers = dict(content.headers)
        assert headers["Content-Type"] == "application/octet-stream"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Length"] == "8"
        assert headers["Content-Disposition"].startswith('attachment; filename="_t__x_.html"')
        assert "%C3%A9t%C3%A9_x_.html" in headers["Content-Disposition"]

    run(backend, main)


def test_a_reader_that_stops_early_gives_the_descriptor_back(backend: str, folder: Folder) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            artifact_id = await exported(artifacts, SEVERAL_PIECES)
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                async with artifacts.service.content(ALICE, artifact_id) as content:
                    await anext(content.chunks)
            with anyio.CancelScope() as scope:
                async with artifacts.service.content(ALICE, artifact_id) as content:
                    scope.cancel()
                    await anext(content.chunks)
            assert len(os.listdir("/proc/self/fd")) == before

    run(backend, main)


def test_a_reader_goes_on_while_the_artifact_is_deleted_and_swept(
    backend: str, folder: Folder
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            artifact_id = await exported(artifacts, SEVERAL_PIECES)
            got = bytearray()
            async with artifacts.service.content(ALICE, artifact_id) as content:
                await artifacts.service.delete(ALICE, artifact_id)
                assert (await artifacts.sweeper.sweep()).by_request == 1
                async for piece in content.chunks:
                    got += piece
            assert got == SEVERAL_PIECES
            with pytest.raises(ArtifactNotFound):
                await artifacts.service.describe(ALICE, artifact_id)

    run(backend, main)


def test_what_may_be_claimed_and_attached(backend: str, folder: Folder) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            service = artifacts.service
            upload = await exported(artifacts, origin=ArtifactOrigin.UPLOAD, run_id=None)
            export_id = await exported(artifacts)
            with pytest.raises(ArtifactRejected) as caught:
                await service.claim(ALICE, export_id, RUN)
            assert caught.value.code is ArtifactRejectedCode.NOT_CLAIMABLE
            with pytest.raises(ArtifactRejected) as caught:
                await service.attach(ALICE, RUN, [export_id, upload])
            assert caught.value.code is ArtifactRejectedCode.NOT_ATTACHABLE
            ref = await service.claim(ALICE, upload, RUN)
            assert ref == await service.claim(ALICE, upload, RUN)
            with pytest.raises(ArtifactRejected):
                await service.claim(ALICE, upload, RunId("another"))
            await service.attach(ALICE, RUN, [export_id])
            folder.clock.time += 400 * DAY
            assert await fetched(artifacts, ALICE, upload) == b"data"
            assert await fetched(artifacts, ALICE, export_id) == b"data"

    run(backend, main)


# --- the one caller of `open` -------------------------------------------------------------------

WORKERS = ("sbxd.artifacts", "sbxd.tools", "sbxd.client", "sbxd.worker_cli", "sbxd.fake")
SERVICE = "sbxd.artifacts.service"


def opens(module: Module) -> list[int]:
    """Lines that call or hand on a method `open`, of whatever object, but of the module os."""
    calls = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr == "open"
    ]
    return [
        node.lineno
        for node in calls
        if not (isinstance(node.value, ast.Name) and node.value.id == "os")
    ]


def test_the_service_is_the_only_caller_of_open() -> None:
    found = {
        name: opens(module)
        for name, module in load().items()
        if name.startswith(WORKERS) and opens(module)
    }
    assert set(found) == {SERVICE}
    assert len(found[SERVICE]) == 1


@pytest.mark.parametrize("text", ["store.open(ref)", "f(self._store.open)", "x.y().open()"])
def test_control_a_planted_caller_is_found(text: str) -> None:
    module = load()[SERVICE]
    planted = Module("sbxd.tools.x", module.path, ast.parse(text), is_package=False, lines=1)
    assert opens(planted) == [1]
    assert called(ast.parse("os.open(x)").body[0].value, {}) == "os.open"  # type: ignore[attr-defined]
