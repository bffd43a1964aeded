"""The legality tables are total, a refusal changes nothing, and the two sides cannot disagree."""

import copy
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from sbxd.port.command import ChangeKind
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.wire import messages as m
from sbxd.wire.connection import ClientConnection, Pause, ServerConnection
from sbxd.wire.errors import LocalProtocolError, RemoteProtocolError
from sbxd.wire.framing import encode_frame
from sbxd.wire.legality import (
    ADMIN_REQUESTS,
    ALL_STREAM,
    ALL_TERMINAL,
    BRIDGE,
    CONNECTION_TABLE,
    REQUEST_TABLE,
    STREAM_REPLIES,
    TERMINAL_REPLIES,
    WORKER_REQUESTS,
    ConnectionState,
    Disposition,
    IllegalMessage,
    Ledger,
    RequestState,
    Role,
    Sender,
)
from tests.properties.wire_messages import (
    ALL_MESSAGES,
    CLIENT_MESSAGES,
    SERVER_MESSAGES,
    messages,
)

HELLO = m.Hello(protocol_version=1, client="test")
WELCOME = m.Welcome(protocol_version=1, server="sbxd", mechanism="fake")
HANDLE = EnvironmentHandle(
    environment_id=EnvironmentId("0" * 32),
    tenant_id=TenantId("tenant"),
    run_id=RunId("run"),
    lease_epoch=0,
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    expires_at=datetime(2026, 1, 2, tzinfo=UTC),
)
COMMAND = m.WireCommand(
    argv=(b"true",), working_directory=b".", timeout_seconds=1, maximum_output_bytes=100
)
ENTRY = m.WireChange(path=b"a", change=ChangeKind.CREATED, size_bytes=0, sha256=None)


@cache
def sample(kind: type[m.Message]) -> m.Message:
    """One message of a type, the same in every run."""
    plain = settings(database=None, derandomize=True, phases=[Phase.generate])
    return find(messages(kind), lambda _: True, settings=plain)


def sampled(kind: type[m.Message], **fields: Any) -> m.Message:
    """A sample whose fields, where it has them, are these."""
    own = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    made = msgspec.structs.replace(sample(kind), **own)
    if isinstance(made, m.Upload | m.Output | m.Content | m.BridgeFrame):
        return msgspec.structs.replace(made, data=b"x")
    if isinstance(made, m.Entries):
        return msgspec.structs.replace(made, entries=(ENTRY,))
    return made


def name_of(kind: type[m.Message]) -> str:
    return kind.__name__


def in_order(kinds: Iterable[type[m.Message]]) -> list[type[m.Message]]:
    return sorted(kinds, key=name_of)


def snapshot(ledger: Ledger) -> dict[str, Any]:
    return copy.deepcopy(vars(ledger))


def ledger_in(state: ConnectionState, role: Role = Role.ADMIN) -> Ledger:
    ledger = Ledger(role=role)
    if state is not ConnectionState.GREETING:
        ledger.enter(Sender.CLIENT, HELLO)
    if state in (ConnectionState.READY, ConnectionState.CLOSING):
        ledger.enter(Sender.SERVER, WELCOME)
    if state is ConnectionState.CLOSING:
        ledger.enter(Sender.SERVER, m.Goodbye(reason="over"))
    assert ledger.state is state
    return ledger


def execute(request_id: int = 1, *, stdin_bytes: int = 10) -> m.Execute:
    return m.Execute(request_id=request_id, handle=HANDLE, command=COMMAND, stdin_bytes=stdin_bytes)


def upload(size: int, request_id: int = 1) -> m.Upload:
    return m.Upload(request_id=request_id, data=b"x" * size)


def request_in(state: RequestState) -> Ledger:
    """A ledger whose request 1 is an Execute in this state."""
    ledger = ledger_in(ConnectionState.READY)
    ledger.enter(Sender.CLIENT, execute())
    if state is RequestState.OPEN:
        ledger.enter(Sender.CLIENT, upload(10))
    elif state is RequestState.CANCELLED:
        ledger.enter(Sender.CLIENT, m.Cancel(request_id=1))
    elif state is RequestState.DONE:
        ledger.enter(Sender.SERVER, sampled(m.Executed, request_id=1))
    return ledger


