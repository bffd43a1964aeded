"""sandbox.run_command: what is refused before anything is touched, and what comes back."""

import hashlib

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.port.artifact import TrustLevel
from sbxd.port.limits import MIB
from sbxd.tools.excerpt import MARK_BYTES_MAX, as_text, fits, shorten, split_limit
from sbxd.tools.run_command import OUTPUT_BYTES_MAX, SPEC, command_of
from sbxd.tools.tool import (
    Category,
    Disposition,
    Idempotency,
    Parallelism,
    Profile,
    Risk,
    SideEffect,
    Target,
    ToolDenied,
    ToolName,
    ToolRefused,
    ToolValidationError,
)
from sbxd.tools.toolbox import SPECS
from tests.artifacts.world import Folder, fetched, run
from tests.tools.world import RUN, TENANT, world

NAME = ToolName.RUN_COMMAND

REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({}, "command", "array"),
    ({"command": "python3 a.py"}, "command", '["python3", "script.py"]'),
    ({"command": []}, "command", "array"),
    ({"command": None}, "command", "array"),
    ({"command": {"0": "ls"}}, "command", "array"),
    ({"command": ["ls", 1]}, "command[1]", "string"),
    ({"command": [["ls"]]}, "command[0]", "string"),
    ({"command": ["ls", "a\0b"]}, "command[1]", "NUL"),
    ({"command": ["ls", "\ud800"]}, "command[1]", "bytes"),
    ({"command": ["ls", "x" * 65536]}, "command", "65536"),
    ({"command": [""]}, "command[0]", "empty"),
    ({"command": ["./setup.sh"]}, "command[0]", '["bash", "./setup.sh"]'),
    ({"command": ["a/b"]}, "command[0]", "relative"),
    ({"command": ["ls"], "working_directory": "../x"}, "working_directory", "dot"),
    ({"command": ["ls"], "working_directory": "/etc"}, "working_directory", "absolute"),
    ({"command": ["ls"], "working_directory": 1}, "working_directory", "string"),
    ({"command": ["ls"], "timeout_seconds": 0}, "timeout_seconds", "1 or more"),
    ({"command": ["ls"], "timeout_seconds": -1}, "timeout_seconds", "1 or more"),
    ({"command": ["ls"], "timeout_seconds": True}, "timeout_seconds", "whole"),
    ({"command": ["ls"], "timeout_seconds": "30"}, "timeout_seconds", "whole"),
    ({"command": ["ls"], "timeout_seconds": 1.5}, "timeout_seconds", "whole"),
    ({"command": ["ls"], "network": True}, "network", "no field"),
    ({"command": ["ls"], "export": ["a"]}, "export", "no field"),
]


@pytest.mark.parametrize(("arguments", "field", "said"), REFUSED, ids=lambda each: ascii(each)[:40])
async def test_wrong_arguments_are_refused_by_name_and_nothing_is_asked_of_the_sandbox(
    arguments: dict[str, object], field: str, said: str
) -> None:
    async with world() as made:
        with pytest.raises(ToolValidationError) as caught:
            await made.tools.call(NAME, arguments)
        assert caught.value.field == field
        assert said in caught.value.message
        assert "argv" not in caught.value.message
    assert made.calls == []


def test_the_checks_come_in_their_order() -> None:
    """All are wrong; the first that is repaired makes room for the next to speak."""
    arguments: dict[str, object] = {
        "command": "ls", "working_directory": "..", "timeout_seconds": 0, "more": 1,
    }  # fmt: skip
    order = []
    for name, good in [
        ("command", ["ls", 5]), ("command", ["a/b"]), ("command", ["ls"]),
        ("working_directory", "."), ("timeout_seconds", 1),
    ]:  # fmt: skip
        with pytest.raises(ToolValidationError) as caught:
            command_of(arguments, network_enabled=False)
        order.append(caught.value.field)
        arguments[name] = good
    assert order == ["command", "command[1]", "command[0]", "working_directory", "timeout_seconds"]
    with pytest.raises(ToolValidationError, match="no field"):
        command_of(arguments, network_enabled=False)
    del arguments["more"]
    assert command_of(arguments, network_enabled=False).argv == ("ls",)


