"""A client refuses, with the field, whatever the wire would refuse."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from sbxd.client.checking import check_request
from sbxd.policy.command import validate_command
from sbxd.port.command import ExecutionCommand
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.wire import messages as m
from sbxd.wire.legality import ADMIN_REQUESTS, WORKER_REQUESTS
from tests.properties.test_wire_vectors import sample

REQUESTS = sorted(WORKER_REQUESTS | ADMIN_REQUESTS, key=lambda kind: kind.__name__)
NO_VALUES = (2**64, -(2**70), object(), 1.5, "\ud800", {"a": object()}, [2**64], lambda: None)
COMMAND = ExecutionCommand(
    argv=("true",), working_directory=".", timeout_seconds=1, stdin=None, maximum_output_bytes=1
)


def leaves(value: msgspec.Struct, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field, by the names that lead to it."""
    for name in value.__struct_fields__:
        inner = getattr(value, name)
        yield (*path, name)
        if isinstance(inner, msgspec.Struct):
            yield from leaves(inner, (*path, name))


def with_value(value: msgspec.Struct, path: tuple[str, ...], new: object) -> msgspec.Struct:
    name, *rest = path
    inner = with_value(getattr(value, name), tuple(rest), new) if rest else new
    made = copy(value)  # without its rules across fields, which are another refusal
    msgspec.structs.force_setattr(made, name, inner)
    return made


@pytest.mark.case("PEER-13")
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_field_of_every_request_is_refused_by_name(kind: type[m.Request]) -> None:
    request: Any = sample(inspect.type_info(kind))
    check_request(request)  # the positive control
    for path in leaves(request):
        for value in NO_VALUES:
            changed: Any = with_value(request, path, value)
            with pytest.raises(ExecutionRejected) as refused:
                check_request(changed)
            assert refused.value.code is RejectedCode.PROTOCOL
            assert (refused.value.field or "").startswith(".".join(path)), (path, value)


@pytest.mark.case("PEER-13")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("argv", 1),
        ("argv", "true"),
        ("argv", None),
        ("argv", object()),
        ("stdin", "text"),
        ("stdin", 7),
        ("working_directory", 7),
        ("timeout_seconds", 2**64),
        ("timeout_seconds", "1"),
        ("timeout_seconds", 1.5),
        ("maximum_output_bytes", 2**64),
        ("maximum_output_bytes", object()),
        ("network_enabled", "yes"),
        ("network_enabled", 1),
    ],
    ids=lambda value: type(value).__name__ if type(value) is object else repr(value),
)
def test_a_command_with_a_value_of_another_kind_is_refused_by_name(
    field: str, value: object
) -> None:
    validate_command(COMMAND)
    with pytest.raises(ExecutionRejected) as refused:
        validate_command(msgspec.structs.replace(COMMAND, **{field: value}))
    assert (refused.value.code, refused.value.field) == (RejectedCode.INVALID_COMMAND, field)
