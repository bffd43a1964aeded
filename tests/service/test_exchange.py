"""A handler sends within the client's credit and takes an upload to its last byte."""

from dataclasses import dataclass

import msgspec
import pytest
import trio

from sbxd.port.command import ChangeKind, FileChange
from sbxd.service.exchange import CREDIT_BATCH_BYTES, Exchange
from sbxd.service.outgoing import Outgoing, PeerStalled
from sbxd.wire import messages as m
from sbxd.wire.connection import ClientConnection, Pause, ServerConnection
from sbxd.wire.errors import LocalProtocolError
from sbxd.wire.legality import Role
from tests.properties.test_wire_legality import HANDLE
from tests.service.raw import HELLO, WELCOME, Stuck
from tests.service.requests import command

QUEUE_BYTES = 2 * 1024 * 1024  # more than all credit of one request


@dataclass
class Pair:
    """Two connections; the test carries the bytes."""

    client: ClientConnection
    server: ServerConnection
    outgoing: Outgoing
    stream: trio.testing.MemorySendStream

    def to_server(self, message: m.Message) -> None:
        self.server.receive_data(self.client.send(message))
        while not isinstance(self.server.next_event(), Pause):
            pass

    async def flush(self) -> list[m.Message]:
        """Write what is queued and receive it."""
        with trio.move_on_after(0.1):
            await self.outgoing.run()
        self.client.receive_data(bytes(self.stream.get_data_nowait()))
        received: list[m.Message] = []
        while not isinstance(event := self.client.next_event(), Pause):
            received.append(event)
        return received


def greeted() -> Pair:
    client, server = ClientConnection(role=Role.WORKER), ServerConnection(role=Role.WORKER)
    server.receive_data(client.send(HELLO))
    server.next_event()
    client.receive_data(server.send(WELCOME))
    client.next_event()
    stream = trio.testing.MemorySendStream()
    return Pair(
        client, server, Outgoing(stream, server, stall_seconds=9, bytes_max=QUEUE_BYTES), stream
    )


def executing(stdin_bytes: int = 0, maximum_output_bytes: int = 8 * 2**20) -> tuple[Pair, Exchange]:
    pair = greeted()
    pair.to_server(
        m.Execute(
            request_id=1,
            handle=HANDLE,
            command=command("true", maximum_output_bytes=maximum_output_bytes),
            stdin_bytes=stdin_bytes,
        )
    )
    return pair, Exchange(1, pair.server, pair.outgoing)


