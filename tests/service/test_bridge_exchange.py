"""The daemon's end of a bridge on the wire: within the credit, bounded, and only where asked."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.fake.script import Outcome, Script
from sbxd.port.environment import BRIDGE_SOCKET_PATH, BridgeEndpoint
from sbxd.service.bridge import CREDIT_BATCH_BYTES
from sbxd.service.exchange import Exchange
from sbxd.wire import messages as m
from sbxd.wire.bridge import cost_bytes
from tests.properties.test_wire_legality import HANDLE
from tests.service.memory import memory_daemon
from tests.service.raw import RawEnd, greeted_client
from tests.service.requests import SPECIFICATION, command
from tests.service.test_exchange import Pair, greeted

ENDPOINT = BridgeEndpoint(socket_path=BRIDGE_SOCKET_PATH, token="t" * 32)
TALK = Script(
    by_argv={
        ("talk",): Outcome(bridge=(b"one", b"two")),
        ("shout",): Outcome(bridge=(b"x" * 200_000,) * 40),
        ("true",): Outcome(),
    }
)


def execute(request_id: int = 1, *, handle: object = HANDLE, argv: str = "talk") -> m.Execute:
    return m.Execute(
        request_id=request_id,
        handle=handle,  # type: ignore[arg-type]
        command=command(argv),
        bridge=True,
    )


def executing() -> tuple[Pair, Exchange]:
    pair = greeted()
    pair.to_server(execute())
    return pair, Exchange(1, pair.server, pair.outgoing)


async def flushed(pair: Pair) -> list[m.Message]:
    """What was queued, received; nothing when nothing was."""
    try:
        return await pair.flush()
    except trio.WouldBlock:
        return []


async def test_frames_keep_to_the_clients_credit_and_wait_for_it(
    autojump_clock: MockClock,
) -> None:
    pair, exchange = executing()
    data = b"x" * 100_000
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        await exchange.bridge.opened()
        for _ in range(30):
            await exchange.bridge.send(data)
            sent += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_all)
        received: list[m.BridgeFrame] = []
        turns = 1
        while len(received) < 30:
            new = [msg for msg in await flushed(pair) if isinstance(msg, m.BridgeFrame)]
            if not new:
                assert sent == len(received) == 10 * turns
                turns += 1
                for _ in range(10):
                    pair.to_server(m.BridgeCredit(request_id=1, size_bytes=cost_bytes(data)))
                exchange.bridge.take_credit()
            received += new


async def test_credit_for_the_clients_frames_goes_back_as_they_are_taken(
    autojump_clock: MockClock,
) -> None:
    pair, exchange = executing()
    await exchange.bridge.opened()
    await pair.flush()
    data = b"x" * 100_000
    for _ in range(4):
        pair.to_server(m.BridgeFrame(request_id=1, data=data))
        exchange.bridge.take_frame(data)
    for _ in range(3):
        assert await exchange.bridge.receive() == data
    assert await flushed(pair) == []
    assert await exchange.bridge.receive() == data
    (credit,) = await pair.flush()
    assert credit == m.BridgeCredit(request_id=1, size_bytes=3 * cost_bytes(data))
    assert 3 * cost_bytes(data) >= CREDIT_BATCH_BYTES
    exchange.bridge.take_close()
    assert await exchange.bridge.receive() is None


@asynccontextmanager
async def raw_worker() -> AsyncIterator[RawEnd]:
    """A worker that speaks message by message, with an environment that has a bridge."""
    async with memory_daemon(TALK) as daemon:
        yield await greeted_client(await daemon.connect())


async def provisioned(raw: RawEnd) -> object:
    specification = msgspec.structs.replace(SPECIFICATION, bridge=ENDPOINT)
    await raw.send(m.Provision(request_id=1, specification=specification))
    reply = await raw.receive()
    assert isinstance(reply, m.Provisioned), reply
    return reply.handle


async def test_a_turn_over_the_wire_message_by_message(autojump_clock: MockClock) -> None:
    async with raw_worker() as raw:
        handle = await provisioned(raw)
        await raw.send(execute(2, handle=handle))
        assert await raw.receive() == m.BridgeOpened(request_id=2)
        for word in (b"one", b"two"):
            assert await raw.receive() == m.BridgeFrame(request_id=2, data=word)
            await raw.send(m.BridgeFrame(request_id=2, data=word.upper()))
        assert await raw.receive() == m.BridgeClosed(request_id=2, reason=m.BridgeEnd.ENDED)
        out = await raw.receive()
        assert isinstance(out, m.Output)
        assert out.data == b"ONETWO"
        assert isinstance(await raw.receive(), m.Executed)


async def test_a_worker_that_returns_no_credit_gets_no_more_than_its_window(
    autojump_clock: MockClock,
) -> None:
    async with raw_worker() as raw:
        handle = await provisioned(raw)
        await raw.send(execute(2, handle=handle, argv="shout"))
        assert isinstance(await raw.receive(), m.BridgeOpened)
        taken = 0
        while raw.connection.bridge_credit_bytes(2) is not None:
            with trio.move_on_after(5) as waited:
                message = await raw.receive()
                assert isinstance(message, m.BridgeFrame)
                taken += len(message.data)
                await raw.send(m.BridgeFrame(request_id=2, data=b"ok"))
            if waited.cancelled_caught:
                break
        assert taken == 5 * 200_000  # of eight million
        await raw.send(m.Cancel(request_id=2))
        while not isinstance(message := await raw.receive(), m.Executed):
            assert message is not None
        assert message.killed_by == "CANCELLED"


@pytest.mark.parametrize(
    "message",
    [
        m.BridgeFrame(request_id=2, data=b"x"),
        m.BridgeClose(request_id=2),
        m.BridgeCredit(request_id=2, size_bytes=1),
    ],
    ids=["frame", "close", "credit"],
)
async def test_who_speaks_over_a_bridge_that_was_not_asked_for_is_sent_away(
    message: m.Message, autojump_clock: MockClock
) -> None:
    async with raw_worker() as raw:
        handle = await provisioned(raw)
        plain = msgspec.structs.replace(execute(2, handle=handle), bridge=False)
        script_that_waits = msgspec.structs.replace(plain, stdin_bytes=1)
        await raw.send(script_that_waits)
        await raw.send_illegal(message)
        farewell = (await raw.receive_all())[-1]
        assert isinstance(farewell, m.Goodbye)
        assert farewell.code is m.GoodbyeCode.PROTOCOL


async def test_what_crosses_with_the_result_is_dropped(autojump_clock: MockClock) -> None:
    async with raw_worker() as raw:
        handle = await provisioned(raw)
        await raw.send(execute(2, handle=handle, argv="true"))
        await wait_all_tasks_blocked()
        await raw.send_illegal(
            m.BridgeFrame(request_id=2, data=b"late"), m.BridgeClose(request_id=2)
        )
        await raw.send(m.Ping(token=7))
        while (received := await raw.receive()) != m.Pong(token=7):
            assert isinstance(received, m.Executed)
