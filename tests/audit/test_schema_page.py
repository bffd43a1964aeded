"""The schema in docs/audit.md is what the types of events say.

To write it anew: python -m tests.audit.test_schema_page
"""

import re
import types
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from msgspec import Meta, Struct

from sbxd.audit.bounds import BOUNDS
from sbxd.audit.encode import CUT_FIELD, FIELD_PREFIX
from sbxd.audit.events import AuditEvent
from sbxd.audit.header import PREFIX, SCHEMA_VERSION, Header
from sbxd.audit.vocabulary import EVENT_TYPES

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "audit.md"
CATALOG = REPOSITORY / "packaging" / "sbxd.catalog"
BEGIN, END = "<!-- schema: generated -->\n", "<!-- schema: end -->\n"


def subjects() -> dict[str, str]:
    """The catalog's subject of each MESSAGE_ID."""
    return dict(re.findall(r"^-- ([0-9a-f]{32})\nSubject: (.+)$", CATALOG.read_text("utf-8"), re.M))


def word(kind: Any) -> str:
    """A type as the schema names it."""
    if hasattr(kind, "__supertype__"):
        return word(kind.__supertype__)
    if hasattr(kind, "__metadata__") or get_origin(kind) is Meta:
        return word(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (each for each in get_args(kind) if each is not types.NoneType)
        return f"{word(inner)}; may be absent"
    if get_origin(kind) is tuple:
        return f"any number of: {word(get_args(kind)[0])}"
    if kind is bool:
        return "`true` or `false`"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(f"`{each.value}`" for each in kind)
    return {int: "integer", str: "text", datetime: "time, ISO 8601, UTC"}[kind]


def fields(kind: type[Struct], prefix: str = FIELD_PREFIX) -> Iterator[tuple[str, str]]:
    """Name and type of each journal field of a struct, in the order in which they are written."""
    hints = get_type_hints(kind)
    for name in kind.__struct_fields__:
        journal_name, hint = prefix + name.upper(), hints[name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            yield from fields(hint, journal_name + "_")
        else:
            yield journal_name, word(hint)


def table(rows: Iterator[tuple[str, str]]) -> str:
    lines = "".join(f"| `{name}` | {what} |\n" for name, what in rows)
    return "| field | value |\n|---|---|\n" + lines


def section(kind: type[AuditEvent], subject: str) -> str:
    says = " ".join((kind.__doc__ or "").split()) if kind.__dict__.get("__doc__") else ""
    return (
        f"### {kind.__name__}\n\n"
        f"`MESSAGE_ID={kind.MESSAGE_ID}`, {kind.PRIORITY.name.lower()}. {subject}."
        f"{' ' + says if says else ''}\n\n" + table(fields(kind))
    )


def schema() -> str:
    """The generated part of the page."""
    about = subjects()
    rows = "".join(
        f"| [`{kind.__name__}`](#{kind.__name__.lower()}) | {kind.PRIORITY.name.lower()} "
        f"| {about[kind.MESSAGE_ID]} | `{BOUNDS[kind]}` |\n"
        for kind in EVENT_TYPES
    )
    return (
        f"Schema version {SCHEMA_VERSION}. Every record has these fields besides those of its "
        "event:\n\n"
        + table(iter([*fields(Header, PREFIX), (CUT_FIELD, "any number of: text; may be absent")]))
        + "\n| event | priority | what | bound |\n|---|---|---|---|\n"
        + rows
        + "\n"
        + "\n".join(section(kind, about[kind.MESSAGE_ID]) for kind in EVENT_TYPES)
    )


def generated(page: str) -> str:
    """The part of the page between the marks."""
    return page.partition(BEGIN)[2].partition(END)[0]


def test_the_schema_is_what_the_types_say() -> None:
    assert generated(PAGE.read_text("utf-8")) == schema(), __doc__


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_no_field_of_an_event_takes_the_name_of_the_header(kind: type[AuditEvent]) -> None:
    assert not [name for name, _ in fields(kind) if name.startswith(PREFIX)]
    assert len({name for name, _ in fields(kind)}) == len(list(fields(kind)))


if __name__ == "__main__":
    before = PAGE.read_text("utf-8")
    head, _, rest = before.partition(BEGIN)
    PAGE.write_text(head + BEGIN + schema() + END + rest.partition(END)[2], "utf-8")
