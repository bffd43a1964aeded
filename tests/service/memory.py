"""A daemon's session over memory streams: the whole service without a socket, for a mock clock."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import msgspec
import trio
from anyio.abc import ByteStream
from trio.testing import memory_stream_pair

from sbxd.audit.events import Door
from sbxd.audit.sink import AuditSink, MemorySink
from sbxd.client.channel import Channel
from sbxd.client.remote import channel_over
from sbxd.fake.engine import FAKE_SETTINGS, FakeEngine
from sbxd.fake.script import Script
from sbxd.fake.service import FakeEnvironments
from sbxd.lifecycle.environments import Environments
from sbxd.metrics.derived import DerivedMetrics
from sbxd.metrics.sink import CountedSink
from sbxd.observing import DaemonObserver, about
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.proxies import open_proxies
from sbxd.service.dispatch import Dispatch
from sbxd.service.egress import OperatorEgress
from sbxd.service.listener import DoorListener, Service
from sbxd.service.peer import PeerCredentials
from sbxd.service.room import Rooms
from sbxd.service.session import SessionContext
from sbxd.service.unix import PeerListener, PeerStream
from sbxd.settings import Settings
from sbxd.wire.descriptions import ImageInfo
from sbxd.wire.legality import Role
from sbxd.wire.messages import ImageImport

LOG = logging.getLogger("tests.service")
ROOT = PeerCredentials(pid=1, uid=0, gid=0, groups=frozenset({0}))


class AnyioStream(ByteStream):
    """A trio stream as the anyio stream that the client takes."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def receive(self, max_bytes: int = 65536) -> bytes:
        try:
            data = await self._stream.receive_some(max_bytes)
        except trio.BrokenResourceError:
            raise anyio.BrokenResourceError from None
        if not data:
            raise anyio.EndOfStream
        return bytes(data)

    async def send(self, item: bytes) -> None:
        try:
            await self._stream.send_all(item)
        except trio.BrokenResourceError:
            raise anyio.BrokenResourceError from None

    async def send_eof(self) -> None:
        assert isinstance(self._stream, trio.abc.HalfCloseableStream)
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Accepted(PeerStream):
    """Any stream as one that was accepted."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(max_bytes))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.stream.aclose()

    def turn_away(self, farewell: bytes) -> None:
        """What a socket does at once, by a task of the test's own."""
        trio.lowlevel.spawn_system_task(self._say_and_close, farewell)

    async def _say_and_close(self, farewell: bytes) -> None:
        async with self.stream:
            with suppress(trio.BrokenResourceError):
                await self.stream.send_all(farewell)


class MemoryListener(PeerListener):
    """Hands out the server's ends of memory streams."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](100)
        self.closed = False

    async def connect(self) -> trio.abc.Stream:
        """A new connection's client end."""
        client, server = memory_stream_pair()
        await self.offer(server)
        return client

    async def offer(self, stream: trio.abc.Stream) -> None:
        """A new connection whose server's end this is."""
        await self._send.send(stream)

    async def accept(self) -> PeerStream:
        return Accepted(await self._receive.receive())

    def accept_nowait(self) -> PeerStream | None:
        try:
            return Accepted(self._receive.receive_nowait())
        except trio.WouldBlock:
            return None

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()


class MemoryImages:
    """An image store that keeps sizes."""

    def __init__(self) -> None:
        self.images: dict[str, ImageInfo] = {}

    async def import_image(self, request: ImageImport, chunks: AsyncIterator[bytes]) -> ImageInfo:
        size = 0
        async for chunk in chunks:
            size += len(chunk)
        assert size == request.size_bytes
        digest = request.expected_digest or "sha256:" + f"{size:064x}"
        self.images[digest] = msgspec.convert(
            {
                "digest": digest,
                "label": request.label,
                "aliases": (),
                "size_bytes": size,
                "unshared_bytes": size,
                "layers": 1,
                "held_by": (),
                "imported_at": "2026-01-01T00:00:00Z",
                "in_use": 0,
            },
            ImageInfo,
        )
        return self.images[digest]

    async def list(self) -> tuple[ImageInfo, ...]:
        return tuple(self.images.values())

    def known_in_order(self) -> tuple[str, ...]:
        return tuple(self.images)

    async def remove(self, digest: str) -> None:
        if self.images.pop(digest, None) is None:
            raise ExecutionRejected(RejectedCode.UNKNOWN_IMAGE, "no such image", field="digest")


@dataclass
class MemoryDaemon:
    """A running service. `peer` is who the next connections are from. `recorded`: records events
    into `audit` and counts them."""

    service: Service
    context: SessionContext
    environments: Environments
    audit: MemorySink
    recorded: AuditSink
    images: MemoryImages
    listeners: dict[Door, MemoryListener]
    peer: PeerCredentials = ROOT
    stopped: trio.Event = field(default_factory=trio.Event)

    async def connect(self, door: Door = Door.WORKER) -> trio.abc.Stream:
        return await self.listeners[door].connect()

    @asynccontextmanager
    async def channel(
        self, door: Door = Door.WORKER, *, credential: bytes | None = None
    ) -> AsyncIterator[Channel]:
        stream = AnyioStream(await self.connect(door))
        async with channel_over(
            stream, role=Role(door.value), client_name="test", credential=credential
        ) as channel:
            yield channel


@asynccontextmanager
async def memory_daemon(
    script: Script,
    *,
    settings: Settings = FAKE_SETTINGS,
    credential: bytes | None = None,
    known_digests: frozenset[str] | None = None,
    environments: Environments | None = None,
    egress: OperatorEgress | None = None,
    rooms: Rooms | None = None,
) -> AsyncIterator[MemoryDaemon]:
    """A daemon that is stopped, by cancellation, when the block ends."""
    audit, images = MemorySink(), MemoryImages()
    counted = CountedSink(audit, DerivedMetrics("fake", time.monotonic))
    async with open_proxies(settings.egress, counted) as proxies, trio.open_nursery() as nursery:
        engine = FakeEngine(script, settings=settings, known_digests=known_digests)
        served = environments or FakeEnvironments(
            engine, nursery, grace_seconds=settings.service.orphan_grace_seconds
        )
        context = SessionContext(
            settings=settings,
            dispatch=Dispatch(
                environments=served,
                images=images,
                egress=egress or proxies,
                observer=DaemonObserver(settings, counted.derived, served, about("0", "fake")),
                settings=settings,
                audit=counted,
                log=LOG,
                version="0",
            ),
            environments=served,
            credential=credential,
            log=LOG,
            shutdown=trio.Event(),
            server_name="sbxd",
            mechanism="fake",
            rooms=rooms or Rooms(),
            count=counted.count,
            is_beyond=counted.is_beyond,
        )
        listeners = {door: MemoryListener() for door in Door}
        daemon: MemoryDaemon
        service = Service(context, counted, LOG, read_peer=lambda stream: daemon.peer)
        daemon = MemoryDaemon(service, context, served, audit, counted, images, listeners)

        async def serve(task_status: trio.TaskStatus[None]) -> None:
            await service.serve(
                [DoorListener(door, listener) for door, listener in listeners.items()],
                task_status=task_status,
            )
            daemon.stopped.set()

        await nursery.start(serve)
        yield daemon
        nursery.cancel_scope.cancel()
