"""The daemon's end of the launcher's channel, against a peer that the test plays."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from sbxd.launcher import channel
from sbxd.launcher.requests import (
    Acknowledged,
    Destroy,
    Died,
    Failed,
    Inventory,
    LauncherReply,
    LauncherRequest,
)
from sbxd.mechanism.launcher_client import (
    LauncherClient,
    LauncherLost,
    LauncherRefused,
    serving,
)
from sbxd.port.ids import EnvironmentId

ENVIRONMENT = EnvironmentId("ab" * 16)


class Peer:
    """The launcher's end."""

    def __init__(self, end: socket.socket) -> None:
        self.end = trio.socket.from_stdlib_socket(end)

    async def next(self) -> LauncherRequest:
        return channel.decode_request(await self.end.recv(65536))

    async def reply(self, reply: LauncherReply, *descriptors: int) -> None:
        await self.end.sendmsg([channel.encode(reply)], channel.ancillary(descriptors))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[LauncherClient, Peer]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        async with serving(trio.socket.from_stdlib_socket(ours)) as client:
            yield client, Peer(theirs)


def inventory(ticket: int) -> Inventory:
    return Inventory(ticket=ticket)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_replies_find_their_requests_in_any_order() -> None:
    answers: dict[str, int] = {}

    async with connected() as (client, peer):

        async def ask(name: str) -> None:
            with await client.request(inventory) as answer:
                answers[name] = answer.reply.ticket

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            first = await peer.next()
            nursery.start_soon(ask, "b")
            second = await peer.next()
            await peer.reply(Acknowledged(ticket=second.ticket))
            await peer.reply(Acknowledged(ticket=first.ticket))
    assert answers == {"a": first.ticket, "b": second.ticket}
    assert first.ticket != second.ticket


async def test_a_failure_is_raised_with_its_step() -> None:
    async with connected() as (client, peer), trio.open_nursery() as nursery:

        async def refuse() -> None:
            request = await peer.next()
            failed = Failed(ticket=request.ticket, step="volume", errno=28, detail="no space")
            await peer.reply(failed)

        nursery.start_soon(refuse)
        with pytest.raises(LauncherRefused) as caught:
            await client.request(inventory)
        assert (caught.value.step, caught.value.errno) == ("volume", 28)


async def test_descriptors_belong_to_the_answer_and_close_with_it() -> None:
    async with connected() as (client, peer), trio.open_nursery() as nursery:

        async def answer() -> None:
            request = await peer.next()
            await peer.reply(Acknowledged(ticket=request.ticket), 0, 0)

        before = open_descriptors()
        nursery.start_soon(answer)
        with await client.request(inventory) as got:
            assert len(got.descriptors) == 2
            taken = got.take()
        for descriptor in taken:
            os.fstat(descriptor)
            os.close(descriptor)
        nursery.start_soon(answer)
        with await client.request(inventory):
            pass
        assert open_descriptors() == before


async def test_the_descriptors_of_a_request_that_was_cancelled_are_closed() -> None:
    async with connected() as (client, peer):
        before = open_descriptors()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.request, inventory)
                request = await peer.next()
                scope.cancel()
        await peer.reply(Acknowledged(ticket=request.ticket), 0, 0)
        await trio.testing.wait_all_tasks_blocked()
        assert open_descriptors() == before


async def test_the_end_of_the_channel_ends_every_wait() -> None:
    async with connected() as (client, peer), trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(LauncherLost):
                await client.request(inventory)

        nursery.start_soon(ask)
        nursery.start_soon(ask)
        nursery.start_soon(client.wait_lost)
        await trio.testing.wait_all_tasks_blocked()
        peer.end.close()
    with pytest.raises(LauncherLost):
        await client.request(inventory)


@pytest.mark.parametrize("raw", [b"\0", b"nonsense", channel.encode(inventory(1))])
async def test_what_is_no_reply_ends_the_channel(raw: bytes) -> None:
    async with connected() as (client, peer):
        await peer.end.send(raw)
        with trio.fail_after(60):
            await client.wait_lost()


class Notes:
    """Remembers what it is told of one environment."""

    def __init__(self) -> None:
        self.deaths: list[Died] = []
        self.losses = 0

    def on_death(self, died: Died) -> None:
        self.deaths.append(died)

    def on_launcher_lost(self) -> None:
        self.losses += 1


async def test_a_death_is_told_to_who_asked_for_it() -> None:
    notes = Notes()
    death = Died(ticket=1, environment_id=ENVIRONMENT, process="init", wait_status=9)
    async with connected() as (client, peer):
        await peer.reply(death)  # nobody asked yet
        await trio.testing.wait_all_tasks_blocked()
        client.watch(ENVIRONMENT, notes)
        await peer.reply(death)
        await trio.testing.wait_all_tasks_blocked()
        client.unwatch(ENVIRONMENT)
        await peer.reply(death)
        await trio.testing.wait_all_tasks_blocked()
    assert notes.deaths == [death]


async def test_the_launchers_loss_is_told_once_to_every_environment_of_it() -> None:
    early, late = Notes(), Notes()
    async with connected() as (client, peer):
        client.watch(ENVIRONMENT, early)
        peer.end.close()
        with trio.fail_after(60):
            await client.wait_lost()
        client.watch("cd" * 16, late)
    assert (early.losses, late.losses) == (1, 1)


async def test_a_reply_that_nobody_asked_for_changes_nothing() -> None:
    async with connected() as (client, peer), trio.open_nursery() as nursery:
        await peer.reply(Acknowledged(ticket=99), 0)

        async def answer() -> None:
            request = await peer.next()
            assert request == Destroy(ticket=request.ticket, environment_id=ENVIRONMENT)
            await peer.reply(Acknowledged(ticket=request.ticket))

        nursery.start_soon(answer)
        with await client.request(
            lambda ticket: Destroy(ticket=ticket, environment_id=ENVIRONMENT)
        ):
            pass
