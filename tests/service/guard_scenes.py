"""A program for a network of its own: servers at public addresses, and the guard that dials them.

    unshare --net --mount python -m tests.service.guard_scenes FOLDER

Prints one JSON object: what each scene came to. FOLDER holds cert.pem and key.pem, made for
a.example.com alone.
"""

import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6
from typing import Any

import anyio
import httpx

from sbxd.client.guard import EgressDenied, Guard
from sbxd.client.guard_httpx import AsyncGuardedTransport, GuardedTransport
from sbxd.client.resolver import SystemResolver
from tests.service.guard_parts import POLICY, Names, beyond, guard_over

PUBLIC, PUBLIC_6, INSIDE = "93.184.216.34", "2606:4700::7", "127.0.0.1"
# The C library finds a name that is asked for with its last dot only where it is written with it.
HOSTS = f"10.0.0.7 a.example.com.\n{PUBLIC} b.example.org.\n{PUBLIC} c.example.org\n"


# As long as a server on a busy machine may take; httpx would give up after five.
ANSWER_SECONDS = 60.0


class Server6(ThreadingHTTPServer):
    address_family = AF_INET6


class Servers:
    """HTTP at every address, each of which says which it is and counts."""

    def __init__(self, folder: Path) -> None:
        self.hits: dict[str, int] = {}
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        for address in (PUBLIC, PUBLIC_6, INSIDE):
            for port in (80, 443):
                self._start(address, port, context if port == 443 else None)

    def _start(self, address: str, port: int, context: ssl.SSLContext | None) -> None:
        hits = self.hits

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hits[address] = hits.get(address, 0) + 1
                body = f"{address} {self.headers['host']}".encode()
                self.send_response(302 if self.path == "/away" else 200)
                self.send_header("Location", "http://inside.example.org/")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        kind = Server6 if ":" in address else ThreadingHTTPServer
        server = kind((address, port), Handler)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if context is not None:
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=server.serve_forever, daemon=True).start()


def names() -> Names:
    return Names(
        a_example_com=[[PUBLIC], [INSIDE]],
        b_example_org=[[PUBLIC], [INSIDE]],
        six_example_org=[[PUBLIC_6]],
        mapped_example_org=[[f"::ffff:{PUBLIC}"]],
        inside_example_org=[[INSIDE]],
        mixed_example_org=[[PUBLIC, INSIDE]],
    )


def outcome(scene: Callable[[], str]) -> str:
    try:
        return scene()
    except EgressDenied as denied:
        return f"denied: {denied.refused.reason}"
    except (OSError, httpx.HTTPError) as error:
        return type(error).__name__


def fetcher(way: str, context: ssl.SSLContext) -> Callable[[Guard, str], str]:
    """GET by httpx, following redirects."""

    def blocking(guard: Guard, url: str) -> str:
        transport = GuardedTransport(guard, ssl_context=context)
        with httpx.Client(
            transport=transport, follow_redirects=True, timeout=ANSWER_SECONDS
        ) as client:
            return client.get(url).text

    async def awaited(guard: Guard, url: str) -> str:
        transport = AsyncGuardedTransport(guard, ssl_context=context)
        async with httpx.AsyncClient(
            transport=transport, follow_redirects=True, timeout=ANSWER_SECONDS
        ) as client:
            return (await client.get(url)).text

    if way == "blocking":
        return blocking
    return lambda guard, url: anyio.run(awaited, guard, url, backend=way)


def connector(way: str) -> Callable[[Guard, str], str]:
    """The peer of a plain connection to port 80."""

    def blocking(guard: Guard, host: str) -> str:
        with guard.connect_blocking(host, 80) as connection:
            return str(connection.getpeername()[0])

    async def awaited(guard: Guard, host: str) -> str:
        async with await guard.connect(host, 80) as stream:
            return str(stream.extra_attributes[anyio.abc.SocketAttribute.remote_address]()[0])

    if way == "blocking":
        return blocking
    return lambda guard, host: anyio.run(awaited, guard, host, backend=way)


def scenes(way: str, servers: Servers, context: ssl.SSLContext) -> dict[str, str]:
    """What each came to."""
    fetch, connect = fetcher(way, context), connector(way)
    found = {}
    for host in ("a.example.com", "six.example.org", "mapped.example.org", "inside.example.org"):
        found[f"connect {host}"] = outcome(partial(connect, guard_over(names()), host))
    for url in (
        "https://a.example.com/",
        "https://b.example.org/",
        "http://b.example.org/",
        "http://mixed.example.org/",
        "http://a.example.com/away",
    ):
        found[f"get {url}"] = outcome(partial(fetch, guard_over(names()), url))
    system = Guard(POLICY, resolver=SystemResolver(timeout_seconds=60), ask=beyond)
    for host in ("a.example.com", "b.example.org", "c.example.org"):
        found[f"system {host}"] = outcome(partial(connect, system, host))
    found["inside"] = str(servers.hits.get(INSIDE, 0))
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "hosts").write_text(HOSTS)
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    for command in (
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", f"{PUBLIC}/32", "dev", "lo"),
        ("ip", "address", "add", f"{PUBLIC_6}/128", "dev", "lo", "nodad"),
        ("mount", "--bind", str(folder / "hosts"), "/etc/hosts"),
        ("mount", "--bind", str(folder / "nsswitch.conf"), "/etc/nsswitch.conf"),
    ):
        subprocess.run(command, check=True)
    servers = Servers(folder)
    context = ssl.create_default_context(cafile=folder / "cert.pem")
    found: dict[str, Any] = {
        way: scenes(way, servers, context) for way in ("asyncio", "trio", "blocking")
    }
    with httpx.Client(timeout=ANSWER_SECONDS) as unguarded:
        found["control"] = unguarded.get(f"http://{INSIDE}/").text
    found["inside"] = servers.hits[INSIDE]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
