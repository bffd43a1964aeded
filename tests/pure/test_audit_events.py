"""The audit's vocabulary: stable ids, a catalog entry each, and values that cannot forge fields."""

import re
import struct
from datetime import UTC, datetime
from pathlib import Path
from string import Formatter
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.audit import events
from sbxd.audit.argv import describe_argv
from sbxd.audit.encode import VALUE_BYTES_MAX, Field, encode, printable, serialize, summary
from sbxd.audit.events import AuditEvent, EnvironmentEvent, RequestEvent
from sbxd.audit.vocabulary import EVENT_TYPES
from sbxd.policy.timeouts import TimeoutBound
from sbxd.policy.violations import ViolationCode
from sbxd.port.command import Evidence, KillReason, Usage
from sbxd.port.errors import RejectedCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId

CATALOG = Path(__file__).parents[2] / "packaging" / "sbxd.catalog"
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "audit.md"
ENVIRONMENT: dict[str, Any] = {
    "environment_id": EnvironmentId("a" * 32),
    "tenant_id": TenantId("tenant"),
    "run_id": RunId("run"),
    "lease_epoch": 3,
}


def parse(raw: bytes) -> list[tuple[bytes, bytes]]:
    """The journal's own reading of the native protocol, written apart from the encoder."""
    fields = []
    while raw:
        line, _, rest = raw.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if equals:
            fields.append((name, value))
            raw = rest
        else:
            (size,) = struct.unpack("<Q", rest[:8])
            fields.append((line, rest[8 : 8 + size]))
            assert rest[8 + size : 9 + size] == b"\n"
            raw = rest[9 + size :]
    return fields


def command_started(program: str) -> events.CommandStarted:
    return events.CommandStarted(
        **ENVIRONMENT,
        command_number=1,
        program=program,
        program_bytes=len(program),
        argv_count=1,
        argv_sha256="0" * 64,
        stdin_bytes=0,
        network_enabled=False,
        effective_timeout_ms=30_000,
        timeout_bound=TimeoutBound.COMMAND,
    )


def command_finished() -> events.CommandFinished:
    return events.CommandFinished(
        **ENVIRONMENT,
        command_number=2,
        exit_code=None,
        signal=None,
        killed_by=KillReason.MEMORY,
        duration_ms=1840,
        stdout_bytes=3,
        stdout_sha256="1" * 64,
        stdout_truncated=False,
        stderr_bytes=0,
        stderr_sha256="2" * 64,
        stderr_truncated=True,
        files_changed=1,
        files_changed_truncated=False,
        evidence=Evidence(oom_kill=2),
        usage=Usage(cpu_ms=7),
        unenforced_limits=("cpu", "volume"),
    )


def every_subclass(base: type[AuditEvent]) -> set[type[AuditEvent]]:
    return {base}.union(*(every_subclass(each) for each in base.__subclasses__()))


