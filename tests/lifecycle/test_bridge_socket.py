"""The door of `namespaces` over a real socket: it opens once, and closing it is a refusal."""

import errno
import os
import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from sbxd.mechanism.bridge import SocketBridgeDoor
from sbxd.mechanism.protocol import BridgeStreamBroken, MechanismError

SECONDS = 30


def bound(path: Path) -> int:
    end = socket.socket(socket.AF_UNIX)
    end.bind(str(path))
    return end.detach()


async def program(path: Path) -> trio.SocketStream:
    return await trio.open_unix_socket(str(path))


async def test_a_program_and_the_daemon_talk_and_each_ends_its_direction(tmp_path: Path) -> None:
    place = tmp_path / "bridge"
    descriptor = bound(place)
    with pytest.raises(ConnectionRefusedError):
        await program(place)
    door = SocketBridgeDoor(descriptor, waiting_max=2)
    with trio.fail_after(SECONDS):
        end = await program(place)
        stream = await door.accept()
        async with end, trio.open_nursery() as nursery:
            large = b"x" * 1_000_000
            nursery.start_soon(stream.send, large)
            received = bytearray()
            while len(received) < len(large):
                received += await end.receive_some(65536)
            await end.send_all(b"done")
            await end.send_eof()
            assert await stream.receive() == b"done"
            assert await stream.receive() == b""
            stream.end()
            assert await end.receive_some(10) == b""
        stream.close()
        stream.close()
    door.close()
    with pytest.raises(ConnectionRefusedError):
        await program(place)


async def test_a_program_that_is_gone_is_an_end_and_a_broken_stream(tmp_path: Path) -> None:
    door = SocketBridgeDoor(bound(tmp_path / "bridge"), waiting_max=2)
    with trio.fail_after(SECONDS):
        end = await program(tmp_path / "bridge")
        stream = await door.accept()
        await end.aclose()
        assert await stream.receive() == b""
        with pytest.raises(BridgeStreamBroken):
            await stream.send(b"x")
        stream.end()
        stream.close()
        assert await stream.receive() == b""
    door.close()


async def test_a_door_that_closes_wakes_who_waits_for_a_connection(tmp_path: Path) -> None:
    door = SocketBridgeDoor(bound(tmp_path / "bridge"), waiting_max=2)
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(MechanismError):
                    await door.accept()

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            door.close()
        with pytest.raises(MechanismError):
            await door.accept()


async def test_no_more_than_so_many_connections_wait(tmp_path: Path) -> None:
    door = SocketBridgeDoor(bound(tmp_path / "bridge"), waiting_max=2)
    ends = [socket.socket(socket.AF_UNIX) for _ in range(10)]
    for end in ends:
        end.setblocking(False)
    answers = [end.connect_ex(str(tmp_path / "bridge")) for end in ends]
    assert answers == [0] * 3 + [errno.EAGAIN] * 7  # the kernel keeps one more than asked
    for end in ends:
        end.close()
    door.close()


async def test_what_cannot_be_listened_on_stays_the_callers() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = ours.detach()
        with pytest.raises(MechanismError) as refused:
            SocketBridgeDoor(descriptor, waiting_max=2)
        assert refused.value.errno == errno.EINVAL
        os.close(descriptor)  # an error if the door had closed it
