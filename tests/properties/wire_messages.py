"""A strategy for every message of the protocol, derived from the types themselves.

A message that is added to `sbxd.wire.messages` is covered from its first day.
"""

import re
from datetime import UTC
from functools import cache
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from sbxd.wire import messages as m

CLIENT_MESSAGES: tuple[type[m.Message], ...] = get_args(m.ClientMessage)
SERVER_MESSAGES: tuple[type[m.Message], ...] = get_args(m.ServerMessage)
ALL_MESSAGES: tuple[type[m.Message], ...] = tuple(dict.fromkeys(CLIENT_MESSAGES + SERVER_MESSAGES))

_SMALL = 4


@cache
def messages(kind: type[m.Message]) -> st.SearchStrategy[m.Message]:
    """Messages of one type, with every constraint of its fields kept."""
    return _of(inspect.type_info(kind))


@cache
def any_message() -> st.SearchStrategy[m.Message]:
    return st.one_of([messages(kind) for kind in ALL_MESSAGES])


def _of(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.IntType(ge=low, le=high):
            return st.integers(
                min_value=-(2**63) if low is None else low,
                max_value=2**63 - 1 if high is None else high,
            )
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.StrType(pattern=None, min_length=low, max_length=longest):
            shortest = low or 0
            return st.text(
                st.characters(codec="utf-8"),
                min_size=shortest,
                max_size=max(shortest, min(longest or 20, 20)),
            )
        case inspect.StrType(pattern=pattern, min_length=low, max_length=high):
            assert pattern is not None
            texts = st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True)
            return texts.filter(
                lambda text: (
                    (low or 0) <= len(text) <= (high or 2**31)
                    and "\n" not in text
                    and bool(re.search(pattern, text))
                )
            )
        case inspect.BytesType(max_length=longest):
            return st.binary(max_size=min(longest or 20, 20))
        case inspect.DateTimeType():
            return st.datetimes(timezones=st.just(UTC))
        case inspect.EnumType(cls=enum):
            return st.sampled_from(list(enum))
        case inspect.VarTupleType(item_type=item, min_length=low):
            return st.lists(_of(item), min_size=low or 0, max_size=max(low or 0, _SMALL)).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=_SMALL)
        case inspect.UnionType(types=types):
            return st.one_of([_of(each) for each in types])
        case inspect.StructType(cls=cls, fields=fields):
            parts = {each.name: _of(each.type) for each in fields}
            return (
                st.fixed_dictionaries(parts)
                .map(lambda values: _make(cls, values))
                .filter(lambda made: made is not None)
            )
        case _:
            raise AssertionError(f"no strategy for {info}")


def _make(cls: type[msgspec.Struct], values: dict[str, Any]) -> msgspec.Struct | None:
    try:
        return cls(**values)
    except ValueError:
        return None  # a rule across fields (`EgressPolicy`)
