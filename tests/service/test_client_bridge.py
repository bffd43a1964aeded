"""The client's end of a bridge under asyncio and trio, against a daemon that the test plays."""

from typing import Any

import anyio
import msgspec
import pytest

from sbxd.client.bridge import BridgeHandler, BridgeHoldExceeded
from sbxd.client.remote import Hooks, connect
from sbxd.port.command import KillReason
from sbxd.port.errors import ExecutionUnavailable, UnavailableCode
from sbxd.wire import messages as m
from sbxd.wire.bridge import cost_bytes
from sbxd.wire.framing import encode_frame
from tests.properties.test_wire_legality import HANDLE
from tests.service.played import COMMAND, Daemon, Play, executed, output, playing, run


class Mine(Exception):
    """The handler's own."""


async def upper(frame: bytes) -> bytes:
    return frame.upper()


def frame(data: bytes) -> m.BridgeFrame:
    return m.BridgeFrame(request_id=1, data=data)


async def opened(daemon: Daemon) -> m.Execute:
    """Greet, take the Execute, and open its bridge."""
    await daemon.greet()
    request: m.Execute = await daemon.expect(m.Execute)
    assert request.bridge
    await daemon.send(m.BridgeOpened(request_id=1))
    return request


def execute(backend: str, path: str, play: Play, handler: BridgeHandler, **hooks: Any) -> Any:
    """What `execute` with this handler returns or raises, when the daemon plays so."""
    results: list[Any] = []

    async def main() -> None:
        async with (
            playing(path, play),
            connect(path, hooks=Hooks(bridge=handler, **hooks)) as environment,
        ):
            try:
                results.append(await environment.execute(HANDLE, COMMAND))
            except (Mine, ValueError, BridgeHoldExceeded, ExecutionUnavailable) as raised:
                results.append(raised)

    run(backend, main)
    return results[0]


def test_frames_are_answered_in_order_beside_output(backend: str, path: str) -> None:
    async def play(daemon: Daemon) -> None:
        await opened(daemon)
        for data in (b"a", b"b"):
            await daemon.send(frame(data))
        await daemon.send(output(1, b"out"))
        assert [(await daemon.expect(m.BridgeFrame)).data for _ in range(2)] == [b"A", b"B"]
        await daemon.send(m.BridgeClosed(request_id=1, reason=m.BridgeEnd.ENDED))
        await daemon.expect(m.BridgeClose)
        await daemon.send(executed(1))
        assert await daemon.receive() is None

    assert execute(backend, path, play, upper).stdout == b"out"


def test_without_a_handler_none_is_asked_for(backend: str, path: str) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        request = await daemon.expect(m.Execute)
        assert not request.bridge
        await daemon.send(executed(1))
        assert await daemon.receive() is None

    async def main() -> None:
        async with playing(path, play), connect(path) as environment:
            await environment.execute(HANDLE, COMMAND)

    run(backend, main)


def test_a_daemon_that_opens_a_bridge_unasked_has_broken_the_protocol(
    backend: str, path: str
) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        await daemon.expect(m.Execute)
        raw = msgspec.msgpack.encode(m.BridgeOpened(request_id=1))
        await daemon.stream.send(encode_frame(raw, frame_bytes_max=4096))  # past our own table
        while await daemon.receive() is not None:
            pass

    async def main() -> None:
        async with playing(path, play), connect(path) as environment:
            with pytest.raises(ExecutionUnavailable) as lost:
                await environment.execute(HANDLE, COMMAND)
            assert "asked for no bridge" in lost.value.detail

    run(backend, main)


