"""artifact.export: a file or a text becomes one artifact, however often it is asked for."""

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import jsonschema
import pytest

from sbxd.client.local_workspace import open_local_workspace
from sbxd.client.run_scope import RunScope
from sbxd.fake.environment import FakeExecutionEnvironment, FakeWorkspaceHandle
from sbxd.port.artifact import ArtifactOrigin, ContentDigest, TrustLevel
from sbxd.port.workspace import ContentStream
from sbxd.tools.export import SPEC
from sbxd.tools.run_artifacts import StoreOfRun
from sbxd.tools.tool import ToolName, ToolRefused, ToolUnavailable, ToolValidationError
from sbxd.tools.toolbox import Toolbox
from tests.artifacts.world import Folder, fetched, run
from tests.tools.world import RUN, SCRIPT, SPECIFICATION, TENANT, world

NAME = ToolName.EXPORT
COMMAND = ToolName.RUN_COMMAND
WRITE = ToolName.WRITE_TEXT

REFUSED: list[tuple[dict[str, object], str]] = [
    ({}, "either path"),
    ({"path": "a", "text": "b", "filename": "c"}, "either path"),
    ({"text": "b"}, "name the text"),
    ({"text": "b", "filename": ""}, "empty"),
    ({"text": 5, "filename": "a"}, "string"),
    ({"text": "\ud800", "filename": "a"}, "surrogate"),
    ({"path": "../a"}, "dot components"),
    ({"path": "/etc/passwd"}, "absolute"),
    ({"path": "."}, "name a file"),
    ({"path": ["a"]}, "string"),
    ({"path": "a", "command": ["ls"]}, "no field"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=lambda each: ascii(each)[:40])
def test_wrong_arguments_are_refused_and_nothing_is_stored(
    folder: Folder, arguments: dict[str, object], said: str
) -> None:
    async def main() -> None:
        async with world(folder) as made:
            with pytest.raises(ToolValidationError, match=said):
                await made.tools.call(NAME, arguments)
        assert made.calls == []

    run("trio", main)
    assert folder.objects() == []


def test_a_file_is_exported_once_however_often_it_is_asked_for(
    folder: Folder, backend: str
) -> None:
    async def main() -> None:
        async with world(folder) as made:
            await made.tools.call(COMMAND, {"command": ["odd"]})
            first = await made.tools.call(NAME, {"path": "formula.csv"})
            again = await made.tools.call(NAME, {"path": "formula.csv"})
            named = await made.tools.call(NAME, {"path": "formula.csv", "filename": "other.csv"})
            assert again.value == first.value
            assert named.value["artifact_id"] != first.value["artifact_id"]
            jsonschema.validate(first.value, dict(SPEC.output_schema))
            assert first.value["sha256"] == hashlib.sha256(b"=1+1,2\n").hexdigest()
            assert first.value["media_type"] == "text/csv"
            assert first.value["flags"] == ["FORMULA_LIKE"]
            assert first.trust is TrustLevel.EXTERNAL_UNTRUSTED
            assert "filename" not in first.value
            artifact_id = first.artifacts[0].artifact_id
            assert made.artifacts is not None
            metadata = await made.artifacts.service.describe(TENANT, artifact_id)
            assert metadata.filename == "formula.csv"
            assert (metadata.origin, metadata.run_id) == (ArtifactOrigin.SANDBOX_EXPORT, RUN)
            assert await fetched(made.artifacts, TENANT, artifact_id) == b"=1+1,2\n"

    run(backend, main)
    assert len(folder.objects()) == 2


def test_a_file_that_changed_is_another_artifact(folder: Folder) -> None:
    async def main() -> None:
        async with world(folder) as made:
            await made.tools.call(WRITE, {"path": "a.txt", "text": "one"})
            one = await made.tools.call(NAME, {"path": "a.txt"})
            await made.tools.call(WRITE, {"path": "a.txt", "text": "two"})
            two = await made.tools.call(NAME, {"path": "a.txt"})
            assert one.value["artifact_id"] != two.value["artifact_id"]
            # A file that a tool wrote may have passed through the sandbox all the same.
            assert one.trust is TrustLevel.EXTERNAL_UNTRUSTED

    run("trio", main)


def test_a_text_is_model_output_and_needs_no_sandbox(folder: Folder, backend: str) -> None:
    async def main() -> None:
        async with world(folder) as made:
            arguments = {"text": "# Report\n", "filename": "report.md"}
            first = await made.tools.call(NAME, arguments)
            again = await made.tools.call(NAME, arguments)
            assert again.value == first.value
            assert made.artifacts is not None
            metadata = await made.artifacts.service.describe(TENANT, first.artifacts[0].artifact_id)
            assert metadata.origin is ArtifactOrigin.MODEL_OUTPUT
            assert metadata.media_type == "text/markdown"
        assert made.calls == []

    run(backend, main)


def test_bytes_that_are_not_what_the_service_read_are_not_stored(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def lying(
        self: FakeWorkspaceHandle, path: str, *, maximum_bytes: int
    ) -> AsyncIterator[ContentStream]:
        async with honest(self, path, maximum_bytes=maximum_bytes) as content:
            digest = ContentDigest(sha256="0" * 64, size_bytes=5)
            monkeypatch.setattr(content, "digest", lambda: digest)
            yield content

    async def main() -> None:
        async with world(folder) as made:
            await made.tools.call(WRITE, {"path": "a.txt", "text": "12345"})
            monkeypatch.setattr(FakeWorkspaceHandle, "read_stream", lying)
            with pytest.raises(ToolUnavailable, match="nothing was stored"):
                await made.tools.call(NAME, {"path": "a.txt"})
            assert folder.objects() == []
            monkeypatch.setattr(FakeWorkspaceHandle, "read_stream", honest)
            await made.tools.call(NAME, {"path": "a.txt"})
        assert len(folder.objects()) == 1

    honest = FakeWorkspaceHandle.read_stream
    run("trio", main)


def test_what_is_not_there_is_refused_and_says_why_it_may_be_gone(folder: Folder) -> None:
    async def main() -> None:
        async with world(folder) as made:
            with pytest.raises(ToolRefused, match="discarded when the run pauses"):
                await made.tools.call(NAME, {"path": "a.csv"})
            assert made.calls == []
            await made.tools.call(WRITE, {"path": "d/a.csv", "text": ""})
            with pytest.raises(ToolRefused, match="IS_A_DIRECTORY"):
                await made.tools.call(NAME, {"path": "d"})

    run("trio", main)


@pytest.mark.case("EXP-01", "EXP-02", "EXP-03")
def test_what_is_no_plain_file_of_the_workspace_is_not_exported(
    folder: Folder, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "canary").write_text("canary")
    (root / "good.txt").write_text("good")
    (root / "link").symlink_to(tmp_path / "canary")
    (root / "inner").symlink_to("good.txt")
    (root / "up").symlink_to("..")
    os.mkfifo(root / "fifo")
    os.link(tmp_path / "canary", root / "hard")

    async def main() -> None:
        environment = FakeExecutionEnvironment(SCRIPT)
        async with (
            folder.opened() as artifacts,
            open_local_workspace(root) as workspace,
            RunScope(environment, SPECIFICATION, lambda handle: workspace) as scope,
        ):
            tools = Toolbox(scope, StoreOfRun(artifacts, TENANT, RUN))
            await scope.environment()
            for path in ("link", "inner", "up/canary", "fifo", "hard", ".", "up"):
                with pytest.raises((ToolValidationError, ToolRefused)):
                    await tools.call(NAME, {"path": path})
            assert folder.objects() == []
            await tools.call(NAME, {"path": "good.txt"})  # the positive control
        assert len(folder.objects()) == 1

    run("trio", main)


async def test_without_a_store_nothing_is_exported() -> None:
    async with world() as made:
        with pytest.raises(ToolRefused, match="keeps no artifacts"):
            await made.tools.call(NAME, {"text": "a", "filename": "a"})
