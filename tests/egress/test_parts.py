"""The proxy's small parts: the listener, answers, records, denials, the dial."""

import re
import socket
from collections.abc import Iterator

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from sbxd.egress.answers import ANSWER_BYTES_MAX, Refusal, answer, refusal_of, unrecorded
from sbxd.egress.decisions import (
    Decision,
    DenialsCounted,
    EgressCounts,
    Outcome,
    ProxyReason,
    Record,
    RecordUnavailable,
    TunnelClosed,
    TunnelEnd,
)
from sbxd.egress.denials import Denials
from sbxd.egress.listening import ListenerUnusable, Listening
from sbxd.egress.recording import Recording
from sbxd.egress.sockets import PeerMismatch, dial, packed, require_peer
from sbxd.policy.egress import EgressRefusal, Refused
from tests.egress.world import bound

CLOSED = TunnelClosed(
    connection=1,
    host="a.example",
    port=443,
    address="192.0.2.1",
    up_bytes=3,
    down_bytes=5,
    duration_ms=1,
    end=TunnelEnd.FINISHED,
)


# --- the listener -------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bound() as sock:
        yield sock


def test_it_listens_again_while_earlier_connections_are_still_closing(
    listener: socket.socket,
) -> None:
    listening = Listening(listener, backlog=8)
    address = listener.getsockname()
    kept = []
    for _ in range(3):
        listening.begin()
        finished, open_still, waiting = (socket.create_connection(address) for _ in range(3))
        for _ in range(2):
            listener.setblocking(True)
            taken, _ = listener.accept()
            taken.close()  # by this side first: it holds the port in FIN_WAIT and TIME_WAIT
        finished.close()
        kept += [open_still, waiting]
        listening.end()
        with pytest.raises(ConnectionResetError):
            waiting.recv(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        assert listener.getsockname() == address
    for sock in kept:
        sock.close()


@pytest.mark.parametrize("wildcard", ["", None])
@pytest.mark.parametrize("during", ["before", "listening", "after"])
def test_nobody_else_can_be_bound_to_its_address(
    listener: socket.socket, during: str, wildcard: str | None
) -> None:
    listening = Listening(listener, backlog=8)
    host, port = listener.getsockname()
    if during != "before":
        listening.begin()
    if during == "after":
        listening.end()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind((host if wildcard is None else wildcard, port))


def test_control_the_option_alone_would_let_another_in(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(listener.getsockname())
        other.listen()


def test_a_socket_that_cannot_serve_is_refused() -> None:
    def refused(sock: socket.socket) -> None:
        with sock, pytest.raises(ListenerUnusable):
            Listening(sock, backlog=1)

    refused(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    refused(socket.socket(socket.AF_UNIX))
    refused(socket.socket())
    listens = bound()
    listens.listen()
    refused(listens)
    shared = bound()
    shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    refused(shared)


def test_a_port_that_the_kernel_chose_is_found_out_when_it_is_lost() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        listening = Listening(sock, backlog=1)
        listening.begin()
        listening.end()
        with pytest.raises(ListenerUnusable):
            listening.begin()
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


# --- answers ------------------------------------------------------------------------------------

REASONS = st.sampled_from([*ProxyReason, *EgressRefusal])
TEXTS = st.text(max_size=2000)


@given(
    st.builds(
        Refusal,
        reason=REASONS,
        detail=TEXTS,
        remedy=TEXTS,
        host=st.none() | TEXTS,
        port=st.none() | st.integers(),
        rule=st.none() | TEXTS,
    )
)
def test_no_text_adds_a_line_to_an_answer(refusal: Refusal) -> None:
    data = answer(refusal)
    assert len(data) <= ANSWER_BYTES_MAX
    head, separator, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert re.fullmatch(rb"HTTP/1\.1 (40[0358]|431|50[234]) [ -~]*", lines[0])
    names = [line.split(b":")[0] for line in lines[1:]]
    assert names[:5] == [
        *(b"Content-Type", b"Content-Length", b"Cache-Control", b"Proxy-Status", b"Connection"),
    ]
    assert set(names[5:]) <= {b"Allow", b"Retry-After"}
    assert separator
    assert len(body) == int(lines[2].split(b": ")[1])
    assert len(body.splitlines()) == (6 if refusal.host is not None else 4)
    assert re.fullmatch(rb"[\n -~]*", body)


@given(TEXTS, st.integers())
def test_nor_to_the_one_without_a_record(host: str, port: int) -> None:
    assert unrecorded(host, port).count(b"\r\n") == 6


def test_a_refused_address_is_not_told() -> None:
    refused = Refused(
        reason=EgressRefusal.HOST_NETWORK,
        host="a.example",
        port=443,
        detail="a.example resolves to 10.1.2.3",
        remedy="none",
        address="10.1.2.3",
        address_range="10.1.0.0/16",
    )
    assert b"10.1" not in answer(refusal_of(refused))
    listed = Refused(
        reason=EgressRefusal.HOST_NOT_LISTED, host="a.example", port=1, detail="why", remedy="none"
    )
    assert b"why: why\n" in answer(refusal_of(listed))


# --- records ------------------------------------------------------------------------------------


async def test_what_could_not_be_recorded_comes_before_anything_new() -> None:
    kept: list[Record] = []
    fails = True

    async def record(each: Record) -> None:
        if fails:
            raise RecordUnavailable
        kept.append(each)

    recording = Recording(record)
    counted = DenialsCounted(counts=((ProxyReason.MALFORMED, 7),))
    await recording.keep_or_hold(CLOSED)
    await recording.keep_or_hold(counted)
    with pytest.raises(RecordUnavailable):
        await recording.keep(CLOSED)
    assert list(recording.held) == [CLOSED, counted]
    fails = False
    await recording.keep(CLOSED)
    assert kept == [CLOSED, counted, CLOSED]
    assert not recording.held


async def test_a_recorder_that_hangs_is_given_up_also_under_cancellation(
    autojump_clock: MockClock,
) -> None:
    async def hang(_: Record) -> None:
        await trio.sleep_forever()

    recording, begun = Recording(hang), trio.current_time()
    with trio.CancelScope() as scope:
        scope.cancel()
        await recording.keep_or_hold(CLOSED)
    assert list(recording.held) == [CLOSED]
    assert 4 < trio.current_time() - begun < 6


def test_counts_come_of_records_alone() -> None:
    counts = EgressCounts()
    counts.observe(CLOSED)
    counts.observe(DenialsCounted(counts=((ProxyReason.MALFORMED, 7),)))
    for reason in (None, ProxyReason.MALFORMED, EgressRefusal.HOST_NOT_LISTED):
        counts.observe(
            Decision(
                connection=1,
                outcome=Outcome.ALLOWED if reason is None else Outcome.REFUSED,
                host=None,
                port=None,
                address=None,
                reason=reason,
                rule=None,
                decided_us=1,
            )
        )
    assert counts.allowed == 1
    assert counts.refusals == {ProxyReason.MALFORMED: 8, EgressRefusal.HOST_NOT_LISTED: 1}
    assert (counts.up_bytes, counts.down_bytes) == (3, 5)
    assert counts.ends == {TunnelEnd.FINISHED: 1}


def test_no_reason_of_the_proxy_is_one_of_the_policy() -> None:
    assert not {str(each) for each in ProxyReason} & {str(each) for each in EgressRefusal}


@pytest.mark.case("EGR-22")
@given(st.lists(st.floats(0, 3), max_size=200), st.integers(1, 20))
def test_every_denial_is_recorded_or_counted_and_the_rate_holds(
    pauses: list[float], rate: int
) -> None:
    denials, now, taken, counted = Denials(rate=rate, now=0.0), 0.0, [], 0
    for pause in pauses:
        now += pause
        if denials.take(now):
            taken.append(now)
        else:
            denials.count(ProxyReason.MALFORMED)
    summary = denials.counted()
    if summary is not None:
        denials.put_back(summary)
        again = denials.counted()
        assert again == summary
        counted = summary.total
    assert denials.counted() is None
    assert len(taken) + counted == len(pauses)
    for start in taken:
        assert sum(start <= each < start + 1 for each in taken) <= 2 * rate


# --- the dial -----------------------------------------------------------------------------------


async def test_a_dial_reaches_a_literal_address() -> None:
    with bound() as listener:
        listener.listen()
        address, port = listener.getsockname()
        with await dial(address, port) as sock:
            assert sock.getpeername() == (address, port)
            assert not sock.getblocking()


async def test_a_name_is_never_dialled() -> None:
    for name in ("localhost", "127.1", "", "::1%lo", "0x7f000001"):
        with pytest.raises(ValueError, match="literal"):
            await dial(name, 1)


async def test_a_dial_that_is_refused_says_so() -> None:
    with bound() as listener, pytest.raises(ConnectionRefusedError):
        await dial(*listener.getsockname())


@pytest.mark.case("EGR-07")
@pytest.mark.parametrize(
    "peer",
    [("192.0.2.2", 443), ("192.0.2.1", 444), ("::ffff:192.0.2.1", 443), ("garbage", 443)],
)
def test_another_peer_than_was_dialled_is_found_out(peer: tuple[str, int]) -> None:
    wanted = packed(socket.AF_INET, "192.0.2.1")
    require_peer(("192.0.2.1", 443), family=socket.AF_INET, wanted=wanted, port=443)
    with pytest.raises(PeerMismatch):
        require_peer(peer, family=socket.AF_INET, wanted=wanted, port=443)