def test_the_tables_speak_of_every_message_and_of_no_other() -> None:
    of_client = {kind for row in CONNECTION_TABLE[Sender.CLIENT].values() for kind in row}
    of_server = {kind for row in CONNECTION_TABLE[Sender.SERVER].values() for kind in row}
    assert of_client == set(CLIENT_MESSAGES)
    assert of_server == set(SERVER_MESSAGES)
    assert set(get_args(m.WorkerRequest)) == WORKER_REQUESTS
    assert set(get_args(m.AdminRequest)) == ADMIN_REQUESTS
    assert set(get_args(m.TerminalReply)) == ALL_TERMINAL
    assert set(TERMINAL_REPLIES) == WORKER_REQUESTS | ADMIN_REQUESTS
    for table in (CONNECTION_TABLE, REQUEST_TABLE):
        assert set(table) == set(Sender)
    assert all(set(rows) == set(ConnectionState) for rows in CONNECTION_TABLE.values())
    assert all(set(rows) == set(RequestState) for rows in REQUEST_TABLE.values())


@pytest.mark.parametrize("sender", Sender)
@pytest.mark.parametrize("state", ConnectionState)
@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=name_of)
def test_every_message_in_every_connection_state_is_applied_or_changes_nothing(
    kind: type[m.Message], state: ConnectionState, sender: Sender
) -> None:
    ledger = ledger_in(state)
    before = snapshot(ledger)
    expected = CONNECTION_TABLE[sender][state].get(kind)
    try:
        ledger.enter(sender, sampled(kind, request_id=1))
    except IllegalMessage:
        assert snapshot(ledger) == before
        # What is within a request names none that is open here; a Pong answers no Ping.
        assert expected is None or (
            kind in {m.Upload, m.Cancel, m.Credit, m.Pong} | BRIDGE | ALL_STREAM | ALL_TERMINAL
        )
    else:
        assert ledger.state is expected


@pytest.mark.parametrize("sender", Sender)
@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=name_of)
def test_every_message_in_every_request_state_is_applied_or_changes_nothing(
    kind: type[m.Message], state: RequestState, sender: Sender
) -> None:
    if "request_id" not in kind.__struct_fields__ or issubclass(kind, m.Request):
        return  # moves no request; covered by the test above
    ledger = request_in(state)
    before = snapshot(ledger)
    expected = REQUEST_TABLE[sender][state].get(kind)
    if expected is not None and kind in ALL_STREAM | ALL_TERMINAL:
        allowed = STREAM_REPLIES[m.Execute] | TERMINAL_REPLIES[m.Execute]
        expected = expected if kind in allowed else None
    if kind in BRIDGE and state is not RequestState.DONE:
        expected = None  # it asked for none; test_wire_bridge has those that do
    uploaded = state is RequestState.OPEN and sender is Sender.SERVER
    if kind is m.Credit and state is not RequestState.DONE and not uploaded:
        expected = None  # nothing has been taken yet: a guard refuses it
    message = sampled(kind, request_id=1, size_bytes=1)
    if expected is None:
        with pytest.raises(IllegalMessage):
            ledger.enter(sender, message)
        assert snapshot(ledger) == before
        return
    disposition = ledger.enter(sender, message)
    if state is RequestState.DONE:
        assert disposition is Disposition.DROPPED
        assert snapshot(ledger) == before
    elif expected is RequestState.DONE:
        assert 1 not in ledger.requests
    else:
        assert ledger.requests[1].state is expected


@pytest.mark.parametrize("kind", ALL_TERMINAL, ids=name_of)
@pytest.mark.parametrize(
    "request_kind",
    in_order(TERMINAL_REPLIES),
    ids=name_of,
)
def test_only_a_requests_own_replies_end_it(
    request_kind: type[m.Message], kind: type[m.Message]
) -> None:
    ledger = ledger_in(ConnectionState.READY)
    ledger.enter(Sender.CLIENT, sampled(request_kind, request_id=1))
    reply = sampled(kind, request_id=1)
    if kind in TERMINAL_REPLIES[request_kind]:
        ledger.enter(Sender.SERVER, reply)
        with pytest.raises(IllegalMessage):  # a second terminal reply
            ledger.enter(Sender.SERVER, reply)
    else:
        with pytest.raises(IllegalMessage):
            ledger.enter(Sender.SERVER, reply)
        assert 1 in ledger.requests


@pytest.mark.parametrize("kind", in_order(ADMIN_REQUESTS))
def test_an_admin_request_is_illegal_on_the_worker_socket(kind: type[m.Message]) -> None:
    request = sampled(kind, request_id=1)
    with pytest.raises(IllegalMessage):
        ledger_in(ConnectionState.READY, Role.WORKER).enter(Sender.CLIENT, request)
    ledger_in(ConnectionState.READY, Role.ADMIN).enter(Sender.CLIENT, request)


