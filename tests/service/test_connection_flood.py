"""Whoever connects without end costs nobody else a place, and the service neither a task nor a
record for each connection."""

import configparser
import socket
from pathlib import Path

import anyio
import pytest
import trio
from trio.testing import MockClock

from sbxd import doors
from sbxd.audit.counted_events import RefusalsCounted
from sbxd.audit.events import Door, PeerRefusal, PeerRefused
from sbxd.client import unix
from sbxd.closing import Closers
from sbxd.metrics.sink import CountedSink
from sbxd.policy.arrivals import ARRIVALS_MAX, BROKEN_MAX, BROKEN_SECONDS
from sbxd.service.listener import BATCH_MAX, DoorListener, Service
from sbxd.service.peer import PeerCredentials
from sbxd.service.unix import PeerStream, UnixListener
from sbxd.wire import messages as m
from sbxd.wire.connection import ClientConnection
from sbxd.wire.legality import Role
from tests.gates.source import REPOSITORY
from tests.pacing import next_look
from tests.service.memory import LOG, MemoryDaemon, memory_daemon
from tests.service.raw import HELLO, greeted_client, raw_client
from tests.service.requests import SCRIPT
from tests.service.test_listener import with_service

FLOOD = 400
SECONDS_MAX = 60


def of_uid(uid: int) -> PeerCredentials:
    return PeerCredentials(pid=uid, uid=uid, gid=uid, groups=frozenset({uid}))


HOSTILE, VICTIM = of_uid(2000), of_uid(1000)


async def break_the_protocol(daemon: MemoryDaemon) -> None:
    async with await daemon.connect() as stream:
        await stream.send_all(b"\xff" * 8)
        assert await raw_client(stream).receive_all()
        await trio.testing.wait_all_tasks_blocked()


async def connect_and_close(path: str) -> None:
    await (await unix.connect(path)).aclose()


async def refused(daemon: MemoryDaemon) -> tuple[int, dict[str, int]]:
    """How many refusals have a record, and the counts of the others."""
    assert isinstance(daemon.recorded, CountedSink)
    await daemon.recorded.settle()
    counts: dict[str, int] = {}
    for event in daemon.audit.of(RefusalsCounted):
        for each in event.counts:
            reason, _, number = each.partition("=")
            counts[reason] = counts.get(reason, 0) + int(number)
    return len(daemon.audit.of(PeerRefused)), counts