@pytest.mark.parametrize(("wish", "sent"), [(3600, 300), (5, 5), (300, 300), (None, 300)])
def test_a_models_timeout_only_lowers(wish: int | None, sent: int) -> None:
    arguments = {"command": ["ls"]} | ({} if wish is None else {"timeout_seconds": wish})
    assert command_of(arguments, network_enabled=False).timeout_seconds == sent


async def test_a_result_has_the_fields_of_its_schema_and_is_untrusted() -> None:
    async with world() as made:
        for command in (["true"], ["false"], ["binary"], ["odd"]):
            result = await made.tools.call(NAME, {"command": command})
            jsonschema.validate(result.value, dict(SPEC.output_schema))
            assert result.trust is TrustLevel.EXTERNAL_UNTRUSTED
        failed = await made.tools.call(NAME, {"command": ["false"]})
        assert (failed.value["exit_code"], failed.value["stderr"]) == (3, "no\n")
        assert failed.value["killed_by"] is None


async def test_a_program_that_is_not_there_is_said_to_the_model() -> None:
    async with world() as made:
        with pytest.raises(ToolRefused, match="no such program"):
            await made.tools.call(NAME, {"command": ["nothing"]})


async def test_a_name_that_is_no_utf8_is_given_exactly() -> None:
    async with world() as made:
        result = await made.tools.call(NAME, {"command": ["odd"]})
    changes = {each["path"]: each for each in result.value["files_changed"]}
    assert changes["bad-\ufffd"]["path_base64"] == "YmFkLf8="
    assert "path_base64" not in changes["formula.csv"]


def test_a_long_output_is_an_excerpt_and_all_of_it_is_an_artifact(
    folder: Folder, backend: str
) -> None:
    async def main() -> None:
        async with world(folder) as made:
            result = await made.tools.call(NAME, {"command": ["long"]})
            sent = made.last_command().command
            full = b"a" * (2 * MIB) + "é".encode() * MIB
            assert sent.maximum_output_bytes == 4 * OUTPUT_BYTES_MAX
            assert result.value["killed_by"] is None
            shown = result.value["stdout"]
            assert len(shown.encode()) <= OUTPUT_BYTES_MAX
            assert shown.startswith("aaa")
            assert shown.endswith("éé")
            assert "\ufffd" not in shown
            ref = result.value["stdout_artifact"]
            assert ref["artifact_id"] in shown
            assert ref["sha256"] == hashlib.sha256(full).hexdigest()
            assert result.value["stdout_truncated"] is True
            assert result.value["stderr_artifact"] is None
            assert made.artifacts is not None
            metadata = await made.artifacts.service.describe(TENANT, ref["artifact_id"])
            assert (metadata.origin, metadata.run_id) == ("TOOL_OUTPUT", RUN)
            assert metadata.trust is TrustLevel.EXTERNAL_UNTRUSTED
            assert await fetched(made.artifacts, TENANT, ref["artifact_id"]) == full

    run(backend, main)


def test_a_call_says_how_much_of_the_output_it_wants(folder: Folder) -> None:
    async def main() -> None:
        async with world(folder) as made:
            arguments = {"command": ["long"], "max_output_bytes": 2048}
            result = await made.tools.call(NAME, arguments)
            assert len(result.value["stdout"].encode()) <= 2048
            assert result.value["stdout_artifact"]["size_bytes"] == 4 * MIB
            for wrong in (1023, OUTPUT_BYTES_MAX + 1, "2048", True):
                with pytest.raises(ToolValidationError) as refused:
                    await made.tools.call(NAME, {**arguments, "max_output_bytes": wrong})
                assert refused.value.field == "max_output_bytes"

    run("trio", main)


def test_an_output_above_four_times_the_limit_ends_the_command_and_is_kept_as_far_as_it_came(
    folder: Folder,
) -> None:
    async def main() -> None:
        async with world(folder) as made:
            result = await made.tools.call(NAME, {"command": ["endless"]})
            assert result.value["killed_by"] == "OUTPUT_LIMIT"
            assert result.value["exit_code"] is None
            assert result.value["stdout_artifact"]["size_bytes"] == 4 * OUTPUT_BYTES_MAX

    run("trio", main)


