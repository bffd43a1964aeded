"""The processes of the egress bench: the server that is reached, and the proxy.

The server's protocol: one kind byte and four bytes, then a flood of so many MiB or an echo.
"""

import secrets
import socket
import sys
import time
from typing import Any

import msgspec
import trio

from sbxd.egress.decisions import Record
from sbxd.egress.listening import Listening
from sbxd.egress.proxy import Proxy, ProxyParts
from sbxd.egress.relay import Relay
from sbxd.egress.resolver import Resolver
from sbxd.egress.sockets import dial
from sbxd.policy.addresses import HostNetwork
from sbxd.port.egress import EgressDestination, EgressMode, EgressPolicy
from sbxd.settings import EgressSettings

HOST = "bench.example.org"
KIND_FLOOD = b"F"
KIND_ECHO = b"E"
LAG_STEP_SECONDS = 0.005
_CHUNK = 1 << 18


def server() -> int:
    """Serve until stdin ends; the first line of stdout is the port."""
    trio.run(_serve)
    return 0


async def _serve() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, _served, listeners)
        sys.stdout.write(f"{listeners[0].socket.getsockname()[1]}\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


async def _served(stream: trio.SocketStream) -> None:
    head = bytearray()
    while len(head) < 5:
        got = await stream.receive_some(5 - len(head))
        if not got:
            return
        head += got
    try:
        if head[:1] == KIND_FLOOD:
            chunk = bytes(_CHUNK)
            for _ in range((int.from_bytes(head[1:]) << 20) // _CHUNK):
                await stream.send_all(chunk)
            return
        async for piece in stream:
            await stream.send_all(piece)
    except trio.BrokenResourceError:
        return


def proxy(port: int, tunnels: int) -> int:
    """A proxy whose only server is at `port`. stdout: its address; then, for each line of stdin,
    the lags of its event loop in milliseconds since the last."""
    trio.run(_proxy, port, tunnels)
    return 0


async def _proxy(port: int, tunnels: int) -> None:
    listener = socket.socket()
    # An address whose earlier connections, if any, are not closing still.
    listener.bind((".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))]), 3128))

    def answer(*_: object, **__: object) -> Any:
        return [(0, 0, 0, "", ("93.184.215.14", 0))]

    async def to_server(address: str, _: int) -> socket.socket:
        return await dial("127.0.0.1", port)

    async def record(_: Record) -> None:
        await trio.lowlevel.checkpoint()

    parts = ProxyParts(
        settings=EgressSettings(tunnels_max=max(tunnels, 16)),
        resolver=Resolver(seconds=5, getaddrinfo=answer),
        relay=Relay(),
        host_network=HostNetwork(),
        dial=to_server,
    )
    policy = EgressPolicy(
        mode=EgressMode.ALLOWLIST, destinations=(EgressDestination(host=HOST, ports=(443,)),)
    )
    lags: list[float] = []

    async def watch() -> None:
        while True:
            due = time.perf_counter() + LAG_STEP_SECONDS
            await trio.sleep(LAG_STEP_SECONDS)
            lags.append((time.perf_counter() - due) * 1000)

    made = Proxy(parts, policy, Listening(listener), record=record, charge=lambda: None)
    async with made.open(), trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        address = listener.getsockname()
        sys.stdout.write(f"{address[0]} {address[1]}\n")
        sys.stdout.flush()
        while await trio.to_thread.run_sync(sys.stdin.readline):
            sys.stdout.write(msgspec.json.encode(lags).decode() + "\n")
            sys.stdout.flush()
            lags.clear()
        nursery.cancel_scope.cancel()
    await made.aclose()