def test_every_event_is_listed_and_has_an_id_of_its_own() -> None:
    assert set(EVENT_TYPES) == every_subclass(AuditEvent) - {
        AuditEvent,
        EnvironmentEvent,
        RequestEvent,
    }
    ids = [kind.MESSAGE_ID for kind in EVENT_TYPES]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}", each) for each in ids)


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_every_event_is_frozen_documented_and_past_tense(kind: type[AuditEvent]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.forbid_unknown_fields
    last_word = re.findall(r"[A-Z][a-z]+", kind.__name__)[-1]
    assert last_word.endswith("ed") or last_word in ("Lost",)


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_every_summary_names_fields_of_its_event(kind: type[AuditEvent]) -> None:
    names = {name for _, name, _, _ in Formatter().parse(kind.SUMMARY) if name is not None}
    assert kind.SUMMARY
    assert names <= set(kind.__struct_fields__)


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_no_event_has_a_field_for_output_values_or_arguments(kind: type[AuditEvent]) -> None:
    hints = get_type_hints(kind)
    for name in kind.__struct_fields__:
        assert hints[name] is not bytes
        assert name not in {"argv", "stdout", "stderr", "stdin", "environment", "token"}


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_every_event_has_a_catalog_entry_whose_fields_exist(kind: type[AuditEvent]) -> None:
    entries = dict(
        re.findall(r"^-- ([0-9a-f]{32})\n(.*?)(?=^-- |\Z)", CATALOG.read_text(), re.M | re.S)
    )
    entry = entries[kind.MESSAGE_ID]
    assert re.match(r"Subject: .+\nDefined-By: sbxd\n", entry)
    prefixes = tuple(f"SBX_{name.upper()}" for name in kind.__struct_fields__)
    for used in re.findall(r"@([A-Z_0-9]+)@", entry):
        assert used.startswith(prefixes), f"{kind.__name__} has no field {used}"


def test_the_catalog_has_no_entry_without_an_event() -> None:
    ids = re.findall(r"^-- ([0-9a-f]+)$", CATALOG.read_text(), re.M)
    assert sorted(ids) == sorted(kind.MESSAGE_ID for kind in EVENT_TYPES)


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_every_event_is_documented_with_its_priority(kind: type[AuditEvent]) -> None:
    (row,) = (
        line
        for line in DOCUMENTATION.read_text("utf-8").splitlines()
        if line.startswith("|") and f"`{kind.__name__}`" in line
    )
    assert row.split("|")[2].strip() == kind.PRIORITY.name.lower()


def test_an_event_becomes_its_fields() -> None:
    fields = encode(command_finished())
    named = dict(fields)
    assert named["MESSAGE"] == (
        f"Command 2 of environment {'a' * 32} finished: "
        "exit_code -, killed_by MEMORY, 1840 ms".encode()
    )
    assert named["MESSAGE_ID"] == b"390600c00ff94365a8c5d750c797688e"
    assert named["PRIORITY"] == b"6"
    assert named["SYSLOG_IDENTIFIER"] == b"sbxd"
    assert named["SBX_EVENT"] == b"CommandFinished"
    assert named["SBX_KILLED_BY"] == b"MEMORY"
    assert named["SBX_STDERR_TRUNCATED"] == b"true"
    assert named["SBX_EVIDENCE_OOM_KILL"] == b"2"
    assert named["SBX_USAGE_CPU_MS"] == b"7"
    assert "SBX_EXIT_CODE" not in named
    assert "SBX_USAGE_PIDS_PEAK" not in named
    assert [value for name, value in fields if name == "SBX_UNENFORCED_LIMITS"] == [
        b"cpu",
        b"volume",
    ]


def test_a_time_is_utc_text() -> None:
    event = events.EnvironmentExpired(
        **ENVIRONMENT, expires_at=datetime(2030, 1, 2, 3, 4, 5, 678_900, tzinfo=UTC)
    )
    assert dict(encode(event))["SBX_EXPIRES_AT"] == b"2030-01-02T03:04:05.678+00:00"


def test_events_survive_their_own_serialization() -> None:
    decoder = msgspec.msgpack.Decoder(events.CommandFinished | events.CommandStarted)
    for event in (command_finished(), command_started("x")):
        assert decoder.decode(msgspec.msgpack.encode(event)) == event


FORGERIES = [
    "x\nSBX_OUTCOME=allow",
    "x\n_UID=0\nPRIORITY=0",
    "\nMESSAGE=forged\n",
    "SBX_EVENT\n\x05\0\0\0\0\0\0\0forge\n",
    "\x1b[2J\x1b]0;owned\x07",
    "<0>kernel: forged",
    "a\0b",
    "a\r\nb",
    "\udcff\udc80",
    "\u2028\u202e\u0085",
]


@pytest.mark.case("AUD-01")
@pytest.mark.parametrize("text", FORGERIES)
def test_a_value_stays_one_field_and_adds_none(text: str) -> None:
    event = command_started(text)
    harmless = encode(command_started("x"))
    parsed = parse(serialize(encode(event)))
    assert [name.decode() for name, _ in parsed] == [name for name, _ in harmless]
    assert dict(parsed)[b"SBX_PROGRAM"] == text.encode("utf-8", "surrogateescape")
    assert b"SBX_OUTCOME" not in dict(parsed)


@pytest.mark.case("AUD-02")
@pytest.mark.parametrize("text", FORGERIES)
def test_the_message_is_one_line_of_printable_characters(text: str) -> None:
    message = summary(command_started(text))
    assert message.isprintable()
    assert "\x1b" not in message
    assert "\n" not in message


def test_printable_text_is_reversible() -> None:
    for text in (*FORGERIES[:-2], "\\n", "é", "plain"):
        assert (
            printable(text).encode("latin-1", "backslashreplace").decode("unicode_escape") == text
        )


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_text_round_trips_through_the_native_protocol(field: str, detail: str) -> None:
    event = events.RequestRejected(
        verb="provision",
        code=RejectedCode.LIMIT_ABOVE_CEILING,
        violation=ViolationCode.LIMIT_DENIED,
        detail=detail.encode("utf-8", "ignore").decode(),
        field=field.encode("utf-8", "ignore").decode(),
        peer_uid=1000,
    )
    fields = encode(event)
    assert parse(serialize(fields)) == [(name.encode(), value) for name, value in fields]
    assert summary(event).isprintable()


def test_a_very_long_value_is_cut_and_marked() -> None:
    value = dict(encode(command_started("x" * (2 * VALUE_BYTES_MAX))))["SBX_PROGRAM"]
    assert len(value) == VALUE_BYTES_MAX
    assert value.endswith(b"[cut]")


def test_a_field_name_that_the_journal_would_trust_or_drop_is_an_error() -> None:
    for name in ("_UID", "sbx_x", "SBX-X", "SBX X", "", "1A", "SBX_\nX", "Ä", "A" * 65):
        with pytest.raises(ValueError, match="not a field name"):
            serialize([(name, b"x")])
    fields: list[Field] = [("SBX_2", b"x")]
    assert serialize(fields) == b"SBX_2=x\n"


def test_an_argument_vector_is_reduced_to_its_program_and_a_digest() -> None:
    planted = "sk-planted-secret"
    description = describe_argv((b"curl", b"-H", planted.encode()))
    assert (description.program, description.argv_count) == ("curl", 3)
    event = command_started(description.program)
    assert planted.encode() not in serialize(encode(event))
    assert description.argv_sha256 == describe_argv([b"curl", b"-H", planted.encode()]).argv_sha256


def test_the_digest_tells_vectors_apart_that_join_to_the_same_bytes() -> None:
    vectors = [(b"a", b"bc"), (b"ab", b"c"), (b"abc",), (b"a", b"b", b"c"), (b"abc", b"")]
    assert len({describe_argv(vector).argv_sha256 for vector in vectors}) == len(vectors)


def test_a_program_is_bounded_and_escaped() -> None:
    described = describe_argv((b"\xff" + b"x" * 1000,))
    assert described.program == "\\xff" + "x" * 255
    assert described.program_bytes == 1001, "a cut is seen by the full length"
    assert describe_argv((b"true",)).program_bytes == 4
