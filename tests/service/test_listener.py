"""Who may connect is decided before a byte is read, and nobody can take all the places."""

import errno
import logging

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.events import Door, PeerRefusal, PeerRefused
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.service.listener import DoorListener, Service
from sbxd.service.peer import NOT_AUTHORIZED, PeerCredentials
from sbxd.service.unix import PeerStream
from sbxd.settings import AuthMode, ServiceSettings, Settings
from sbxd.wire import messages as m
from sbxd.wire.connection import ServerConnection
from sbxd.wire.legality import Role
from tests.service.memory import LOG, MemoryDaemon, MemoryListener, memory_daemon
from tests.service.raw import HELLO, greeted_client, raw_client
from tests.service.requests import SCRIPT, command, provisioned

CREDENTIAL = b"the-service-credential"
STRANGER = PeerCredentials(pid=7, uid=2000, gid=2000, groups=frozenset({2000}))
WORKER = PeerCredentials(pid=8, uid=1000, gid=1000, groups=frozenset({1000}))


def with_service(**fields: object) -> Settings:
    service = msgspec.structs.replace(FAKE_SETTINGS.service, **fields)
    return msgspec.structs.replace(FAKE_SETTINGS, service=service)


class Unread(trio.abc.Stream):
    """A stream that fails the test when it is read."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        raise AssertionError("a refused peer was read from")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()


async def refusals(daemon: MemoryDaemon) -> list[PeerRefusal]:
    await trio.testing.wait_all_tasks_blocked()
    return [event.reason for event in daemon.audit.of(PeerRefused)]


@pytest.mark.case("API-02")
async def test_a_uid_that_is_not_configured_is_refused_before_a_byte_is_read(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT, settings=with_service(worker_uids=(1000,))) as daemon:
        daemon.peer = STRANGER
        stream = Unread()
        await daemon.listeners[Door.WORKER].offer(stream)
        assert await refusals(daemon) == [PeerRefusal.UID_NOT_CONFIGURED]
        assert stream.sent == ServerConnection(role=Role.WORKER).send(NOT_AUTHORIZED)
        assert stream.closed
        daemon.peer = WORKER
        await greeted_client(await daemon.connect())


@pytest.mark.case("API-04")
async def test_a_refused_peer_is_recorded_with_what_the_kernel_said(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT, settings=with_service(worker_uids=(1000,))) as daemon:
        daemon.peer = STRANGER
        await raw_client(await daemon.connect()).receive_all()
        await trio.testing.wait_all_tasks_blocked()
        (event,) = daemon.audit.of(PeerRefused)
        assert (event.door, event.peer_uid, event.peer_pid) == (Door.WORKER, 2000, 7)


@pytest.mark.case("API-02")
async def test_every_failed_authentication_reads_the_same_on_the_wire(
    autojump_clock: MockClock,
) -> None:
    settings = msgspec.structs.replace(
        FAKE_SETTINGS,
        auth_mode=AuthMode.TOKEN,
        service=ServiceSettings(worker_uids=(1000,)),
    )
    heard = []
    async with memory_daemon(SCRIPT, settings=settings, credential=CREDENTIAL) as daemon:
        for who, credential in (
            (STRANGER, CREDENTIAL),
            (WORKER, None),
            (WORKER, b"short"),
            (WORKER, b"x" * len(CREDENTIAL)),
        ):
            daemon.peer = who
            stream = await daemon.connect()
            raw = raw_client(stream)
            with trio.move_on_after(1):
                await raw.send(msgspec.structs.replace(HELLO, credential=credential))
            received = b""
            while data := await stream.receive_some():
                received += bytes(data)
            heard.append(received)
        assert len(set(heard)) == 1
        assert heard[0] == ServerConnection(role=Role.WORKER).send(NOT_AUTHORIZED)
        assert set(await refusals(daemon)) == {
            PeerRefusal.UID_NOT_CONFIGURED,
            PeerRefusal.CREDENTIAL_MISSING,
            PeerRefusal.CREDENTIAL_WRONG,
        }
        daemon.peer = WORKER
        await greeted_client(await daemon.connect(), credential=CREDENTIAL)


@pytest.mark.case("API-06")
async def test_a_uid_cannot_take_all_places_and_gets_one_back(autojump_clock: MockClock) -> None:
    settings = with_service(connections_per_peer_max=2, connections_max=4)
    async with memory_daemon(SCRIPT, settings=settings) as daemon:
        daemon.peer = WORKER
        held = [await greeted_client(await daemon.connect()) for _ in range(2)]
        full = await raw_client(await daemon.connect()).receive()
        assert isinstance(full, m.Goodbye)
        assert full.code is m.GoodbyeCode.CAPACITY
        daemon.peer = STRANGER
        await greeted_client(await daemon.connect())
        total = await raw_client(await daemon.connect()).receive()
        assert isinstance(total, m.Goodbye)
        await held[0].stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        daemon.peer = WORKER
        await greeted_client(await daemon.connect())
        assert await refusals(daemon) == [PeerRefusal.TOO_MANY_CONNECTIONS] * 2


async def test_workers_cannot_shut_out_an_operator(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT, settings=with_service(connections_max=1)) as daemon:
        await greeted_client(await daemon.connect())
        full = await raw_client(await daemon.connect()).receive()
        assert isinstance(full, m.Goodbye)
        await greeted_client(await daemon.connect(Door.ADMIN), Role.ADMIN)


class FailingListener(MemoryListener):
    """Raises these errors, one an accept, before it accepts."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = list(numbers)

    async def accept(self) -> PeerStream:
        if self.numbers:
            raise OSError(self.numbers.pop(0), "no")
        return await super().accept()


