"""The door of `namespaces` over a real socket: it opens once, and closing it is a refusal."""

import errno
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from sbxd.mechanism.bridge import BridgeDoors, SocketBridgeDoor
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


LINGER_SECONDS = 40  # far above what a busy machine takes for what does not wait for it


def lingering_pair() -> tuple[socket.socket, socket.socket]:
    """A TCP socket whose close takes LINGER_SECONDS, and the other end that holds it up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    first.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            first.send(b"x" * 65536)
    linger = struct.pack("ii", 1, LINGER_SECONDS)
    first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    first.setblocking(True)
    return first, second


def send_lingering(path: Path) -> socket.socket:
    """A connection whose first byte brings descriptors whose close takes long."""
    end = socket.socket(socket.AF_UNIX)
    end.connect(str(path))
    first, second = lingering_pair()
    socket.send_fds(end, [b"x"], [first.fileno(), second.fileno()])
    os.close(first.detach())
    os.close(second.detach())
    return end


async def test_descriptors_that_take_long_to_close_hold_up_their_own_door_alone(
    tmp_path: Path,
) -> None:
    """Received in the event loop, they would stop the whole daemon for as long as they like."""
    doors = BridgeDoors(stuck_max=1)
    door = doors.open(bound(tmp_path / "bridge"), waiting_max=4)
    with trio.fail_after(SECONDS):
        with send_lingering(tmp_path / "bridge"), send_lingering(tmp_path / "bridge"):
            started = trio.current_time()
            received = await door.accept()
            with trio.move_on_after(0.2) as waited:
                await received.receive()
            assert waited.cancelled_caught, "the control: the kernel is held up by it"
            received.close()
            door.close()  # with the second connection never accepted
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            assert trio.current_time() - started < LINGER_SECONDS / 2
        assert not door.is_done, "its thread waits still"
        other = bound(tmp_path / "other")
        with pytest.raises(MechanismError) as busy:
            doors.open(other, waiting_max=4)
        assert busy.value.errno == errno.EBUSY
        os.close(other)


async def test_doors_that_are_closed_and_done_count_no_more(tmp_path: Path) -> None:
    doors = BridgeDoors(stuck_max=1)
    for number in range(5):
        place = tmp_path / str(number)
        door = doors.open(bound(place), waiting_max=4)
        with trio.fail_after(SECONDS):
            end = await program(place)
            stream = await door.accept()
            await end.send_all(b"x")
            assert await stream.receive() == b"x"
            stream.close()
            door.close()
            await door.wait_closed()
            await end.aclose()
        assert door.is_done
