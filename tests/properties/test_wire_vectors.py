"""The protocol's test vectors: a frame of every message, and frames that end a connection.

After a deliberate change: `python -m tests.properties.test_wire_vectors` writes
`docs/protocol-vectors.json`; review the difference.
"""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from sbxd.wire import messages as m
from sbxd.wire.errors import RemoteProtocolError
from sbxd.wire.framing import FrameDecoder, encode_frame
from tests.properties.wire_messages import ALL_MESSAGES, CLIENT_MESSAGES

VECTORS = Path(__file__).parents[2] / "docs" / "protocol-vectors.json"
MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
# For texts that have a form of their own.
TEXTS = (
    "0123456789abcdef0123456789abcdef",
    "sha256:" + "0123456789abcdef" * 4,
    "0123456789abcdef" * 4,
    "run-1",
    "ok",
    "python",
    "LANG",
    "example.org",
    "/dev/sbx-bridge",
    "sbx-0123456789abcdef0123456789abcdef.scope",
    "token",
    "1",
)
# Where rules across fields leave no choice of a value for each alone.
GIVEN: dict[str, Any] = {"EgressPolicy": {"mode": "deny", "destinations": ()}}
GIVEN_FIELDS: dict[str, dict[str, Any]] = {"EgressChecked": {"addresses": ()}}


def sample(info: inspect.Type) -> Any:
    """One value of a type, the same each time."""
    match info:
        case inspect.IntType(ge=low, le=high):
            return max(low or 0, min(7, high if high is not None else 7))
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return True
        case inspect.NoneType():
            return None
        case inspect.StrType(pattern=pattern, min_length=low, max_length=high):
            fitting = (
                text
                for text in TEXTS
                if (pattern is None or re.search(pattern, text))
                and (low or 0) <= len(text) <= (high or 1000)
            )
            return next(fitting)
        case inspect.BytesType():
            return b"abc"
        case inspect.DateTimeType():
            return MOMENT
        case inspect.EnumType(cls=enum):
            return next(iter(enum))
        case inspect.VarTupleType(item_type=item):
            return (sample(item),)
        case inspect.TupleType(item_types=items):
            return tuple(sample(each) for each in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {sample(key): sample(value)}
        case inspect.UnionType(types=types):
            return sample(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.StructType(cls=cls, fields=fields):
            if cls.__name__ in GIVEN:
                return msgspec.convert(GIVEN[cls.__name__], cls)
            values = {each.name: sample(each.type) for each in fields}
            return cls(**{**values, **GIVEN_FIELDS.get(cls.__name__, {})})
        case _:
            raise AssertionError(f"no sample for {info}")


def framed(body: bytes) -> bytes:
    return encode_frame(body, frame_bytes_max=m.FRAME_BYTES_MAX)


def plain(value: object) -> Any:
    """As JSON; bytes as {"hex": …}."""
    built = msgspec.to_builtins(value, builtin_types=(bytes,))

    def walk(each: Any) -> Any:
        match each:
            case bytes():
                return {"hex": each.hex()}
            case dict():
                return {name: walk(inner) for name, inner in each.items()}
            case list() | tuple():
                return [walk(inner) for inner in each]
            case _:
                return each

    return walk(built)


def accepted() -> list[dict[str, Any]]:
    rows = []
    for kind in ALL_MESSAGES:
        message = sample(inspect.type_info(kind))
        body = msgspec.msgpack.encode(message)
        sender = "client" if kind in CLIENT_MESSAGES else "server"
        rows.append({"from": sender, "message": plain(message), "frame": framed(body).hex()})
    return rows


def refused() -> list[dict[str, str]]:
    """Frames of a client that end the connection with PROTOCOL, and what is wrong with each."""
    ping = {"type": "ping", "token": 7}
    bodies = {
        "an unknown field": {**ping, "extra": 1},
        "a missing field": {"type": "ping"},
        "a wrong type": {"type": "ping", "token": "7"},
        "a value out of bounds": {"type": "cancel", "request_id": 0},
        "no such message": {"type": "pong-pong"},
        "no map": [1, 2],
    }
    rows = [
        {"why": why, "frame": framed(msgspec.msgpack.encode(body)).hex()}
        for why, body in bodies.items()
    ]
    rows.append({"why": "a body that is no msgpack", "frame": framed(b"\xc1").hex()})
    rows.append({"why": "a length of nothing", "frame": "00000000"})
    longer = (m.FRAME_BYTES_MAX + 1).to_bytes(4, "big")
    rows.append({"why": "a length above 1 MiB", "frame": longer.hex()})
    return rows


def rendered() -> str:
    document = {"accepted": accepted(), "refused": refused()}
    return json.dumps(document, indent=1, ensure_ascii=True) + "\n"


def test_the_vectors_are_what_the_code_sends() -> None:
    assert VECTORS.read_text() == rendered(), "review, then see this module's docstring"


@pytest.mark.parametrize("row", accepted(), ids=lambda row: row["message"]["type"])
def test_an_accepted_frame_is_read_back_as_its_message(row: dict[str, Any]) -> None:
    frames = FrameDecoder(frame_bytes_max=m.FRAME_BYTES_MAX)
    frames.feed(bytes.fromhex(row["frame"]))
    body = frames.next_frame()
    assert body is not None
    union = m.ClientMessage if row["from"] == "client" else m.ServerMessage
    assert plain(msgspec.msgpack.decode(body, type=union)) == row["message"]
    assert frames.next_frame() is None


@pytest.mark.parametrize("row", refused(), ids=lambda row: row["why"])
def test_a_refused_frame_is_refused(row: dict[str, str]) -> None:
    frames = FrameDecoder(frame_bytes_max=m.FRAME_BYTES_MAX)

    def receive() -> None:
        frames.feed(bytes.fromhex(row["frame"]))
        msgspec.msgpack.decode(frames.next_frame() or b"", type=m.ClientMessage)

    with pytest.raises((RemoteProtocolError, msgspec.ValidationError, msgspec.DecodeError)):
        receive()


if __name__ == "__main__":
    VECTORS.write_text(rendered())