@pytest.mark.case("PEER-40")
async def test_connections_beyond_the_rate_cost_neither_a_task_nor_a_record_nor_a_place(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        daemon.peer = HOSTILE
        began = trio.current_time()
        for _ in range(BROKEN_MAX):
            await break_the_protocol(daemon)
        await trio.testing.wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(FLOOD):
            await break_the_protocol(daemon)
            assert trio.lowlevel.current_statistics().tasks_living <= tasks + 1
        free_again = (trio.current_time() - began) / BROKEN_SECONDS * BROKEN_MAX + 1
        assert daemon.service.connections <= free_again
        daemon.peer = VICTIM
        await greeted_client(await daemon.connect())
        daemon.peer = HOSTILE
        last = await raw_client(await daemon.connect()).receive()
        assert isinstance(last, m.Goodbye), "it is at its bound still"
        assert last.code is m.GoodbyeCode.CAPACITY
        recorded, counts = await refused(daemon)
        assert recorded <= BROKEN_MAX + free_again
        assert counts.keys() == {f"PeerRefused.{PeerRefusal.CONNECTING_TOO_FAST}"}
        assert recorded + counts.popitem()[1] >= BROKEN_MAX + FLOOD - free_again


@pytest.mark.case("PEER-40")
async def test_a_uid_that_is_not_listed_is_turned_away_without_a_record_beyond_the_rate(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT, settings=with_service(worker_uids=(1000,))) as daemon:
        daemon.peer = HOSTILE
        for _ in range(FLOOD):
            farewell = await raw_client(await daemon.connect()).receive_all()
            assert [type(each) for each in farewell] == [m.Goodbye]
        daemon.peer = VICTIM
        await greeted_client(await daemon.connect())
        recorded, counts = await refused(daemon)
        assert recorded < FLOOD / 2
        assert recorded + counts[f"PeerRefused.{PeerRefusal.UID_NOT_CONFIGURED}"] == FLOOD


@pytest.mark.case("PEER-41")
@pytest.mark.parametrize("uids", [1, 3, 5])
async def test_when_several_uids_take_all_they_can_the_next_one_finds_a_place(
    autojump_clock: MockClock, uids: int
) -> None:
    settings = with_service(connections_max=64, connections_per_peer_max=64)
    async with memory_daemon(SCRIPT, settings=settings) as daemon:
        for uid in range(uids):
            daemon.peer = of_uid(3000 + uid)
            while daemon.service.connections < 64:
                raw = raw_client(await daemon.connect())
                await raw.send(HELLO)
                if not isinstance(await raw.receive(), m.Welcome):
                    break
        assert daemon.service.connections < 64
        daemon.peer = VICTIM
        await greeted_client(await daemon.connect())


@pytest.mark.case("PEER-42")
async def test_whoever_stands_behind_a_full_queue_is_greeted(tmp_path: Path) -> None:
    """On real sockets: the queue is full of another uid's connections when the victim comes."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = str(tmp_path / "s")
    listening.bind(path)
    listening.listen(doors.BACKLOG)
    before = []
    for _ in range(doors.BACKLOG + 1):
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.connect(path)
        end.send(b"\xff" * 8)
        before.append(end)
    accepted = 0

    def peer(_: PeerStream) -> PeerCredentials:
        nonlocal accepted
        accepted += 1
        return HOSTILE if accepted <= len(before) else VICTIM

    welcomed = trio.Event()

    async def greet() -> None:
        stream = await unix.connect(path)
        assert accepted > 0, "the queue was full"
        async with stream:
            await stream.send(ClientConnection(role=Role.WORKER).send(HELLO))
            assert await stream.receive()
        welcomed.set()

    async with memory_daemon(SCRIPT) as daemon, trio.open_nursery() as nursery:
        service = Service(daemon.context, daemon.audit, LOG, read_peer=peer)
        nursery.start_soon(greet)
        door = DoorListener(Door.WORKER, UnixListener(listening, Closers()))
        await nursery.start(service.serve, [door])
        with trio.fail_after(SECONDS_MAX):
            await welcomed.wait()
        nursery.cancel_scope.cancel()
    for end in before:
        end.close()


@pytest.mark.case("PEER-42")
async def test_a_full_queue_is_waited_for_in_line_and_the_wait_can_be_cancelled(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(path)
            with anyio.move_on_after(0) as scope:
                await unix.connect(path)
            assert scope.cancelled_caught
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connect_and_close, path)
                await next_look()
                listening.accept()[0].close()


@pytest.mark.case("PEER-42")
async def test_a_socket_that_is_turned_away_is_told_why(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen(BATCH_MAX)
    async with UnixListener(listening, Closers()) as listener:
        assert listener.accept_nowait() is None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.connect(path)
            end.send(b"\xff" * 8)
            stream = listener.accept_nowait()
            assert stream is not None
            stream.turn_away(b"why")
            assert end.recv(100) == b"why"
            assert stream.end.fileno() < 0


@pytest.mark.parametrize("unit", ["sbxd.socket", "sbxd-admin.socket"])
def test_the_units_queue_is_as_long_as_our_own(unit: str) -> None:
    parsed = configparser.ConfigParser(strict=False)
    parsed.read(REPOSITORY / "units" / unit)
    assert parsed.getint("Socket", "Backlog") == doors.BACKLOG
    assert doors.BACKLOG < ARRIVALS_MAX
