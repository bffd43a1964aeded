"""A peer that asks and takes nothing makes the daemon hold no more than was charged to it."""

import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import pytest
import trio
from msgspec import inspect
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from sbxd.audit.events import Door, RequestUnserved
from sbxd.fake.engine import FakeEngine
from sbxd.fake.service import FakeEnvironments
from sbxd.lifecycle.environments import (
    LIST_PAGE_ENTRIES,
    BridgeWorker,
    ContentSink,
    EntriesSink,
    OutputSink,
    Peer,
)
from sbxd.port.command import ChangeKind, ExecutionCommand, ExecutionResult, FileChange
from sbxd.port.environment import EnvironmentHandle
from sbxd.port.errors import UnavailableCode
from sbxd.port.limits import MIB
from sbxd.service.room import BUFFERS_BYTES, CONNECTION_BYTES_MAX, Rooms, cost_of
from sbxd.service.session import FAREWELL_SECONDS
from sbxd.wire import messages as m
from sbxd.wire.descriptions import EnvironmentInfo, ImageInfo
from sbxd.wire.legality import ADMIN_REQUESTS, WORKER_REQUESTS, Role
from tests.properties.test_wire_vectors import sample
from tests.properties.wire_messages import CLIENT_MESSAGES
from tests.service.memory import MemoryDaemon, memory_daemon
from tests.service.raw import HELLO, RawEnd, Stuck, greeted_client, raw_client
from tests.service.requests import SCRIPT, command

REQUESTS = sorted(WORKER_REQUESTS | ADMIN_REQUESTS, key=lambda kind: kind.__name__)
CHUNK = m.CHUNK_BYTES_MAX
OPEN = 16
# What follows a request, and where it is sent here. Ping has a test of its own in test_session.
FOLLOWING = {m.Upload, m.BridgeFrame}
HOLDS_NOTHING = {m.Hello, m.Cancel, m.Credit, m.BridgeCredit, m.BridgeClose, m.Ping, m.Pong}


class Generous(FakeEnvironments):
    """Gives as much as an environment can, and takes as little."""

    def attempt(self, owner: Peer, handle: EnvironmentHandle) -> None:
        """Every handle is right."""

    async def listdir(
        self, owner: Peer, handle: EnvironmentHandle, path: bytes, *, on_entries: EntriesSink
    ) -> bool:
        """Names that take four bytes for each of their characters."""
        for start in range(0, 100_000, LIST_PAGE_ENTRIES):
            names = (f"{start + n:06}😀{'x' * 240}" for n in range(LIST_PAGE_ENTRIES))
            await on_entries([changed(name) for name in names])
        return True

    async def read(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        path: bytes,
        *,
        maximum_bytes: int,
        on_content: ContentSink,
    ) -> None:
        """As the steward's client, which has four pieces at hand."""
        while True:
            for piece in [bytes(CHUNK) for _ in range(4)]:
                await on_content(piece)

    async def write(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        path: bytes,
        *,
        size_bytes: int,
        data: AsyncIterator[bytes],
    ) -> None:
        """One piece is in the steward's hands, who takes no other."""
        held = [await anext(data)]
        await trio.Event().wait()
        held.clear()

    async def execute(
        self,
        owner: Peer,
        handle: EnvironmentHandle,
        command: ExecutionCommand,
        *,
        cancelled: trio.Event,
        on_output: OutputSink | None = None,
        bridge: BridgeWorker | None = None,
    ) -> ExecutionResult:
        """All at once."""
        assert on_output is not None
        if command.argv[0] == "changes":
            return result_of(tuple(changed(f"{n:04}/{'d' * 500}") for n in range(1000)))
        if command.argv[0] == "waits":
            await trio.sleep_forever()
        async with trio.open_nursery() as nursery:
            for stream in m.OutputStream:
                nursery.start_soon(forever, lambda s=stream: on_output(s, bytes(64 * 1024)))
            if bridge is not None:
                await bridge.opened()
                await bridge.receive()
                nursery.start_soon(forever, lambda: bridge.send(bytes(m.BRIDGE_FRAME_BYTES_MAX)))
        raise AssertionError("unreachable")

    async def list(self) -> tuple[EnvironmentInfo, ...]:
        """Two hundred and fifty-six, that all run something long."""
        info: EnvironmentInfo = sample(inspect.type_info(EnvironmentInfo))
        argv = (b"x" * 256,) * 32
        return (msgspec.structs.replace(info, running_argv=argv),) * 256


