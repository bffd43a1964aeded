"""The bridge's messages: a total table, guards that change nothing, and two sides that agree."""

import copy
from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbxd.wire import messages as m
from sbxd.wire.bridge import BRIDGE_TABLE, BridgeAccount, BridgeState, IllegalBridge, Party
from sbxd.wire.connection import ClientConnection, Pause, ServerConnection
from sbxd.wire.errors import LocalProtocolError, RemoteProtocolError
from sbxd.wire.framing import encode_frame
from sbxd.wire.legality import BRIDGE, ConnectionState, IllegalMessage, Role, Sender
from tests.properties.test_wire_legality import (
    COMMAND,
    HANDLE,
    HELLO,
    WELCOME,
    in_order,
    ledger_in,
    name_of,
    sampled,
    snapshot,
)
from tests.properties.wire_messages import CLIENT_MESSAGES, SERVER_MESSAGES

KINDS = in_order(BRIDGE)
SAID: list[type[m.Message]] = [*KINDS, m.Cancel]
SAMPLES = {kind: sampled(kind, request_id=1, size_bytes=65) for kind in SAID}
PATHS: dict[BridgeState, list[tuple[Party, m.Message]]] = {
    BridgeState.ASKED: [],
    BridgeState.OPEN: [(Party.SERVER, m.BridgeOpened(request_id=1))],
    BridgeState.SERVER_DONE: [
        (Party.SERVER, m.BridgeOpened(request_id=1)),
        (Party.SERVER, m.BridgeClosed(request_id=1, reason=m.BridgeEnd.ENDED)),
    ],
    BridgeState.CLIENT_DONE: [
        (Party.SERVER, m.BridgeOpened(request_id=1)),
        (Party.CLIENT, m.BridgeClose(request_id=1)),
    ],
    BridgeState.OVER: [
        (Party.SERVER, m.BridgeOpened(request_id=1)),
        (Party.CLIENT, m.BridgeClose(request_id=1)),
        (Party.SERVER, m.BridgeClosed(request_id=1, reason=m.BridgeEnd.ENDED)),
    ],
}


def account_in(state: BridgeState) -> BridgeAccount:
    account = BridgeAccount()
    for party, message in PATHS[state]:
        account.enter(party, message)
    assert account.state is state
    return account


def frame(size: int) -> m.BridgeFrame:
    return m.BridgeFrame(request_id=1, data=b"x" * size)


def execute(*, bridge: bool, stdin_bytes: int = 0) -> m.Execute:
    return m.Execute(
        request_id=1, handle=HANDLE, command=COMMAND, stdin_bytes=stdin_bytes, bridge=bridge
    )


def test_the_table_speaks_of_every_message_of_the_bridge() -> None:
    for party, known in ((Party.CLIENT, CLIENT_MESSAGES), (Party.SERVER, SERVER_MESSAGES)):
        assert set(BRIDGE_TABLE[party]) == set(BridgeState)
        said = {kind for row in BRIDGE_TABLE[party].values() for kind in row}
        assert said == BRIDGE & set(known)


@pytest.mark.parametrize("party", Party)
@pytest.mark.parametrize("state", BridgeState)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_every_message_in_every_state_is_applied_or_changes_nothing(
    kind: type[m.Message], state: BridgeState, party: Party
) -> None:
    account = account_in(state)
    # As if a frame of each side had been taken before, so that there is credit to return.
    account.window = dict.fromkeys(Party, m.BRIDGE_CREDIT_BYTES - 100)
    before = copy.deepcopy(account)
    message = sampled(kind, request_id=1, size_bytes=100)
    following = BRIDGE_TABLE[party][state].get(kind)
    if following is None:
        with pytest.raises(IllegalBridge):
            account.enter(party, message)
        assert account == before
    else:
        account.enter(party, message)
        assert account.state is following


@pytest.mark.parametrize("party", Party)
def test_a_frame_keeps_to_its_length_and_to_the_credit_of_its_direction(party: Party) -> None:
    account = account_in(BridgeState.OPEN)
    for size in (0, m.BRIDGE_FRAME_BYTES_MAX + 1):
        with pytest.raises(IllegalBridge):
            account.enter(party, frame(size))
    taken = 0
    while taken + m.BRIDGE_FRAME_BYTES_MAX + m.BRIDGE_FRAME_COST_BYTES <= m.BRIDGE_CREDIT_BYTES:
        account.enter(party, frame(m.BRIDGE_FRAME_BYTES_MAX))
        taken += m.BRIDGE_FRAME_BYTES_MAX + m.BRIDGE_FRAME_COST_BYTES
    left = m.BRIDGE_CREDIT_BYTES - taken - m.BRIDGE_FRAME_COST_BYTES
    before = copy.deepcopy(account)
    with pytest.raises(IllegalBridge):
        account.enter(party, frame(left + 1))
    assert account == before
    account.enter(party, frame(left))
    with pytest.raises(IllegalBridge):
        account.enter(party, frame(1))
    other = Party.SERVER if party is Party.CLIENT else Party.CLIENT
    account.enter(other, frame(1))  # the other direction is its own