def test_what_the_handler_raises_cancels_the_command_and_comes_out_as_it_is(
    backend: str, path: str
) -> None:
    cancelled: list[KillReason | None] = []

    async def handler(_frame: bytes) -> bytes:
        raise Mine

    async def play(daemon: Daemon) -> None:
        await opened(daemon)
        await daemon.send(frame(b"a"))
        await daemon.expect(m.Cancel)
        await daemon.send(frame(b"crossed with the cancel"))
        await daemon.send(executed(1, KillReason.CANCELLED))
        assert await daemon.receive() is None

    raised = execute(
        backend,
        path,
        play,
        handler,
        on_cancelled=lambda result: cancelled.append(result.killed_by),
    )
    assert isinstance(raised, Mine)
    assert cancelled == [KillReason.CANCELLED]


@pytest.mark.parametrize("reply", [b"", b"x" * (m.BRIDGE_FRAME_BYTES_MAX + 1)])
def test_a_reply_that_is_no_frame_is_the_handlers_mistake(
    backend: str, path: str, reply: bytes
) -> None:
    async def handler(_frame: bytes) -> bytes:
        return reply

    async def play(daemon: Daemon) -> None:
        await opened(daemon)
        await daemon.send(frame(b"a"))
        await daemon.expect(m.Cancel)
        await daemon.send(executed(1, KillReason.CANCELLED))
        assert await daemon.receive() is None

    raised = execute(backend, path, play, handler)
    assert isinstance(raised, ValueError)
    assert "is not between" in str(raised)


def test_a_call_that_is_held_too_long_cancels_the_command(backend: str, path: str) -> None:
    async def never(_frame: bytes) -> bytes:
        await anyio.sleep_forever()
        raise AssertionError

    async def play(daemon: Daemon) -> None:
        await opened(daemon)
        await daemon.send(frame(b"a"))
        await daemon.expect(m.Cancel)
        await daemon.send(executed(1, KillReason.CANCELLED))
        assert await daemon.receive() is None

    raised = execute(backend, path, play, never, approval_hold_seconds=0.05)
    assert isinstance(raised, BridgeHoldExceeded)


def test_a_handler_that_runs_is_cancelled_when_the_command_ends(backend: str, path: str) -> None:
    ended: list[str] = []

    async def never(_frame: bytes) -> bytes:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("cancelled")
        raise AssertionError

    async def play(daemon: Daemon) -> None:
        await opened(daemon)
        await daemon.send(frame(b"a"))
        await daemon.send(executed(1, KillReason.TIMEOUT))
        assert await daemon.receive() is None

    assert execute(backend, path, play, never).killed_by is KillReason.TIMEOUT
    assert ended in ([], ["cancelled"])  # it need not have begun


def test_a_lost_connection_is_unreachable_also_while_a_handler_runs(
    backend: str, path: str
) -> None:
    async def never(_frame: bytes) -> bytes:
        await anyio.sleep_forever()
        raise AssertionError

    async def play(daemon: Daemon) -> None:
        await opened(daemon)
        await daemon.send(frame(b"a"))

    raised = execute(backend, path, play, never)
    assert isinstance(raised, ExecutionUnavailable)
    assert raised.code is UnavailableCode.UNREACHABLE


def test_credit_goes_back_as_frames_are_answered_and_replies_wait_for_theirs(
    backend: str, path: str
) -> None:
    size = m.BRIDGE_FRAME_BYTES_MAX
    count = 12  # three windows in each direction

    async def play(daemon: Daemon) -> None:
        await opened(daemon)
        sent = received = 0
        while received < count:
            credit = daemon.connection.bridge_credit_bytes(1)
            if sent < count and credit >= cost_bytes(b"x" * size):
                await daemon.send(frame(b"a" * size))
                sent += 1
                continue
            message = await daemon.receive()
            if isinstance(message, m.BridgeFrame):
                assert message.data == b"A" * size
                received += 1
                await daemon.send(m.BridgeCredit(request_id=1, size_bytes=cost_bytes(message.data)))
            else:
                assert isinstance(message, m.BridgeCredit)
        await daemon.send(executed(1))
        while await daemon.receive() is not None:
            pass

    assert execute(backend, path, play, upper).exit_code == 0
