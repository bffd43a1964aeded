"""workspace.*: text in and out, labelled by who wrote it."""

import jsonschema
import pytest
import trio
from trio.testing import MockClock

from sbxd.fake.environment import FakeExecutionEnvironment, FakeWorkspaceHandle
from sbxd.port.artifact import TrustLevel
from sbxd.tools.tool import ToolName, ToolRefused, ToolUnavailable, ToolValidationError
from sbxd.tools.toolbox import SPECS
from sbxd.tools.workspace_tools import TEXT_BYTES_MAX
from tests.tools.world import world

READ, WRITE, LIST = ToolName.READ_TEXT, ToolName.WRITE_TEXT, ToolName.LIST
COMMAND = ToolName.RUN_COMMAND


async def test_what_a_tool_wrote_is_its_own_memory_and_what_a_command_changed_is_not() -> None:
    async with world() as made:
        await made.tools.call(WRITE, {"path": "note.txt", "text": "é"})
        own = await made.tools.call(READ, {"path": "note.txt"})
        assert own.value == {"text": "é", "size_bytes": 2}
        assert own.trust is TrustLevel.INTERNAL_TOOL
        await made.tools.call(COMMAND, {"command": ["rewrite"]})
        changed = await made.tools.call(READ, {"path": "note.txt"})
        assert changed.value["text"] == "by the sandbox"
        assert changed.trust is TrustLevel.EXTERNAL_UNTRUSTED


async def test_reading_and_listing_make_no_sandbox_and_writing_does() -> None:
    async with world() as made:
        assert (await made.tools.call(LIST, {})).value == {"entries": [], "truncated": False}
        with pytest.raises(ToolRefused, match="no such file"):
            await made.tools.call(READ, {"path": "a"})
        with pytest.raises(ToolRefused):
            await made.tools.call(LIST, {"path": "d"})
        assert made.calls == []
        await made.tools.call(WRITE, {"path": "a", "text": ""})
        assert made.calls == ["provision"]


async def test_results_have_the_fields_of_their_schemas() -> None:
    async with world() as made:
        written = await made.tools.call(WRITE, {"path": "d/a.txt", "text": "x"})
        read = await made.tools.call(READ, {"path": "d/a.txt"})
        await made.tools.call(COMMAND, {"command": ["odd"]})
        listed = await made.tools.call(LIST, {"path": "."})
    for name, result in ((WRITE, written), (READ, read), (LIST, listed)):
        jsonschema.validate(result.value, dict(SPECS[name].output_schema))
    assert {each["path"] for each in listed.value["entries"]} == {"d", "bad-\ufffd", "formula.csv"}
    assert listed.trust is TrustLevel.EXTERNAL_UNTRUSTED


async def test_what_is_no_text_or_too_large_is_refused_by_name() -> None:
    async with world() as made:
        await made.tools.call(COMMAND, {"command": ["binary"]})
        with pytest.raises(ToolRefused, match="no UTF-8 text"):
            await made.tools.call(READ, {"path": "blob"})
        with pytest.raises(ToolValidationError, match="the most is"):
            await made.tools.call(WRITE, {"path": "a", "text": "é" * TEXT_BYTES_MAX})
        workspace = await made.scope.workspace()
        await workspace.write("large", bytes(TEXT_BYTES_MAX + 1))
        with pytest.raises(ToolRefused, match="TOO_LARGE"):
            await made.tools.call(READ, {"path": "large"})


@pytest.mark.parametrize("path", ["", "..", "/a", "a//b", "a\0b", ".", 5, None])
async def test_a_path_outside_is_refused_before_anything_is_made(path: object) -> None:
    async with world() as made:
        for name in (READ, WRITE):
            with pytest.raises(ToolValidationError):
                await made.tools.call(
                    name, {"path": path, "text": "x"} if name is WRITE else {"path": path}
                )
        if path != ".":
            with pytest.raises(ToolValidationError):
                await made.tools.call(LIST, {"path": path})
    assert made.calls == []


async def test_a_call_that_hangs_is_given_up_in_its_time(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*arguments: object) -> None:
        await trio.sleep_forever()

    async with world() as made:
        await made.tools.call(WRITE, {"path": "a", "text": "x"})
        monkeypatch.setattr(FakeWorkspaceHandle, "listdir", hang)
        monkeypatch.setattr(FakeExecutionEnvironment, "execute", hang)
        for name, arguments, seconds in [
            (LIST, {}, 60),
            (COMMAND, {"command": ["true"]}, 420),
        ]:
            begun = trio.current_time()
            with pytest.raises(ToolUnavailable, match="given up"):
                await made.tools.call(name, arguments)
            assert trio.current_time() - begun == pytest.approx(seconds, abs=0.1)
        # The turn is free again.
        assert (await made.tools.call(READ, {"path": "a"})).value["text"] == "x"


async def test_an_unknown_tool_is_named() -> None:
    async with world() as made:
        with pytest.raises(ToolValidationError, match=r"sandbox\.run_command"):
            await made.tools.call("shell", {})
