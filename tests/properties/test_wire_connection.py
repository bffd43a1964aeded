"""Whatever a peer sends, a connection gives events or a RemoteProtocolError, within its caps."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbxd.wire import messages as m
from sbxd.wire.connection import (
    CLOSED,
    HELLO_BYTES_MAX,
    NEED_DATA,
    ClientConnection,
    Pause,
    ServerConnection,
)
from sbxd.wire.errors import ERROR_TEXT_MAX, RemoteProtocolError
from sbxd.wire.framing import HEADER_BYTES, encode_frame
from sbxd.wire.legality import ConnectionState, Role
from tests.properties.test_wire_framing import split
from tests.properties.wire_messages import (
    ALL_MESSAGES,
    CLIENT_MESSAGES,
    any_message,
    messages,
)

HELLO = m.Hello(protocol_version=1, client="test")
WELCOME = m.Welcome(protocol_version=1, server="sbxd", mechanism="fake")

roles = st.sampled_from(list(Role))


def frame(message: m.Message) -> bytes:
    return encode_frame(msgspec.msgpack.encode(message), frame_bytes_max=2**31)


def events(connection: ServerConnection | ClientConnection) -> list[m.Message]:
    taken: list[m.Message] = []
    while not isinstance(event := connection.next_event(), Pause):
        taken.append(event)
    return taken


def ready_pair(role: Role = Role.ADMIN) -> tuple[ServerConnection, ClientConnection]:
    server, client = ServerConnection(role=role), ClientConnection(role=role)
    server.receive_data(client.send(HELLO))
    assert events(server) == [HELLO]
    client.receive_data(server.send(WELCOME))
    assert events(client) == [WELCOME]
    return server, client


@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_every_message_survives_the_wire(kind: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    union = m.ClientMessage if kind in CLIENT_MESSAGES else m.ServerMessage
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union)
    assert decoded == message
    assert type(decoded) is kind


@given(st.lists(any_message(), max_size=8), st.lists(st.integers(min_value=0), max_size=30), roles)
def test_any_split_of_the_bytes_gives_the_same_events(
    sent: list[m.Message], cuts: list[int], role: Role
) -> None:
    stream = b"".join(map(frame, sent))

    def feed(pieces: list[bytes]) -> tuple[list[m.Message], str]:
        server, _ = ready_pair(role)
        taken: list[m.Message] = []
        try:
            for piece in pieces:
                server.receive_data(piece)
                while not isinstance(event := server.next_event(), Pause):
                    taken.append(event)
        except RemoteProtocolError as error:
            return taken, error.detail
        return taken, ""

    assert feed(split(stream, cuts)) == feed([stream] if stream else [])


def outcome(connection: ServerConnection | ClientConnection, pieces: list[bytes]) -> str:
    """Feed pieces; the text of the RemoteProtocolError, or "" when there is none."""
    try:
        for piece in pieces:
            connection.receive_data(piece)
            events(connection)
            assert connection.buffered_bytes <= HEADER_BYTES + m.FRAME_BYTES_MAX + len(piece)
    except RemoteProtocolError as error:
        return error.detail
    return ""


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20), roles, st.booleans())
def test_arbitrary_bytes_never_raise_anything_but_a_remote_error(
    pieces: list[bytes], role: Role, greeted: bool
) -> None:
    server = ready_pair(role)[0] if greeted else ServerConnection(role=role)
    client = ready_pair(role)[1] if greeted else ClientConnection(role=role)
    for text in (outcome(server, pieces), outcome(client, pieces)):
        assert text.isascii()
        assert text.isprintable()
        assert len(text) <= 10 * ERROR_TEXT_MAX


@given(st.binary(min_size=1, max_size=400), roles)
def test_arbitrary_bodies_in_good_frames_never_raise_anything_but_a_remote_error(
    body: bytes, role: Role
) -> None:
    for connection in ready_pair(role):
        detail = outcome(connection, [encode_frame(body, frame_bytes_max=2**20)])
        if detail:
            with pytest.raises(RemoteProtocolError) as again:
                connection.next_event()
            assert again.value.detail == detail
            assert connection.state is ConnectionState.READY


@given(any_message(), st.integers(min_value=0), st.integers(min_value=0, max_value=255))
def test_a_flipped_byte_of_a_good_message_never_raises_anything_but_a_remote_error(
    message: m.Message, position: int, value: int
) -> None:
    body = bytearray(msgspec.msgpack.encode(message))
    body[position % len(body)] = value
    for connection in ready_pair():
        outcome(connection, [encode_frame(bytes(body), frame_bytes_max=2**20)])


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 500_000,
        b"\x82\xa1a" + b"\x91" * 500_000,
        b"\x82\xa4type\xa6upload\xa4data\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa7execute\xa7command\x82\xa4argv\xdd\xff\xff\xff\xff\x00",
        b"\x82\xa4type\xa9provision\xadspecification\x81\xabenvironment\xdf\xff\xff\xff\xff\xa1a",
    ],
    ids=[
        "array",
        "map",
        "bytes",
        "text",
        "nested",
        "nested in an unknown field",
        "upload",
        "argv",
        "environment",
    ],
)
def test_a_promise_of_many_elements_allocates_little(body: bytes) -> None:
    server, _ = ready_pair()
    tracemalloc.start()
    try:
        server.receive_data(encode_frame(body, frame_bytes_max=2**20))
        with pytest.raises(RemoteProtocolError):
            server.next_event()
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body) + 64 * 1024
    finally:
        tracemalloc.stop()


@given(any_message())
def test_before_the_greeting_is_accepted_nothing_but_a_hello_is_decoded(
    message: m.Message,
) -> None:
    server = ServerConnection(role=Role.ADMIN)
    detail = outcome(server, [frame(message)])
    if isinstance(message, m.Hello) and len(frame(message)) <= HELLO_BYTES_MAX:
        assert detail == ""
        assert server.state is ConnectionState.AUTHENTICATING
    else:
        # Not "illegal in GREETING": that would mean that it had been decoded.
        assert detail.startswith(("undecodable message: Invalid value", "a frame of"))
        assert server.state is ConnectionState.GREETING


def test_what_arrives_behind_the_hello_waits_undecoded_until_welcome() -> None:
    server = ServerConnection(role=Role.WORKER)
    ping = frame(m.Ping(token=7))
    server.receive_data(frame(HELLO) + ping)
    assert server.next_event() == HELLO
    assert server.next_event() is NEED_DATA
    assert server.buffered_bytes == len(ping)
    server.send(WELCOME)
    assert server.next_event() == m.Ping(token=7)


def test_garbage_behind_the_hello_is_not_even_decoded_before_welcome() -> None:
    server = ServerConnection(role=Role.WORKER)
    server.receive_data(frame(HELLO) + encode_frame(b"\xc1", frame_bytes_max=9))
    assert server.next_event() == HELLO
    assert server.next_event() is NEED_DATA
    server.send(WELCOME)
    with pytest.raises(RemoteProtocolError):
        server.next_event()


def test_the_first_frame_is_capped_and_the_next_may_be_longer() -> None:
    server = ServerConnection(role=Role.WORKER)
    with pytest.raises(RemoteProtocolError):
        server.receive_data((HELLO_BYTES_MAX + 1).to_bytes(4, "big"))
    greeted, _ = ready_pair()
    greeted.receive_data((HELLO_BYTES_MAX + 1).to_bytes(4, "big"))
    assert greeted.next_event() is NEED_DATA


def test_an_end_between_frames_is_closed_and_an_end_within_one_is_an_error() -> None:
    whole, cut = ready_pair()[0], ready_pair()[0]
    whole.receive_data(b"")
    assert whole.next_event() is CLOSED
    cut.receive_data(frame(m.Ping(token=1))[:-1])
    assert cut.next_event() is NEED_DATA
    cut.receive_data(b"")
    with pytest.raises(RemoteProtocolError, match="within a frame"):
        cut.next_event()


def test_error_text_holds_no_credential() -> None:
    server = ServerConnection(role=Role.WORKER)
    body = msgspec.msgpack.encode(
        {"type": "hello", "protocol_version": "1", "client": "x", "credential": b"s3cret"}
    )
    server.receive_data(encode_frame(body, frame_bytes_max=4096))
    with pytest.raises(RemoteProtocolError) as caught:
        server.next_event()
    assert "s3cret" not in str(caught.value)
    assert "protocol_version" in str(caught.value)
    assert "s3cret" not in repr(m.Hello(protocol_version=1, client="x", credential=b"s3cret"))