async def test_two_streams_share_the_credit_and_both_wake_when_it_returns(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pair, exchange = executing()
    size = m.INITIAL_CREDIT_BYTES
    async with trio.open_nursery() as nursery:
        for stream in m.OutputStream:
            nursery.start_soon(exchange.send_output, stream, b"x" * size)
        received: list[m.Output] = []
        while sum(len(message.data) for message in received) < 2 * size:
            new = [message for message in await pair.flush() if isinstance(message, m.Output)]
            received += new
            for message in new:
                pair.to_server(m.Credit(request_id=1, size_bytes=len(message.data)))
                exchange.take_credit()
    for stream in m.OutputStream:
        assert sum(len(x.data) for x in received if x.stream is stream) == size
    assert all(len(x.data) <= m.CHUNK_BYTES_MAX for x in received)


async def test_without_credit_nothing_more_is_sent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pair, exchange = executing()
    with trio.move_on_after(1) as scope:
        await exchange.send_output(m.OutputStream.STDOUT, b"x" * (m.INITIAL_CREDIT_BYTES + 1))
    assert scope.cancelled_caught
    sent = [message for message in await pair.flush() if isinstance(message, m.Output)]
    assert sum(len(message.data) for message in sent) == m.INITIAL_CREDIT_BYTES


async def test_a_handler_that_sends_more_than_was_asked_for_is_a_bug_and_does_not_hang(
    autojump_clock: trio.testing.MockClock,
) -> None:
    _, exchange = executing(maximum_output_bytes=10)
    with trio.fail_after(1), pytest.raises(LocalProtocolError):
        await exchange.send_output(m.OutputStream.STDOUT, b"x" * 21)


async def test_an_upload_is_whole_and_its_credit_goes_back_as_it_is_taken(
    autojump_clock: trio.testing.MockClock,
) -> None:
    total = 3 * CREDIT_BATCH_BYTES
    pair, exchange = executing(stdin_bytes=total)
    taken = []

    async def take() -> None:
        taken.extend([piece async for piece in exchange.upload()])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        for n in range(total // 1024):
            data = bytes([n % 256]) * 1024
            pair.to_server(m.Upload(request_id=1, data=data))
            exchange.take_upload(data)
            await trio.lowlevel.checkpoint()
    assert b"".join(taken) == b"".join(bytes([n % 256]) * 1024 for n in range(total // 1024))
    credit = [x.size_bytes for x in await pair.flush() if isinstance(x, m.Credit)]
    assert sum(credit) >= total - CREDIT_BATCH_BYTES
    assert all(size >= CREDIT_BATCH_BYTES for size in credit)


async def test_an_upload_of_nothing_ends_at_once() -> None:
    _, exchange = executing()
    assert [piece async for piece in exchange.upload()] == []


async def test_an_upload_that_was_cancelled_midway_never_looks_complete(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pair, exchange = executing(stdin_bytes=10)
    pair.to_server(m.Upload(request_id=1, data=b"12345"))
    exchange.take_upload(b"12345")
    pair.to_server(m.Cancel(request_id=1))
    ended = False
    with exchange.scope:
        exchange.cancel()
        async for _ in exchange.upload():
            pass
        ended = True
    assert not ended


def change(n: int, name: str = "x" * 4000) -> FileChange:
    return FileChange(path=f"{n}-{name}", change=ChangeKind.CREATED, size_bytes=n, sha256=None)


async def test_a_listing_is_cut_into_frames_that_fit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pair, exchange = executing()
    changes = [change(n) for n in range(600)]
    received: list[m.WireChange] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.send_entries, changes)
        while len(received) < len(changes):
            for message in await pair.flush():
                assert isinstance(message, m.Entries)
                assert len(msgspec.msgpack.encode(message)) < m.FRAME_BYTES_MAX
                received += message.entries
    assert [entry.size_bytes for entry in received] == list(range(600))


async def test_what_waits_to_be_written_is_bounded_for_any_number_of_senders(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pair = greeted()
    exchanges = []
    for request_id in range(1, 21):
        pair.to_server(m.Execute(request_id=request_id, handle=HANDLE, command=command("true")))
        exchanges.append(Exchange(request_id, pair.server, pair.outgoing))
    async with trio.open_nursery() as nursery:
        for exchange in exchanges:
            nursery.start_soon(exchange.send_output, m.OutputStream.STDOUT, b"x" * 2**20)
        await trio.testing.wait_all_tasks_blocked()
        assert QUEUE_BYTES <= pair.outgoing.waiting_bytes <= QUEUE_BYTES + m.CHUNK_BYTES_MAX + 100
        nursery.cancel_scope.cancel()


async def test_a_peer_that_takes_nothing_is_given_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pair = greeted()
    outgoing = Outgoing(Stuck(trio.testing.MemoryReceiveStream(), 0), pair.server, stall_seconds=9)
    outgoing.queue(m.Ping(token=1))
    with pytest.raises(PeerStalled):
        await outgoing.run()
    assert trio.current_time() == 9


async def test_finish_writes_what_is_queued_and_the_farewell_last(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pair = greeted()
    pair.outgoing.queue(m.Ping(token=1))
    pair.outgoing.finish(m.Goodbye(reason="over"))
    assert await pair.flush() == [m.Ping(token=1), m.Goodbye(reason="over")]
