"""An event as the fields of one journal entry, and those as the journal's own bytes.

Invariants: pure; a field's name is derived from the type alone, never from a value; a value can
neither start a field nor end one: whatever holds a control character travels in the length-
prefixed form; MESSAGE holds printable characters alone. Source: the native protocol of
systemd-journald.
"""

import hashlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Enum
from functools import cache, lru_cache
from string import Formatter

from msgspec import Struct

from sbxd.audit.events import AuditEvent

IDENTIFIER = b"sbxd"
FIELD_PREFIX = "SBX_"
# Says of each value and list that was cut what it was. Of the header's names, which no event has.
CUT_FIELD = "SBX_AUDIT_CUT"
# A bound for each value; what is above it is cut, and the cut is marked and described.
VALUE_BYTES_MAX = 16 * 1024
MESSAGE_CHARACTERS_MAX = 1024
VALUES_MAX = 1024
# More names than all events have; there is no end of those that a caller could make up.
NAMES_MAX = 2048
_CUT_MARK = b"[cut]"
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")

Field = tuple[str, bytes]


def encode(event: AuditEvent) -> list[Field]:
    """The fields of an event: MESSAGE, MESSAGE_ID, PRIORITY, SYSLOG_IDENTIFIER, SBX_*.

    Where a value was cut there is a field SBX_AUDIT_CUT that says "NAME bytes LENGTH sha256 DIGEST"
    of the whole value, with the value's place behind NAME in a list ("NAME[3]"); where a list was
    cut, "NAME values NUMBER".
    """
    cuts: list[str] = []
    fields: list[Field] = [("MESSAGE", _message(event, cuts)), *_of_kind(type(event))]
    fields.extend(_flatten(event, FIELD_PREFIX, cuts))
    fields.extend((CUT_FIELD, each.encode("ascii")) for each in cuts)
    return fields


@cache
def _of_kind(kind: type[AuditEvent]) -> tuple[Field, ...]:
    return (
        ("MESSAGE_ID", kind.MESSAGE_ID.encode("ascii")),
        ("PRIORITY", str(int(kind.PRIORITY)).encode("ascii")),
        ("SYSLOG_IDENTIFIER", IDENTIFIER),
        (FIELD_PREFIX + "EVENT", kind.__name__.encode("ascii")),
    )


def summary(event: AuditEvent) -> str:
    """The text of MESSAGE: one line of printable characters, cut and marked at its bound."""
    text = _summary(event)
    if len(text) <= MESSAGE_CHARACTERS_MAX:
        return text
    mark = _CUT_MARK.decode("ascii")
    return text[: MESSAGE_CHARACTERS_MAX - len(mark)] + mark


def _message(event: AuditEvent, cuts: list[str]) -> bytes:
    text = _summary(event)
    if len(text) > MESSAGE_CHARACTERS_MAX:
        cuts.append(_cut("MESSAGE", text.encode()))
    return summary(event).encode()


def _summary(event: AuditEvent) -> str:
    parts = []
    for literal, name in _template(type(event)):
        parts.append(literal)
        if name is not None:
            parts.append(printable(_text(getattr(event, name))))
    return "".join(parts)


@cache
def _template(kind: type[AuditEvent]) -> tuple[tuple[str, str | None], ...]:
    return tuple((literal, name) for literal, name, _, _ in Formatter().parse(kind.SUMMARY))


def printable(text: str) -> str:
    """The text with everything that is not a printable character as a backslash escape."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        character
        if character.isprintable() and character != "\\"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def serialize(fields: list[Field]) -> bytes:
    """The native protocol's bytes of one entry.

    A value goes as `NAME=value` and a newline when it holds no control character, else as the
    name, a newline, its length (8 bytes, little-endian), the value and a newline.

    Raises:
        ValueError: a name that the journal would drop or trust (not A-Z, 0-9 and underscores
            after a letter, at most 64).
    """
    parts: list[bytes] = []
    for name, value in fields:
        raw_name = _raw_name(name)
        if _CONTROL.search(value):
            parts += [raw_name, b"\n", len(value).to_bytes(8, "little"), value, b"\n"]
        else:
            parts += [raw_name, b"=", value, b"\n"]
    return b"".join(parts)


@lru_cache(NAMES_MAX)
def _raw_name(name: str) -> bytes:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a field name")
    return name.encode("ascii")


@cache
def _names(kind: type[Struct], prefix: str) -> tuple[tuple[str, str], ...]:
    """Attributes and the names of their fields."""
    return tuple((attribute, prefix + attribute.upper()) for attribute in kind.__struct_fields__)


def _flatten(struct: Struct, prefix: str, cuts: list[str]) -> Iterator[Field]:
    for attribute, name in _names(type(struct), prefix):
        value = getattr(struct, attribute)
        if isinstance(value, Struct):
            yield from _flatten(value, name + "_", cuts)
        elif isinstance(value, tuple):
            for place, element in enumerate(value[:VALUES_MAX]):
                yield name, _bytes(element, f"{name}[{place}]", cuts)
            if len(value) > VALUES_MAX:
                cuts.append(f"{name} values {len(value)}")
        elif value is not None:
            yield name, _bytes(value, name, cuts)


def _bytes(value: object, name: str, cuts: list[str]) -> bytes:
    raw = _text(value).encode("utf-8", "surrogateescape")
    if len(raw) > VALUE_BYTES_MAX:
        cuts.append(_cut(name, raw))
        return raw[: VALUE_BYTES_MAX - len(_CUT_MARK)] + _CUT_MARK
    return raw


def _cut(name: str, raw: bytes) -> str:
    return f"{name} bytes {len(raw)} sha256 {hashlib.sha256(raw).hexdigest()}"


def _text(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "true" if value else "false"
        case Enum():
            return str(value.value)
        case str():
            return value
        case int():
            return str(value)
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="milliseconds")
        case tuple():
            return ", ".join(_text(element) for element in value) or "-"
    raise TypeError(f"an event may not hold a {type(value).__name__}")
