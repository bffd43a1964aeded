"""The protocol's document is what the code does: every message, bound, table and example frame.

After a deliberate change: `python -m tests.properties.test_wire_document` writes
`docs/protocol.json`; review the difference, and change `docs/protocol.md` by hand.
"""

import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from sbxd.wire import bridge, connection, legality
from sbxd.wire import messages as m
from sbxd.wire.framing import encode_frame
from sbxd.wire.legality import ConnectionState, RequestState, Role, Sender
from tests.properties.wire_messages import ALL_MESSAGES, CLIENT_MESSAGES, SERVER_MESSAGES

DOCS = Path(__file__).parents[2] / "docs"
GENERATED = DOCS / "protocol.json"
WRITTEN = DOCS / "protocol.md"


def tag(kind: type[m.Message]) -> str:
    return str(kind.__struct_config__.tag)


def tags(kinds: Any) -> list[str]:
    return sorted(tag(kind) for kind in kinds)


def describe(info: inspect.Type, structs: dict[str, Any]) -> Any:
    """One field's type as plain data; nested structs are named and collected."""
    match info:
        case inspect.EnumType(cls=enum):
            return {"enum": [str(member.value) for member in enum]}
        case inspect.StructType(cls=cls, fields=fields):
            if cls.__name__ not in structs:
                structs[cls.__name__] = {}
                structs[cls.__name__] = fields_of(fields, structs)
            return {"struct": cls.__name__}
        case inspect.VarTupleType(item_type=item):
            return {"array": describe(item, structs), **bounds(info)}
        case inspect.DictType(key_type=key, value_type=value):
            kinds = {"key": describe(key, structs), "value": describe(value, structs)}
            return {"map": kinds, **bounds(info)}
        case inspect.UnionType(types=types):
            return {"any_of": [describe(each, structs) for each in types]}
        case _:
            return {"type": type(info).__name__.removesuffix("Type").lower(), **bounds(info)}


def bounds(info: inspect.Type) -> dict[str, Any]:
    found = {}
    for name in ("ge", "le", "min_length", "max_length", "pattern"):
        value = getattr(info, name, None)
        if value is not None:
            found[name] = value
    return found


def fields_of(fields: tuple[inspect.Field, ...], structs: dict[str, Any]) -> dict[str, Any]:
    return {
        each.encode_name: {
            **describe(each.type, structs),
            **({} if each.required else {"default": default_of(each)}),
        }
        for each in fields
    }


def default_of(field: inspect.Field) -> Any:
    value = field.default
    if value is msgspec.NODEFAULT:
        assert field.default_factory is not msgspec.NODEFAULT
        value = field.default_factory()
    if isinstance(value, Enum):
        return value.value
    return msgspec.to_builtins(value)


def document() -> dict[str, Any]:
    """All that a worker in another language needs, as plain data."""
    structs: dict[str, Any] = {}
    messages = {}
    for kind in ALL_MESSAGES:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        messages[tag(kind)] = fields_of(info.fields, structs)
    return {
        "protocol_version": m.PROTOCOL_VERSION,
        "constants": {
            "frame_bytes_max": m.FRAME_BYTES_MAX,
            "first_frame_bytes_max": connection.HELLO_BYTES_MAX,
            "chunk_bytes_max": m.CHUNK_BYTES_MAX,
            "initial_credit_bytes": m.INITIAL_CREDIT_BYTES,
            "bridge_frame_bytes_max": m.BRIDGE_FRAME_BYTES_MAX,
            "bridge_credit_bytes": m.BRIDGE_CREDIT_BYTES,
            "bridge_frame_cost_bytes": m.BRIDGE_FRAME_COST_BYTES,
            "requests_in_flight_max": m.REQUESTS_IN_FLIGHT_MAX,
            "entries_max": legality.ENTRIES_MAX,
        },
        "from_client": tags(CLIENT_MESSAGES),
        "from_server": tags(SERVER_MESSAGES),
        "messages": messages,
        "structs": structs,
        "requests": {str(role): tags(legality.REQUESTS_OF_ROLE[role]) for role in Role},
        "terminal_replies": {
            tag(kind): tags(replies) for kind, replies in legality.TERMINAL_REPLIES.items()
        },
        "stream_replies": {
            tag(kind): tags(replies) for kind, replies in legality.STREAM_REPLIES.items()
        },
        "connection_table": {
            str(sender): {
                str(state): {
                    tag(k): str(n) for k, n in sorted(row.items(), key=lambda x: tag(x[0]))
                }
                for state, row in legality.CONNECTION_TABLE[sender].items()
            }
            for sender in Sender
        },
        "bridge_table": {
            str(party): {
                str(state): {
                    tag(k): str(n) for k, n in sorted(row.items(), key=lambda x: tag(x[0]))
                }
                for state, row in rows.items()
            }
            for party, rows in bridge.BRIDGE_TABLE.items()
        },
        "request_table": {
            str(sender): {
                str(state): {
                    tag(k): str(n) for k, n in sorted(row.items(), key=lambda x: tag(x[0]))
                }
                for state, row in legality.REQUEST_TABLE[sender].items()
            }
            for sender in Sender
        },
    }


def rendered() -> str:
    return json.dumps(document(), indent=1, sort_keys=True) + "\n"


def test_the_generated_document_is_what_the_code_says() -> None:
    assert GENERATED.read_text() == rendered(), "review, then see this module's docstring"


@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=tag)
def test_the_written_document_names_every_message(kind: type[m.Message]) -> None:
    assert f"`{tag(kind)}`" in WRITTEN.read_text()


@pytest.mark.parametrize("state", [*ConnectionState, *RequestState, *bridge.BridgeState])
def test_the_written_document_names_every_state(state: str) -> None:
    assert re.search(rf"\b{state}\b", WRITTEN.read_text())


@pytest.mark.parametrize("code", list(m.GoodbyeCode))
def test_the_written_document_explains_every_farewell(code: m.GoodbyeCode) -> None:
    assert f"`{code}`" in WRITTEN.read_text()


EXAMPLES: dict[str, m.Message] = {
    "hello": m.Hello(protocol_version=1, client="worker-7", credential=b"secret"),
    "cancel": m.Cancel(request_id=2),
    "upload": m.Upload(request_id=2, data=b"abc"),
    "output": m.Output(request_id=2, stream=m.OutputStream.STDERR, data=b"oh\n"),
    "ping": m.Ping(token=7),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_frame_is_byte_for_byte_what_is_sent(name: str) -> None:
    frame = encode_frame(msgspec.msgpack.encode(EXAMPLES[name]), frame_bytes_max=4096)
    found = re.search(rf"^{name}: ([0-9a-f ]+)$", WRITTEN.read_text(), re.MULTILINE)
    assert found, f"{name}: {frame.hex(' ')}"
    assert bytes.fromhex(found[1]) == frame


if __name__ == "__main__":
    GENERATED.write_text(rendered())