@pytest.mark.parametrize("party", Party)
def test_small_frames_are_bounded_in_number(party: Party) -> None:
    account = account_in(BridgeState.OPEN)
    count = 0
    while True:
        try:
            account.enter(party, frame(1))
        except IllegalBridge:
            break
        count += 1
    assert count == m.BRIDGE_CREDIT_BYTES // (1 + m.BRIDGE_FRAME_COST_BYTES)


def test_credit_returns_nothing_that_was_not_taken() -> None:
    account = account_in(BridgeState.OPEN)
    account.enter(Party.SERVER, frame(36))
    for party, size in ((Party.CLIENT, 101), (Party.SERVER, 1)):
        with pytest.raises(IllegalBridge):
            account.enter(party, m.BridgeCredit(request_id=1, size_bytes=size))
    account.enter(Party.CLIENT, m.BridgeCredit(request_id=1, size_bytes=100))
    assert account == account_in(BridgeState.OPEN)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("sender", Sender)
def test_who_asked_for_no_bridge_gets_and_sends_none(sender: Sender, kind: type[m.Message]) -> None:
    ledger = ledger_in(ConnectionState.READY)
    ledger.enter(Sender.CLIENT, execute(bridge=False))
    before = snapshot(ledger)
    with pytest.raises(IllegalMessage):
        ledger.enter(sender, sampled(kind, request_id=1, size_bytes=1))
    assert snapshot(ledger) == before


def test_the_bridge_opens_only_once_the_upload_is_over_and_may_after_a_cancel() -> None:
    ledger = ledger_in(ConnectionState.READY)
    ledger.enter(Sender.CLIENT, execute(bridge=True, stdin_bytes=1))
    with pytest.raises(IllegalMessage):
        ledger.enter(Sender.SERVER, m.BridgeOpened(request_id=1))
    ledger.enter(Sender.CLIENT, m.Upload(request_id=1, data=b"x"))
    ledger.enter(Sender.CLIENT, m.Cancel(request_id=1))
    ledger.enter(Sender.SERVER, m.BridgeOpened(request_id=1))
    ledger.enter(Sender.SERVER, frame(1))
    with pytest.raises(IllegalMessage):
        ledger.enter(Sender.CLIENT, frame(1))
    ledger.enter(Sender.CLIENT, m.BridgeCredit(request_id=1, size_bytes=65))
    ledger.enter(Sender.CLIENT, m.BridgeClose(request_id=1))


class Wire:
    """Both ends of one Execute with the bridge, and bytes on their way in each direction."""

    def __init__(self) -> None:
        self.client = ClientConnection(role=Role.WORKER)
        self.server = ServerConnection(role=Role.WORKER)
        self.ways: dict[Party, deque[bytes]] = {party: deque() for party in Party}
        self.received: dict[Party, list[bytes]] = {party: [] for party in Party}
        self.ways[Party.CLIENT].append(self.client.send(HELLO))
        self.deliver(Party.CLIENT)
        self.ways[Party.SERVER].append(self.server.send(WELCOME))
        self.deliver(Party.SERVER)
        self.ways[Party.CLIENT].append(self.client.send(execute(bridge=True)))
        self.deliver(Party.CLIENT)

    def deliver(self, sender: Party) -> None:
        """Let the other side take the oldest frame. Lets RemoteProtocolError through."""
        if self.ways[sender]:
            taker = self.server if sender is Party.CLIENT else self.client
            taker.receive_data(self.ways[sender].popleft())
            while not isinstance(event := taker.next_event(), Pause):
                if isinstance(event, m.BridgeFrame):
                    self.received[sender].append(event.data)

    def say(self, sender: Party, message: m.Message) -> bool:
        speaker = self.client if sender is Party.CLIENT else self.server
        try:
            self.ways[sender].append(speaker.send(message))
        except LocalProtocolError:
            return False
        return True


@given(st.data())
@settings(max_examples=80)
def test_what_one_side_may_send_the_other_accepts_however_messages_cross(
    data: st.DataObject,
) -> None:
    wire = Wire()
    sent: dict[Party, list[bytes]] = {party: [] for party in Party}
    for _ in range(data.draw(st.integers(min_value=1, max_value=40))):
        party = data.draw(st.sampled_from(list(Party)))
        if data.draw(st.booleans()):
            wire.deliver(party)
            continue
        known = CLIENT_MESSAGES if party is Party.CLIENT else SERVER_MESSAGES
        kind = data.draw(st.sampled_from([k for k in SAID if k in known]))
        message = SAMPLES[kind]
        if isinstance(message, m.BridgeFrame):
            body = str(len(sent[party])).encode()
            message = msgspec.structs.replace(message, data=body)
        if wire.say(party, message) and isinstance(message, m.BridgeFrame):
            sent[party].append(message.data)
    for party in Party:
        while wire.ways[party]:
            wire.deliver(party)
        assert wire.received[party] == sent[party]
    assert wire.client.bridge_state(1) is wire.server.bridge_state(1)


def test_a_client_that_speaks_over_a_bridge_that_is_not_open_breaks_the_protocol() -> None:
    wire = Wire()
    raw = encode_frame(msgspec.msgpack.encode(frame(1)), frame_bytes_max=4096)
    wire.server.receive_data(raw)
    with pytest.raises(RemoteProtocolError, match="ASKED"):
        wire.server.next_event()