async def test_without_a_store_the_excerpt_says_that_the_rest_is_lost() -> None:
    async with world() as made:
        result = await made.tools.call(NAME, {"command": ["long"]})
    assert result.value["stdout_artifact"] is None
    assert "no artifact store" in result.value["stdout"]


async def test_the_network_is_the_profiles_or_an_approvals_word_for_one_call() -> None:
    async with world() as made:
        await made.tools.call(NAME, {"command": ["true"]})
        assert made.last_command().command.network_enabled is False
        await made.tools.call(
            NAME, {"command": ["true"]}, approved=frozenset({SideEffect.SANDBOX_NETWORK})
        )
        assert made.last_command().command.network_enabled is True
        await made.tools.call(NAME, {"command": ["true"]})
        assert made.last_command().command.network_enabled is False


async def test_what_the_profile_denies_is_not_called_and_not_offered() -> None:
    nothing = Profile(frozenset())
    async with world(profile=nothing) as made:
        for name in ToolName:
            with pytest.raises(ToolDenied):
                await made.tools.call(name, {})
        assert made.tools.specs == ()
    assert made.calls == []


def test_the_classification_is_data_and_what_is_not_named_is_denied() -> None:
    assert SPEC.category is Category.CODE_EXECUTION
    assert SPEC.risk is Risk.HIGH
    assert SPEC.idempotency is Idempotency.NON_IDEMPOTENT
    assert SPEC.output_trust is TrustLevel.EXTERNAL_UNTRUSTED
    assert (SPEC.scope, SPEC.timeout_seconds) == ("sandbox.execute", 300)
    assert (SPEC.output_bytes_max, SPEC.parallelism) == (1048576, Parallelism.FORBIDDEN)
    effects = SPEC.side_effects(Profile())
    assert effects[SideEffect.SANDBOX_NETWORK] is Disposition.DENY
    assert effects[SideEffect.PACKAGE_INSTALL] is Disposition.DENY
    assert effects[SideEffect.CODE_EXECUTION] is Disposition.ALLOW
    assert {Profile(frozenset()).decide(each) for each in SideEffect} == {Disposition.DENY}
    targets = {spec.name: spec.target for spec in SPECS.values()}
    assert [name for name in targets if targets[name] is Target.SANDBOX] == [NAME]
    assert SPECS[ToolName.EXPORT].idempotency is Idempotency.IDEMPOTENT


def test_the_description_tells_what_a_model_cannot_infer() -> None:
    said = SPEC.description
    assert "no network unless" in said
    assert "simply fails" in said
    assert "discarded when the run finishes or pauses" in said
    assert "artifact.export" in said
    assert "the full output becomes an artifact" in said
    assert "export" not in str(SPEC.input_schema)


def test_every_schema_is_one_and_takes_what_its_tool_takes() -> None:
    for spec in SPECS.values():
        jsonschema.Draft202012Validator.check_schema(dict(spec.input_schema))
        jsonschema.Draft202012Validator.check_schema(dict(spec.output_schema))
    schema = dict(SPEC.input_schema)
    jsonschema.validate(
        {"command": ["python", "script.py"], "working_directory": ".", "timeout_seconds": 30},
        schema,
    )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"command": "ls"}, schema)


@given(st.binary(max_size=5000), st.integers(2 * MARK_BYTES_MAX, 3000))
def test_an_excerpt_fits_its_limit_and_is_the_head_and_tail_of_the_text(
    data: bytes, limit: int
) -> None:
    text = as_text(data)
    shown = shorten(text, limit, where="elsewhere")
    assert len(shown.encode()) <= limit
    if fits(text, limit):
        assert shown == text
    else:
        head, mark, tail = shown.partition("\n[... ")[0], "left out", shown.rpartition(" ...]\n")[2]
        assert text.startswith(head)
        assert text.endswith(tail)
        assert mark in shown
        assert len(head.encode()) > limit // 2 - MARK_BYTES_MAX


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_two_streams_share_one_limit_and_neither_is_cut_for_the_others_empty_room(
    out: int, err: int
) -> None:
    for_out, for_err = split_limit(out, err, 1000)
    assert for_out + for_err <= 1000
    if out + err <= 1000:
        assert out <= for_out
        assert err <= for_err
    else:
        assert min(out, for_out) + min(err, for_err) == 1000