async def test_a_host_short_of_descriptors_is_waited_for(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        listener = FailingListener(errno.EMFILE, errno.ENFILE)
        service = Service(daemon.context, daemon.audit, LOG, read_peer=lambda _: WORKER)
        async with trio.open_nursery() as nursery:
            await nursery.start(service.serve, [DoorListener(Door.WORKER, listener)])
            with caplog.at_level(logging.ERROR):
                await greeted_client(await listener.connect())
            assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
            nursery.cancel_scope.cancel()
    assert listener.closed


async def test_any_other_failure_of_accept_ends_the_service(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        listener = FailingListener(errno.EBADF)
        service = Service(daemon.context, daemon.audit, LOG, read_peer=lambda _: WORKER)
        with pytest.raises(ExceptionGroup) as caught:
            await service.serve([DoorListener(Door.WORKER, listener)])
        assert caught.group_contains(OSError)


async def test_a_stream_whose_peer_cannot_be_known_is_closed(autojump_clock: MockClock) -> None:
    def unknown(_: trio.abc.Stream) -> PeerCredentials:
        raise OSError(errno.ENOTCONN, "gone")

    async with memory_daemon(SCRIPT) as daemon:
        listener = MemoryListener()
        service = Service(daemon.context, daemon.audit, LOG, read_peer=unknown)
        async with trio.open_nursery() as nursery:
            await nursery.start(service.serve, [DoorListener(Door.WORKER, listener)])
            assert await raw_client(await listener.connect()).receive() is None
            nursery.cancel_scope.cancel()


@pytest.mark.case("LIF-13")
async def test_shutting_down_answers_what_runs_and_refuses_what_comes(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        idle = await greeted_client(await daemon.connect())
        busy = await greeted_client(await daemon.connect())
        handle = await provisioned(busy)
        await busy.send(
            m.Execute(request_id=2, handle=handle, command=command("forever", timeout_seconds=5))
        )
        assert isinstance(await busy.receive(), m.Output)
        daemon.service.shut_down()
        farewell = await idle.receive()
        assert isinstance(farewell, m.Goodbye)
        assert farewell.code is m.GoodbyeCode.SHUTTING_DOWN
        await busy.send(m.Destroy(request_id=3, handle=handle))
        received = await busy.receive_all()
        assert isinstance(received[0], m.Unavailable)
        assert received[0].code == "SHUTTING_DOWN"
        assert isinstance(received[1], m.Executed)
        assert isinstance(received[2], m.Goodbye)
        await daemon.stopped.wait()
        assert daemon.listeners[Door.WORKER].closed
        assert daemon.service.connections == 0