@pytest.mark.parametrize("kind", in_order(WORKER_REQUESTS))
@pytest.mark.parametrize("role", Role)
def test_a_worker_request_is_legal_on_both_sockets(role: Role, kind: type[m.Message]) -> None:
    ledger_in(ConnectionState.READY, role).enter(Sender.CLIENT, sampled(kind, request_id=1))


def refused(ledger: Ledger, sender: Sender, message: m.Message) -> None:
    before = snapshot(ledger)
    with pytest.raises(IllegalMessage):
        ledger.enter(sender, message)
    assert snapshot(ledger) == before


def test_request_identifiers_rise_strictly() -> None:
    ledger = ledger_in(ConnectionState.READY)
    ledger.enter(Sender.CLIENT, execute(5))
    for request_id in (5, 4, 1):
        refused(ledger, Sender.CLIENT, execute(request_id))
    ledger.enter(Sender.CLIENT, execute(6))


def test_an_identifier_that_never_was_is_refused_and_a_past_one_dropped() -> None:
    ledger = request_in(RequestState.DONE)
    refused(ledger, Sender.CLIENT, m.Cancel(request_id=2))
    assert ledger.enter(Sender.CLIENT, m.Cancel(request_id=1)) is Disposition.DROPPED


def test_no_more_than_the_allowed_number_of_requests_is_open() -> None:
    ledger = ledger_in(ConnectionState.READY)
    for request_id in range(1, m.REQUESTS_IN_FLIGHT_MAX + 1):
        ledger.enter(Sender.CLIENT, execute(request_id))
    refused(ledger, Sender.CLIENT, execute(m.REQUESTS_IN_FLIGHT_MAX + 1))
    ledger.enter(Sender.SERVER, sampled(m.Executed, request_id=7))
    ledger.enter(Sender.CLIENT, execute(m.REQUESTS_IN_FLIGHT_MAX + 1))


def test_an_upload_keeps_to_the_announced_size() -> None:
    ledger = request_in(RequestState.UPLOADING)
    refused(ledger, Sender.CLIENT, upload(11))
    refused(ledger, Sender.CLIENT, upload(0))
    ledger.enter(Sender.CLIENT, upload(9))
    refused(ledger, Sender.CLIENT, upload(2))
    ledger.enter(Sender.CLIENT, upload(1))
    assert ledger.requests[1].state is RequestState.OPEN
    refused(ledger, Sender.CLIENT, upload(1))


