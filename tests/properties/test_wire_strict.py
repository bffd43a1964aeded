"""No message says a thing twice, on any wire, and each says what it is."""

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from sbxd.launcher import channel
from sbxd.launcher.requests import LauncherReply, LauncherRequest
from sbxd.wire import leases
from sbxd.wire import messages as m
from sbxd.wire.connection import ClientConnection, ServerConnection
from sbxd.wire.errors import RemoteProtocolError
from sbxd.wire.framing import encode_frame
from sbxd.wire.legality import Role, Sender
from sbxd.wire.strict import VALUES_MAX, StrictDecoder, keys_of, walked
from tests.properties.test_wire_vectors import sample
from tests.properties.wire_messages import ALL_MESSAGES, any_message

DECODER: StrictDecoder[Any] = StrictDecoder(m.ClientMessage | m.ServerMessage)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=40), inner, max_size=5)
    ),
    max_leaves=10,
)


def map_of(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """A map as bytes, of keys and values that are encoded already."""
    return b"\xde" + len(pairs).to_bytes(2, "big") + b"".join(key + value for key, value in pairs)


def pairs_of(value: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    encode = msgspec.msgpack.encode
    return [(encode(key), encode(inner)) for key, inner in value.items()]


def doubled(value: Any) -> "list[bytes]":
    """The value with each key of each of its maps there twice, one at a time."""
    encode = msgspec.msgpack.encode
    found: list[bytes] = []
    if isinstance(value, dict):
        pairs = pairs_of(value)
        found += [map_of([*pairs, pair]) for pair in pairs]
        for number, inner in enumerate(value.values()):
            for other in doubled(inner):
                changed = [*pairs]
                changed[number] = (pairs[number][0], other)
                found.append(map_of(changed))
    elif isinstance(value, list):
        assert len(value) < 16
        for number, inner in enumerate(value):
            for other in doubled(inner):
                items = [encode(each) for each in value]
                items[number] = other
                found.append(bytes([0x90 | len(items)]) + b"".join(items))
    return found


def plain_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.msgpack.decode(
        msgspec.msgpack.encode(sample(inspect.type_info(kind)))
    )
    return plain


@pytest.mark.case("PEER-12")
@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=lambda kind: kind.__name__)
def test_every_key_of_every_message_is_refused_twice(kind: type[m.Message]) -> None:
    plain = plain_of(kind)
    assert DECODER.decode(msgspec.msgpack.encode(plain)) == sample(inspect.type_info(kind))
    for body in doubled(plain):
        with pytest.raises(msgspec.ValidationError, match="twice"):
            DECODER.decode(body)
    del plain["type"]
    with pytest.raises(msgspec.ValidationError, match="type"):
        DECODER.decode(msgspec.msgpack.encode(plain))


@pytest.mark.case("PEER-12")
def test_a_greeting_without_its_type_or_with_two_credentials_ends_the_connection() -> None:
    hello = {"type": "hello", "protocol_version": 1, "client": "x", "credential": None}
    bodies = [map_of([*pairs_of(hello), pair]) for pair in pairs_of(hello)]
    bodies.append(map_of(pairs_of(hello)[1:]))
    for body in bodies:
        server = ServerConnection(role=Role.WORKER)
        server.receive_data(encode_frame(body, frame_bytes_max=4096))
        with pytest.raises(RemoteProtocolError, match="undecodable"):
            server.next_event()
    server = ServerConnection(role=Role.WORKER)
    server.receive_data(encode_frame(map_of(pairs_of(hello)), frame_bytes_max=4096))
    assert isinstance(server.next_event(), m.Hello)


@pytest.mark.case("PEER-12")
def test_a_client_refuses_a_daemon_that_says_a_thing_twice() -> None:
    welcome = {"type": "welcome", "protocol_version": 1, "server": "x", "mechanism": "y"}
    client = ClientConnection(role=Role.WORKER)
    client.send(m.Hello(protocol_version=1, client="x"))
    pairs = pairs_of(welcome)
    client.receive_data(encode_frame(map_of([*pairs, pairs[2]]), frame_bytes_max=4096))
    with pytest.raises(RemoteProtocolError, match="twice"):
        client.next_event()


@pytest.mark.case("PEER-12")
@pytest.mark.parametrize(
    ("union", "side"),
    [(leases.ToAuthority, Sender.SERVER), (leases.FromAuthority, Sender.CLIENT)],
    ids=["to-authority", "from-authority"],
)
def test_every_key_of_the_lease_wire_is_refused_twice(union: Any, side: Sender) -> None:
    decoder = leases.LeaseConnection(side)._decoder
    for kind in get_args(union):
        assert decoder.decode(msgspec.msgpack.encode(plain_of(kind))) is not None
        for body in doubled(plain_of(kind)):
            with pytest.raises(msgspec.ValidationError, match="twice"):
                decoder.decode(body)


@pytest.mark.case("PEER-12")
@pytest.mark.parametrize(
    ("union", "decode"),
    [(LauncherRequest, channel.decode_request), (LauncherReply, channel.decode_reply)],
    ids=["requests", "replies"],
)
def test_every_key_between_daemon_and_launcher_is_refused_twice(
    union: Any, decode: Callable[[bytes], Any]
) -> None:
    info = inspect.type_info(union)
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    for each in kinds:
        assert isinstance(each, inspect.StructType)
        message = sample(each)
        assert decode(channel.encode(message)) == message
        for body in doubled(msgspec.msgpack.decode(channel.encode(message))):
            with pytest.raises(channel.ChannelViolation, match="twice"):
                decode(body)


@given(message=any_message())
def test_whatever_we_send_is_accepted_by_both_ways_of_looking(message: m.Message) -> None:
    body = msgspec.msgpack.encode(message)
    assert set(keys_of(body)) == set(walked(body))
    assert DECODER.decode(body) == message


@given(value=st.dictionaries(st.text(max_size=40), PLAIN, max_size=4))
def test_the_walk_finds_the_keys_of_any_map_and_every_double(value: dict[str, Any]) -> None:
    assert set(walked(msgspec.msgpack.encode(value))) == set(value)
    for pair in pairs_of(value):
        with pytest.raises(msgspec.ValidationError, match="twice"):
            keys_of(map_of([*pairs_of(value), pair]))


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_keys_or_an_error(raw: bytes) -> None:
    try:
        assert keys_of(raw) is not None
    except (msgspec.MsgspecError, ValueError):
        return


def test_other_encodings_of_a_message_are_accepted_and_their_doubles_are_not() -> None:
    """Another client may write a text with a longer head than it needs."""
    long_type = b"\xd9\x04type"
    ping = map_of([(long_type, b"\xda\x00\x04ping"), (b"\xa5token", b"\xcd\x00\x07")])
    assert DECODER.decode(ping) == m.Ping(token=7)
    twice = map_of([(long_type, b"\xa4ping"), (b"\xa4type", b"\xa4ping"), (b"\xa5token", b"\x07")])
    with pytest.raises(msgspec.ValidationError, match="twice"):
        DECODER.decode(twice)


def test_a_nest_of_any_depth_and_a_map_of_any_size_are_refused_in_bounded_memory() -> None:
    many = {"type": "x", "list": [0] * VALUES_MAX}
    assert set(keys_of(msgspec.msgpack.encode(many))) == set(many)  # the shortest form
    longer = map_of([(b"\xd9\x04type", b"\xa1x"), *pairs_of(many)[1:]])
    with pytest.raises(msgspec.ValidationError, match="more values"):
        keys_of(longer)
    for body in (b"\x81\xa1x" * 200_000, b"\x91" * 900_000, b"\xdf\xff\xff\xff\xff", b""):
        with pytest.raises(msgspec.MsgspecError):
            keys_of(body)
