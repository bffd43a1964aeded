"""The authority's protocol without I/O: what is legal, what is bounded, what nobody can break."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbxd.port.ids import EnvironmentId
from sbxd.port.leases import LeaseNonce, LeaseRefusalCode, LeaseStanding, RunKey
from sbxd.wire import leases as w
from sbxd.wire.connection import CLOSED, NEED_DATA
from sbxd.wire.errors import LocalProtocolError, RemoteProtocolError
from sbxd.wire.framing import HEADER
from sbxd.wire.legality import Sender
from sbxd.wire.messages import Message

NONCE = LeaseNonce("1" * 32)
RUN = RunKey("a" * 64)
IDS = (EnvironmentId("e" * 32), EnvironmentId("f" * 32))
REGISTER = w.Register(nonce=NONCE, run=RUN, lease_epoch=1)
QUERY = w.Query(environment_ids=IDS)


def greeted(role: w.LeaseRole) -> tuple[w.LeaseConnection, w.LeaseConnection]:
    """A client and an authority that have greeted."""
    client, authority = w.LeaseConnection(Sender.CLIENT), w.LeaseConnection(Sender.SERVER)
    hello = w.LeaseHello(protocol_version=w.LEASE_PROTOCOL_VERSION, role=role)
    assert passed(client, authority, hello) == hello
    welcome = w.LeaseWelcome(protocol_version=w.LEASE_PROTOCOL_VERSION, grace_seconds=1.0)
    assert passed(authority, client, welcome) == welcome
    return client, authority


def passed(sender: w.LeaseConnection, receiver: w.LeaseConnection, message: Message) -> object:
    receiver.receive_data(sender.send(message))
    return receiver.next_event()


def test_a_question_and_its_answer_reach_the_other_end_whole() -> None:
    client, authority = greeted(w.LeaseRole.ASKER)
    assert passed(client, authority, QUERY) == QUERY
    answer = w.Standings(standings=(LeaseStanding.CURRENT, LeaseStanding.UNKNOWN))
    assert passed(authority, client, answer) == answer
    assert client.next_event() is NEED_DATA


@pytest.mark.parametrize(
    ("role", "request_"), [(w.LeaseRole.HOLDER, QUERY), (w.LeaseRole.ASKER, REGISTER)]
)
def test_a_role_asks_what_is_its_own(role: w.LeaseRole, request_: Message) -> None:
    client, authority = greeted(role)
    with pytest.raises(LocalProtocolError):
        client.send(request_)
    other, _ = greeted(w.LeaseRole.ASKER if role is w.LeaseRole.HOLDER else w.LeaseRole.HOLDER)
    authority.receive_data(other.send(request_))
    with pytest.raises(RemoteProtocolError):
        authority.next_event()
    with pytest.raises(RemoteProtocolError):
        authority.next_event()


@pytest.mark.parametrize(
    "answer",
    [
        w.Standings(standings=(LeaseStanding.STALE,)),
        w.Standings(standings=(LeaseStanding.STALE,) * 3),
        w.Granted(),
        w.Refused(code=LeaseRefusalCode.NOT_HELD),
    ],
    ids=["too few", "too many", "granted", "refused"],
)
def test_an_answer_that_does_not_fit_the_question_is_none(answer: Message) -> None:
    client, authority = greeted(w.LeaseRole.ASKER)
    passed(client, authority, QUERY)
    with pytest.raises(LocalProtocolError):
        authority.send(answer)
    # A peer without our scruples.
    liar = w.LeaseConnection(Sender.SERVER)
    frame = liar._encoder.encode(answer)
    client.receive_data(HEADER.pack(len(frame)) + frame)
    with pytest.raises(RemoteProtocolError):
        client.next_event()


def test_nothing_is_asked_before_the_welcome_nor_while_an_answer_is_due() -> None:
    client = w.LeaseConnection(Sender.CLIENT)
    with pytest.raises(LocalProtocolError):
        client.send(REGISTER)
    client, _authority = greeted(w.LeaseRole.HOLDER)
    client.send(REGISTER)
    with pytest.raises(LocalProtocolError):
        client.send(REGISTER)


def test_what_comes_before_its_turn_waits_and_is_bounded() -> None:
    client, authority = greeted(w.LeaseRole.HOLDER)
    frame = client.send(REGISTER)
    authority.receive_data(frame + frame)
    assert authority.next_event() == REGISTER
    assert authority.next_event() is NEED_DATA
    authority.send(w.Granted())
    assert authority.next_event() == REGISTER
    authority.receive_data(frame * (w.LEASE_FRAME_BYTES_MAX // len(frame) + 2))
    with pytest.raises(RemoteProtocolError):
        authority.receive_data(frame)


@pytest.mark.parametrize("length", [0, w.LEASE_FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_an_illegal_length_is_refused_before_a_byte_of_it_is_kept(length: int) -> None:
    authority = w.LeaseConnection(Sender.SERVER)
    with pytest.raises(RemoteProtocolError):
        authority.receive_data(HEADER.pack(length))


def test_the_end_of_the_stream_is_told_and_within_a_frame_it_is_an_error() -> None:
    client, authority = greeted(w.LeaseRole.HOLDER)
    authority.receive_data(b"")
    assert authority.next_event() is CLOSED
    client, authority = greeted(w.LeaseRole.HOLDER)
    authority.receive_data(client.send(REGISTER)[:-1])
    authority.receive_data(b"")
    with pytest.raises(RemoteProtocolError):
        authority.next_event()


def test_a_question_of_the_largest_size_fits_into_a_frame() -> None:
    client, authority = greeted(w.LeaseRole.ASKER)
    ids = tuple(EnvironmentId(f"{n:032x}") for n in range(w.QUERY_IDS_MAX))
    question = w.Query(environment_ids=ids)
    assert passed(client, authority, question) == question
    answer = w.Standings(standings=(LeaseStanding.UNKNOWN,) * w.QUERY_IDS_MAX)
    assert passed(authority, client, answer) == answer


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=5), st.sampled_from(Sender))
def test_no_bytes_raise_anything_but_a_protocol_error(pieces: list[bytes], us: Sender) -> None:
    connection = w.LeaseConnection(us)
    try:
        for piece in [*pieces, b""]:
            connection.receive_data(piece)
            while isinstance(connection.next_event(), Message):
                pass
    except RemoteProtocolError:
        pass
