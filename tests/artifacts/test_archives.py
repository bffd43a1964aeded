"""What the store does with archives: an export is one only where the operator lists its type."""

import gzip

import pytest
from msgspec.structs import replace

from sbxd.artifacts.opening import ArtifactSettings, open_artifacts
from sbxd.port.artifact import (
    ArtifactOrigin,
    ArtifactRejected,
    ArtifactRejectedCode,
    ContentFlag,
)
from tests.artifacts.world import ALICE, Folder, fetched, run, write

GZIP = gzip.compress(b"data")
EXPORTS = (ArtifactOrigin.SANDBOX_EXPORT, ArtifactOrigin.MODEL_OUTPUT)


@pytest.mark.case("EXP-13")
@pytest.mark.parametrize("origin", EXPORTS)
def test_an_export_that_is_an_archive_is_refused_and_nothing_is_stored(
    backend: str, folder: Folder, origin: ArtifactOrigin
) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            for media_type in ("text/csv", "application/octet-stream", "application/gzip"):
                with pytest.raises(ArtifactRejected) as caught:
                    await write(artifacts, GZIP, media_type=media_type, origin=origin)
                assert caught.value.code is ArtifactRejectedCode.ARCHIVE
                assert "GZIP" in str(caught.value)
                assert "artifacts.archives" in str(caught.value)
            assert (folder.objects(), folder.partials()) == ([], [])
            await write(artifacts, b"data", media_type="text/csv", origin=origin)
            assert len(folder.objects()) == 1, "the control"

    run(backend, main)


@pytest.mark.case("EXP-13")
def test_what_is_listed_is_stored_as_it_is_and_says_what_it_is(
    backend: str, folder: Folder
) -> None:
    async def main() -> None:
        settings = replace(folder.settings(), archives=("application/gzip",))
        async with open_artifacts(settings) as artifacts:
            ref = await write(artifacts, GZIP, media_type="application/gzip")
            found = await artifacts.service.describe(ALICE, ref.artifact_id)
            assert found.flags == {ContentFlag.ARCHIVE_GZIP}
            assert await fetched(artifacts, ALICE, ref.artifact_id) == GZIP, "never unpacked"
            with pytest.raises(ArtifactRejected):
                await write(artifacts, GZIP, media_type="application/zip")

    run(backend, main)


def test_what_is_no_export_is_stored_and_says_what_it_is(backend: str, folder: Folder) -> None:
    async def main() -> None:
        async with folder.opened() as artifacts:
            for origin in set(ArtifactOrigin) - set(EXPORTS):
                ref = await write(artifacts, GZIP, media_type="image/png", origin=origin)
                found = await artifacts.service.describe(ALICE, ref.artifact_id)
                assert found.flags == {ContentFlag.ARCHIVE_GZIP}

    run(backend, main)


@pytest.mark.parametrize("listed", ["zip", "Application/zip", "application/zip; charset=x", ""])
def test_what_is_listed_is_a_media_type(listed: str) -> None:
    with pytest.raises(ValueError, match="as application/zip"):
        ArtifactSettings(directory="/x", archives=(listed,))
