"""The daemon's end of an environment's init, against a peer that the test plays."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from sbxd.jail import frames
from sbxd.mechanism.init_client import InitClient, exit_of
from sbxd.mechanism.protocol import CommandExit, MechanismError, SandboxLost

RUN = frames.Run(1, b".", (b"true",), (), b"/bin")
STREAMS = (0, 0, 0)


class Peer:
    """Init's end."""

    def __init__(self, end: socket.socket) -> None:
        self.end = trio.socket.from_stdlib_socket(end)
        self.lost = 0

    async def next(self) -> frames.Frame:
        raw, control, _, _ = await self.end.recvmsg(frames.FRAME_BYTES_MAX, 1024)
        for _, _, data in control:
            for start in range(0, len(data), 4):
                os.close(int.from_bytes(data[start : start + 4], "little"))
        return frames.decode(raw)

    async def say(self, frame: frames.Frame) -> None:
        await self.end.send(frames.encode(frame))

    def count(self) -> None:
        self.lost += 1


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[InitClient, Peer]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = Peer(theirs)
        client = InitClient(trio.socket.from_stdlib_socket(ours), peer.count)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.read)
            yield client, peer
            nursery.cancel_scope.cancel()


async def park(client: InitClient, peer: Peer) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.park, 1, 0)
        assert await peer.next() == frames.Park(1)
        await peer.say(frames.Parked(1))


async def test_a_command_parks_runs_and_ends() -> None:
    async with connected() as (client, peer):
        await park(client, peer)

        async def play() -> None:
            assert await peer.next() == RUN
            await peer.say(frames.Started(1))
            await peer.say(frames.Exited(1, 3 << 8))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(play)
            assert await client.run(RUN, STREAMS) is None
            assert await client.wait_exit(1) == CommandExit(exit_code=3, signal=None)


async def test_a_command_that_is_killed_before_its_answer_still_has_an_end() -> None:
    async with connected() as (client, peer):
        await park(client, peer)

        async def play() -> None:
            await peer.next()
            await peer.say(frames.Exited(1, 9))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(play)
            assert await client.run(RUN, STREAMS) is None
            assert await client.wait_exit(1) == CommandExit(exit_code=None, signal=9)


async def test_a_refusal_of_the_program_is_returned_and_one_of_the_child_is_raised() -> None:
    async with connected() as (client, peer):
        await park(client, peer)
        refusal = frames.RunFailed(1, 2, "execute")

        async def play() -> None:
            await peer.next()
            await peer.say(refusal)
            await peer.next()
            await peer.say(frames.RunFailed(2, 11, "clone"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(play)
            assert await client.run(RUN, STREAMS) == refusal
            with pytest.raises(MechanismError) as caught:
                await client.park(2, 0)
            assert not isinstance(caught.value, SandboxLost)
            assert caught.value.errno == 11


async def test_the_end_of_init_ends_every_wait_and_is_told_once() -> None:
    async with connected() as (client, peer):
        await park(client, peer)

        async def wait() -> None:
            with pytest.raises(SandboxLost):
                await client.wait_exit(1)

        async def run() -> None:
            with pytest.raises(SandboxLost):
                await client.run(RUN, STREAMS)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            peer.end.close()
        client.lose()
        assert client.is_lost
        assert peer.lost == 1
        with pytest.raises(SandboxLost):
            await client.park(2, 0)


@pytest.mark.parametrize("raw", [b"\xff", b"", frames.encode(frames.Park(1)), frames.encode(RUN)])
async def test_what_init_has_no_business_to_say_loses_the_environment(raw: bytes) -> None:
    async with connected() as (client, peer):
        await peer.end.send(raw)
        await trio.testing.wait_all_tasks_blocked()
        assert client.is_lost
        assert peer.lost == 1


async def test_words_about_a_number_that_was_given_up_are_ignored() -> None:
    async with connected() as (client, peer):
        await park(client, peer)
        client.forget(1)
        await peer.say(frames.Exited(1, 0))
        await trio.testing.wait_all_tasks_blocked()
        assert not client.is_lost


async def test_a_frame_above_the_cap_is_the_callers_failure_and_not_a_loss() -> None:
    async with connected() as (client, peer):
        await park(client, peer)
        long = frames.Run(1, b".", (b"x" * frames.FRAME_BYTES_MAX,), (), b"/bin")
        with pytest.raises(MechanismError) as caught:
            await client.run(long, STREAMS)
        assert caught.value.step == "frame"
        assert not client.is_lost


@given(st.integers(0, 255), st.integers(1, 64))
def test_an_exit_is_a_code_or_a_signal_and_never_both(code: int, signal: int) -> None:
    assert exit_of(code << 8) == CommandExit(exit_code=code, signal=None)
    assert exit_of(signal) == CommandExit(exit_code=None, signal=signal)


@pytest.mark.parametrize(
    ("how", "is_gone"), [("dies", True), ("released", False), ("given up", False), ("lost", False)]
)
async def test_whether_a_parked_child_is_gone_by_itself_is_known(how: str, is_gone: bool) -> None:
    async with connected() as (client, peer):
        await park(client, peer)
        found: list[bool] = []

        async def watch() -> None:
            found.append(await client.wait_unparked(1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await trio.testing.wait_all_tasks_blocked()
            match how:
                case "dies":
                    await peer.say(frames.RunFailed(1, 3, "park"))
                case "released":
                    await peer.say(frames.Started(1))
                case "given up":
                    client.forget(1)
                case _:
                    client.lose()
        assert found == [is_gone]
        assert await client.wait_unparked(77) is False
