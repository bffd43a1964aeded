"""A proxy on this host's loopback, with a resolver and a dialer that the test writes."""

import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from sbxd.egress.decisions import (
    Decision,
    DenialsCounted,
    Reason,
    Record,
    RecordUnavailable,
    TunnelClosed,
)
from sbxd.egress.listening import Listening
from sbxd.egress.proxy import Proxy, ProxyParts
from sbxd.egress.relay import Relay
from sbxd.egress.resolver import Resolver
from sbxd.egress.sockets import dial
from sbxd.policy.addresses import HostNetwork
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy
from sbxd.settings import EgressSettings

PUBLIC = "93.184.215.14"
OTHER_PUBLIC = "8.8.8.8"
HOST = "files.example.org"
POLICY = EgressPolicy(
    mode=EgressMode.ALLOWLIST,
    destinations=(
        EgressDestination(host=HOST, ports=(443,)),
        EgressDestination(host="*.wild.example.org", ports=(443,)),
    ),
)
CONNECT = f"CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}:443\r\n\r\n".encode()
PROXY_PORT = 3128


def bound() -> socket.socket:
    """A bound socket at a loopback address that is most likely nobody else's."""
    sock = socket.socket()
    while True:
        a, b, c = (random.randrange(1, 255) for _ in range(3))
        try:
            sock.bind((f"127.{a}.{b}.{c}", PROXY_PORT))
        except OSError:
            continue
        return sock


def descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


class Server:
    """What the dialer reaches: one loopback listener, and what to do with each connection."""

    def __init__(self) -> None:
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(1024)
        self.sock.setblocking(False)
        self.port: int = self.sock.getsockname()[1]

    async def accept(self) -> trio.SocketStream:
        while True:
            try:
                taken, _ = self.sock.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.sock)
            else:
                return trio.SocketStream(trio.socket.from_stdlib_socket(taken))


class World:
    """One proxy, its records and its server."""

    def __init__(self, policy: EgressPolicy = POLICY, **settings: Any) -> None:
        self.server = Server()
        self.records: list[Record] = []
        self.charges = 0
        self.lookups: list[str] = []
        self.dials: list[tuple[str, int]] = []
        self.answers: Callable[[bytes], Sequence[str]] = lambda _: (PUBLIC,)
        self.reach: Callable[[str, int], Awaitable[socket.socket]] = self.to_server
        self.charge: Callable[[], None] = lambda: None
        self.record_fails = False
        self.before_record: Callable[[Record], Awaitable[None]] | None = None
        self._changed = trio.Event()
        listener = bound()
        self.address: tuple[str, int] = listener.getsockname()
        self.resolver = Resolver(seconds=10, getaddrinfo=self._getaddrinfo)
        self.parts = ProxyParts(
            settings=EgressSettings(**settings),
            resolver=self.resolver,
            relay=Relay(),
            host_network=HostNetwork(),
            dial=self._dial,
        )
        self.proxy = Proxy(
            self.parts, policy, Listening(listener), record=self._record, charge=self._charge
        )

    def _getaddrinfo(self, host: bytes, *_: object, **__: object) -> Any:
        self.lookups.append(host.decode())
        return [(0, 0, 0, "", (address, 0)) for address in self.answers(host)]

    async def _dial(self, address: str, port: int) -> socket.socket:
        self.dials.append((address, port))
        return await self.reach(address, port)

    async def to_server(self, address: str, port: int) -> socket.socket:
        return await dial("127.0.0.1", self.server.port)

    async def _record(self, record: Record) -> None:
        if self.before_record is not None:
            await self.before_record(record)
        if self.record_fails:
            raise RecordUnavailable
        self.records.append(record)
        self._changed.set()
        self._changed = trio.Event()

    def _charge(self) -> None:
        self.charges += 1
        self.charge()

    async def recorded(self, count: int) -> None:
        """Wait until so many records are there."""
        while len(self.records) < count:
            await self._changed.wait()

    @property
    def decisions(self) -> list[Decision]:
        return [each for each in self.records if isinstance(each, Decision)]

    @property
    def closed(self) -> list[TunnelClosed]:
        return [each for each in self.records if isinstance(each, TunnelClosed)]

    @property
    def reasons(self) -> list[Reason | None]:
        return [each.reason for each in self.decisions]

    @property
    def counted(self) -> int:
        return sum(each.total for each in self.records if isinstance(each, DenialsCounted))

    async def client(self) -> trio.SocketStream:
        """A connection to the proxy."""
        sock = trio.socket.socket()
        try:
            await sock.connect(self.address)
        except OSError:
            sock.close()
            raise
        return trio.SocketStream(sock)

    async def ask(self, head: bytes = CONNECT) -> tuple[int, bytes]:
        """One request, and the whole answer: its status and its bytes."""
        async with await self.client() as stream:
            await stream.send_all(head)
            return status_of(answer := await to_end(stream)), answer

    @asynccontextmanager
    async def tunnel(
        self, early: bytes = b""
    ) -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
        """The two ends of an open tunnel."""
        async with await self.client() as client:
            await client.send_all(CONNECT + early)
            async with await self.server.accept() as server:
                assert status_of(await head_of(client)) == 200
                yield client, server

    async def aclose(self) -> None:
        await self.proxy.aclose()
        self.server.sock.close()


@asynccontextmanager
async def world(policy: EgressPolicy = POLICY, **settings: Any) -> AsyncIterator[World]:
    """A world whose proxy is not open."""
    made = World(policy, **settings)
    try:
        yield made
    finally:
        with trio.CancelScope(shield=True):
            await made.aclose()


@asynccontextmanager
async def open_world(policy: EgressPolicy = POLICY, **settings: Any) -> AsyncIterator[World]:
    """A world whose proxy listens."""
    async with world(policy, **settings) as made, made.proxy.open():
        yield made


async def to_end(stream: trio.SocketStream) -> bytes:
    data = b""
    async for piece in stream:
        data += piece
    return data


async def head_of(stream: trio.SocketStream) -> bytes:
    """A head, byte by byte, so that nothing behind it is taken."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        piece = await stream.receive_some(1)
        assert piece, data
        data += piece
    return data


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer
    return int(answer.split(b" ")[1])
