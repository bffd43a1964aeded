"""What a caller built is judged as the wire would: before a byte of it is sent.

A daemon ends the whole connection for a value that no message may carry, so the one request is
refused here, with the field that is wrong. Pure.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.wire import messages as m
from sbxd.wire.errors import printable

# What msgspec raises for a value that it cannot write or that breaks a rule of its field.
UNSENDABLE = (
    msgspec.MsgspecError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
)


def check_request(request: m.Request) -> None:
    """Raises: ExecutionRejected(PROTOCOL) for a value that the wire refuses; `field` names it, as
    `specification.limits.memory_bytes`."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))
    except UNSENDABLE as error:
        field = _field_said(error) or _unsendable(request)
        detail = printable(str(error)) or type(error).__name__
        raise ExecutionRejected(
            RejectedCode.PROTOCOL, f"{field}: {detail}" if field else detail, field=field or None
        ) from None


def _field_said(error: Exception) -> str:
    """The field of a ValidationError, which ends with "at `$.a.b[...]`"."""
    if not isinstance(error, msgspec.ValidationError):
        return ""
    _, _, path = str(error).rpartition("`$.")
    return path.rstrip("`") if path != str(error) else ""


def _unsendable(value: Any) -> str:
    """The first field within a value that cannot be written, found by writing each alone."""
    inner: list[tuple[str, Any]] = []
    if isinstance(value, msgspec.Struct):
        inner = [(name, getattr(value, name)) for name in value.__struct_fields__]
    elif isinstance(value, Mapping):
        inner = [("[...]", each) for each in value.values()]
    elif isinstance(value, list | tuple):
        inner = [("[...]", each) for each in value]
    for name, each in inner:
        try:
            msgspec.msgpack.encode(each)
        except UNSENDABLE:
            below = _unsendable(each)
            dot = "." if below and not below.startswith("[") else ""
            return f"{name}{dot}{below}"
    return ""