async def forever(send: Callable[[], Any]) -> None:
    while True:
        await send()


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """How many bytes more the process holds than at the beginning."""
    gc.collect()
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def changed(name: str) -> FileChange:
    return FileChange(path=name, change=ChangeKind.CREATED, size_bytes=2**40, sha256="0" * 64)


def result_of(changes: tuple[FileChange, ...]) -> ExecutionResult:
    return ExecutionResult(
        exit_code=0,
        stdout=b"",
        stderr=b"",
        stdout_truncated=False,
        stderr_truncated=False,
        timed_out=False,
        killed_by=None,
        files_changed=changes,
        duration_ms=1,
    )


@asynccontextmanager
async def generous_daemon(rooms: Rooms) -> AsyncIterator[MemoryDaemon]:
    async with trio.open_nursery() as nursery:
        environments = Generous(FakeEngine(SCRIPT), nursery, grace_seconds=60)
        async with memory_daemon(SCRIPT, environments=environments, rooms=rooms) as daemon:
            for number in range(1000):
                daemon.images.images[str(number)] = sample(inspect.type_info(ImageInfo))
            yield daemon
        nursery.cancel_scope.cancel()


class Stopping(Stuck):
    """A stream whose peer reads until `left` is 0, and from then on never."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        super().__init__(stream, taken=1)
        self._stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if not self.left:
            await trio.sleep_forever()
        await self._stream.send_all(data)


async def stopped_client(daemon: MemoryDaemon) -> tuple[RawEnd, Stuck]:
    """A client that has been welcomed and takes nothing more."""
    ours, theirs = memory_stream_pair()
    stuck = Stopping(theirs)
    await daemon.listeners[Door.ADMIN].offer(stuck)
    raw = await greeted_client(ours, Role.ADMIN)
    stuck.left = 0
    return raw, stuck


def requests_of(kind: type[m.Request], request_id: int) -> tuple[m.Message, ...]:
    """A request of one kind that asks for as much as it may, with all that may follow it at
    once."""
    request = msgspec.structs.replace(sample(inspect.type_info(kind)), request_id=request_id)
    upload = [m.Upload(request_id=request_id, data=bytes(CHUNK))] * (MIB // CHUNK)
    frames = [m.BridgeFrame(request_id=request_id, data=b"x")] * 1000
    if isinstance(request, m.Execute):
        endless = command("endless", maximum_output_bytes=64 * MIB)
        request = msgspec.structs.replace(request, command=endless, stdin_bytes=0, bridge=True)
    match request:
        case m.Execute() if 1 < request_id <= 8:
            frames[:] = [m.BridgeFrame(request_id=request_id, data=bytes(CHUNK))] * 3
            return request, *frames
        case m.Execute() if request_id == 1:
            return request, *frames
        case m.Execute() if request_id > 12:
            asked = msgspec.structs.replace(request, command=command("changes"), bridge=False)
            return (asked,)
        case m.Execute():
            asked = msgspec.structs.replace(
                request, command=command("waits"), bridge=False, stdin_bytes=2 * MIB
            )
            return asked, *upload
        case m.WorkspaceWrite():
            return msgspec.structs.replace(request, size_bytes=2**40), *upload
        case m.WorkspaceRead():
            return (msgspec.structs.replace(request, maximum_bytes=2**40),)
        case m.ImageImport():
            return msgspec.structs.replace(request, size_bytes=2**40), *upload
        case _:
            return (request,)


@pytest.mark.case("API-10", "PEER-11")
@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
async def test_a_request_whose_replies_are_not_taken_holds_no_more_than_it_is_charged(
    kind: type[m.Request], mock_clock: MockClock
) -> None:
    """Several of a kind, all that may follow them, and nothing is read."""
    rooms = Rooms()
    async with generous_daemon(rooms) as daemon:
        raw, stuck = await stopped_client(daemon)
        await wait_all_tasks_blocked()
        assert rooms.held_bytes(Door.ADMIN, 0) == BUFFERS_BYTES
        with traced() as held_now:
            asked = [requests_of(kind, 1 + n) for n in range(OPEN)]
            await raw.send_illegal(*(request for request, *following in asked if following))
            await wait_all_tasks_blocked()  # bridges are open before their first frames
            for _, *following in asked:
                for message in following:
                    await raw.send_illegal(message)
                await wait_all_tasks_blocked()
            await raw.send_illegal(*(request for request, *following in asked if not following))
            await wait_all_tasks_blocked()
            del asked
            charged = rooms.held_bytes(Door.ADMIN, 0)
            assert BUFFERS_BYTES <= charged <= CONNECTION_BYTES_MAX
            held = held_now()
            assert held <= charged, (held, charged)
        await raw.stream.aclose()
        await wait_all_tasks_blocked()
        mock_clock.jump(FAREWELL_SECONDS)
        await stuck.closed.wait()
        await wait_all_tasks_blocked()
        assert rooms.held_bytes(Door.ADMIN, 0) == 0


def test_every_message_of_a_client_is_walked() -> None:
    assert {*REQUESTS, *FOLLOWING, *HOLDS_NOTHING} == set(CLIENT_MESSAGES)


def test_all_requests_of_a_connection_have_room_at_once() -> None:
    """Of the default configuration, and without stdin: what a worker may have open it may use."""
    for kind in REQUESTS:
        request = sample(inspect.type_info(kind))
        if isinstance(request, m.Execute):
            request = msgspec.structs.replace(request, stdin_bytes=0, bridge=True)
        cost = cost_of(request, 1024, files_changed_max=1000)
        assert BUFFERS_BYTES + m.REQUESTS_IN_FLIGHT_MAX * cost <= CONNECTION_BYTES_MAX, kind


@pytest.mark.case("PEER-11")
async def test_what_finds_no_room_is_refused_and_what_others_hold_is_theirs(
    mock_clock: MockClock,
) -> None:
    request = msgspec.structs.replace(
        sample(inspect.type_info(m.Execute)),
        command=command("waits"),
        stdin_bytes=2 * MIB,
        bridge=False,
    )
    cost = cost_of(request, len(msgspec.msgpack.encode(request)), files_changed_max=1000)
    rooms = Rooms(uid_bytes_max=4 * BUFFERS_BYTES + 2 * cost)
    async with generous_daemon(rooms) as daemon:
        first, second = [await greeted_client(await daemon.connect(Door.ADMIN)) for _ in range(2)]
        for raw in (first, second):
            await raw.send(request)
        await wait_all_tasks_blocked()
        third = msgspec.structs.replace(request, request_id=request.request_id + 1)
        await second.send(third)
        refusal = await second.receive()
        assert isinstance(refusal, m.Unavailable)
        assert (refusal.code, refusal.retry_after_ms) == (UnavailableCode.CAPACITY, 1000)
        assert [each.code for each in daemon.audit.of(RequestUnserved)] == [refusal.code]
        await second.send_illegal(m.Upload(request_id=third.request_id, data=b"late"))
        # The same uid has room of its own at the other door.
        worker = await greeted_client(await daemon.connect(Door.WORKER))
        await worker.send(request)
        await wait_all_tasks_blocked()
        assert rooms.held_bytes(Door.WORKER, 0) == BUFFERS_BYTES + cost
        # What ends is given back, and the next finds it.
        await first.stream.aclose()
        await wait_all_tasks_blocked()
        mock_clock.jump(FAREWELL_SECONDS)
        await wait_all_tasks_blocked()
        fourth = msgspec.structs.replace(request, request_id=third.request_id + 1)
        await second.send(fourth)
        await wait_all_tasks_blocked()
        assert rooms.held_bytes(Door.ADMIN, 0) == BUFFERS_BYTES + 2 * cost


@pytest.mark.case("PEER-11")
async def test_a_connection_whose_buffers_find_no_room_is_told_so(mock_clock: MockClock) -> None:
    async with generous_daemon(Rooms(uid_bytes_max=BUFFERS_BYTES)) as daemon:
        kept = await greeted_client(await daemon.connect(Door.ADMIN))
        refused = raw_client(await daemon.connect(Door.ADMIN), Role.ADMIN)
        await refused.send(HELLO)
        farewell = await refused.receive()
        assert isinstance(farewell, m.Goodbye)
        assert farewell.code is m.GoodbyeCode.CAPACITY
        await kept.stream.aclose()
