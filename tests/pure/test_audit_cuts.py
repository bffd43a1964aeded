"""A value or a list that was cut says what it was: of every field of every type of event."""

import hashlib
import types
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec import Struct

from sbxctl.audit_record import audit_records
from sbxctl.journal import JournalRecord
from sbxd.audit.encode import (
    CUT_FIELD,
    FIELD_PREFIX,
    MESSAGE_CHARACTERS_MAX,
    VALUE_BYTES_MAX,
    VALUES_MAX,
    encode,
)
from sbxd.audit.events import AuditEvent, StartupRefused
from sbxd.audit.vocabulary import EVENT_TYPES

LONG = "é" * VALUE_BYTES_MAX
DIGEST = hashlib.sha256(LONG.encode()).hexdigest()
WHOLE = f"bytes {2 * VALUE_BYTES_MAX} sha256 {DIGEST}"


def plain(hint: Any) -> Any:
    """The type behind aliases, bounds and an absence."""
    if hasattr(hint, "__supertype__"):
        return plain(hint.__supertype__)
    if hasattr(hint, "__metadata__"):
        return plain(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return plain(next(each for each in get_args(hint) if each is not types.NoneType))
    return hint


def value(hint: Any) -> Any:
    kind = plain(hint)
    if get_origin(kind) is tuple:
        return ()
    if issubclass(kind, Struct):
        return kind(**{name: value(each) for name, each in get_type_hints(kind).items()
                       if name in kind.__struct_fields__})  # fmt: skip
    if issubclass(kind, Enum):
        return next(iter(kind))
    return datetime(2030, 1, 1, tzinfo=UTC) if kind is datetime else kind("1")


def texts(kind: type[AuditEvent]) -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(kind).items():
        if name in kind.__struct_fields__:
            inner = plain(hint)
            if inner is str or (get_origin(inner) is tuple and plain(get_args(inner)[0]) is str):
                yield name, inner


FIELDS = [(kind, name, inner) for kind in EVENT_TYPES for name, inner in texts(kind)]


@pytest.mark.case("AUD-08")
@pytest.mark.parametrize(
    ("kind", "name", "inner"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name, _ in FIELDS]
)
def test_a_cut_field_says_its_length_and_digest(
    kind: type[AuditEvent], name: str, inner: Any
) -> None:
    event = value(kind)
    assert CUT_FIELD not in dict(encode(event))
    is_list = inner is not str
    cut = msgspec.structs.replace(event, **{name: ("x", LONG) if is_list else LONG})
    fields = encode(cut)
    journal_name = FIELD_PREFIX + name.upper()
    values = [raw for found, raw in fields if found == journal_name]
    assert len(values[-1]) == VALUE_BYTES_MAX
    said = [raw.decode() for found, raw in fields if found == CUT_FIELD]
    assert f"{journal_name}{'[1]' if is_list else ''} {WHOLE}" in said
    assert all(each.startswith((journal_name, "MESSAGE ")) for each in said)


@pytest.mark.case("AUD-08")
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, name, inner in FIELDS if inner is not str],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_cut_list_says_how_many_there_were(kind: type[AuditEvent], name: str) -> None:
    event = value(kind)
    for count in (VALUES_MAX, VALUES_MAX + 1, 5000):
        fields = encode(msgspec.structs.replace(event, **{name: ("x",) * count}))
        journal_name = FIELD_PREFIX + name.upper()
        assert sum(found == journal_name for found, _ in fields) == min(count, VALUES_MAX)
        said = [raw.decode() for found, raw in fields if found == CUT_FIELD]
        assert (f"{journal_name} values {count}" in said) is (count > VALUES_MAX)


def test_a_cut_message_says_so() -> None:
    event = StartupRefused(settings=("a" * 2000,))
    fields = dict(encode(event))
    assert len(fields["MESSAGE"]) == MESSAGE_CHARACTERS_MAX
    assert fields["MESSAGE"].endswith(b"[cut]")
    whole = b"Startup refused: " + b"a" * 2000
    digest = hashlib.sha256(whole).hexdigest()
    assert fields[CUT_FIELD].decode() == f"MESSAGE bytes {len(whole)} sha256 {digest}"


def test_no_value_can_pretend_to_have_been_cut() -> None:
    event = StartupRefused(settings=(f"x[cut]\n{CUT_FIELD}=SBX_SETTINGS values 9",))
    assert CUT_FIELD not in dict(encode(event))


def test_the_document_of_a_record_has_what_was_cut() -> None:
    of_event: JournalRecord = {"SBX_EVENT": "StartupRefused", "SBX_SETTINGS": "x"}
    (whole,) = audit_records([of_event])
    (once,) = audit_records([{**of_event, CUT_FIELD: "MESSAGE bytes 9 sha256 0"}])
    (twice,) = audit_records([{**of_event, CUT_FIELD: ["a", "b"]}])
    assert (whole.cut, once.cut, twice.cut) == ([], ["MESSAGE bytes 9 sha256 0"], ["a", "b"])
    assert "audit_cut" not in once.fields