def test_an_upload_keeps_to_its_credit() -> None:
    ledger = ledger_in(ConnectionState.READY)
    ledger.enter(Sender.CLIENT, execute(stdin_bytes=2 * m.INITIAL_CREDIT_BYTES))
    for _ in range(m.INITIAL_CREDIT_BYTES // m.CHUNK_BYTES_MAX):
        ledger.enter(Sender.CLIENT, upload(m.CHUNK_BYTES_MAX))
    refused(ledger, Sender.CLIENT, upload(1))
    ledger.enter(Sender.SERVER, m.Credit(request_id=1, size_bytes=1))
    refused(ledger, Sender.CLIENT, upload(2))
    ledger.enter(Sender.CLIENT, upload(1))


def test_output_keeps_to_what_was_asked_for_and_credit_to_what_was_taken() -> None:
    ledger = request_in(RequestState.OPEN)
    out = m.Output(request_id=1, stream=m.OutputStream.STDOUT, data=b"x" * 150)
    ledger.enter(Sender.SERVER, out)
    refused(ledger, Sender.SERVER, out)  # 300 of twice 100
    refused(ledger, Sender.CLIENT, m.Credit(request_id=1, size_bytes=151))
    ledger.enter(Sender.CLIENT, m.Credit(request_id=1, size_bytes=150))
    refused(ledger, Sender.CLIENT, m.Credit(request_id=1, size_bytes=1))


def test_output_keeps_to_its_credit() -> None:
    ledger = ledger_in(ConnectionState.READY)
    large = msgspec.structs.replace(COMMAND, maximum_output_bytes=8 * m.INITIAL_CREDIT_BYTES)
    ledger.enter(Sender.CLIENT, m.Execute(request_id=1, handle=HANDLE, command=large))
    chunk = m.Output(request_id=1, stream=m.OutputStream.STDOUT, data=b"x" * m.CHUNK_BYTES_MAX)
    for _ in range(m.INITIAL_CREDIT_BYTES // m.CHUNK_BYTES_MAX):
        ledger.enter(Sender.SERVER, chunk)
    one = m.Output(request_id=1, stream=m.OutputStream.STDERR, data=b"x")
    refused(ledger, Sender.SERVER, one)
    ledger.enter(Sender.CLIENT, m.Credit(request_id=1, size_bytes=1))
    ledger.enter(Sender.SERVER, one)
    refused(ledger, Sender.SERVER, one)


def test_one_ping_at_a_time_is_unanswered() -> None:
    ledger = ledger_in(ConnectionState.READY)
    refused(ledger, Sender.CLIENT, m.Pong(token=1))
    ledger.enter(Sender.SERVER, m.Ping(token=1))
    refused(ledger, Sender.SERVER, m.Ping(token=2))
    refused(ledger, Sender.CLIENT, m.Pong(token=2))
    ledger.enter(Sender.CLIENT, m.Ping(token=2))  # the other direction is its own
    ledger.enter(Sender.CLIENT, m.Pong(token=1))
    ledger.enter(Sender.SERVER, m.Ping(token=3))


def test_a_second_hello_is_refused_by_the_table() -> None:
    server, client = ServerConnection(role=Role.WORKER), ClientConnection(role=Role.WORKER)
    server.receive_data(client.send(HELLO))
    assert server.next_event() == HELLO
    server.send(WELCOME)
    with pytest.raises(LocalProtocolError):
        client.send(HELLO)
    server.receive_data(encode_frame(msgspec.msgpack.encode(HELLO), frame_bytes_max=4096))
    with pytest.raises(RemoteProtocolError, match="Hello from the client is illegal in READY"):
        server.next_event()


class Wire:
    """Both ends, with bytes on their way in each direction."""

    def __init__(self, role: Role) -> None:
        self.client = ClientConnection(role=role)
        self.server = ServerConnection(role=role)
        self.to_server: deque[bytes] = deque([self.client.send(HELLO)])
        self.to_client: deque[bytes] = deque()
        self.deliver_to_server()
        self.to_client.append(self.server.send(WELCOME))
        self.deliver_to_client()
        self.ids = [1]

    def deliver_to_server(self) -> None:
        if self.to_server:
            self.server.receive_data(self.to_server.popleft())
            while not isinstance(self.server.next_event(), Pause):
                pass

    def deliver_to_client(self) -> None:
        if self.to_client:
            self.client.receive_data(self.to_client.popleft())
            while not isinstance(self.client.next_event(), Pause):
                pass

    def say(self, sender: Sender, message: m.Message) -> bool:
        """Try to send; False when this side's own table refuses it."""
        try:
            if sender is Sender.CLIENT:
                self.to_server.append(self.client.send(message))
            else:
                self.to_client.append(self.server.send(message))
        except LocalProtocolError:
            return False
        return True


@given(st.data(), st.sampled_from(list(Role)))
@settings(max_examples=60, suppress_health_check=[HealthCheck.data_too_large])
def test_what_one_side_may_send_the_other_accepts_however_messages_cross(
    data: st.DataObject, role: Role
) -> None:
    """No RemoteProtocolError is raised in any of this: `deliver_*` would let it through."""
    wire = Wire(role)
    said = 0
    for _ in range(data.draw(st.integers(min_value=5, max_value=60))):
        action = data.draw(st.sampled_from(["client", "server", "to server", "to client"]))
        if action == "to server":
            wire.deliver_to_server()
        elif action == "to client":
            wire.deliver_to_client()
        else:
            sender = Sender(action)
            kinds = CLIENT_MESSAGES if sender is Sender.CLIENT else SERVER_MESSAGES
            kind = data.draw(st.sampled_from(kinds))
            if kind is m.Goodbye and data.draw(st.booleans()):
                continue
            message: m.Message = sampled(
                kind,
                request_id=data.draw(st.sampled_from(wire.ids)),
                token=1,
                size_bytes=1024 if kind is m.ImageImport else data.draw(st.sampled_from([1, 2])),
                stdin_bytes=data.draw(st.sampled_from([0, 2])),
            )
            if isinstance(message, m.Request):
                message = msgspec.structs.replace(
                    message, request_id=wire.client.fresh_request_id()
                )
            if wire.say(sender, message):
                said += 1
                if isinstance(message, m.Request):
                    wire.ids.append(message.request_id)
    while wire.to_client or wire.to_server:
        wire.deliver_to_client()
        wire.deliver_to_server()
    if wire.server.state is ConnectionState.READY:
        assert wire.client.open_requests == wire.server.open_requests
