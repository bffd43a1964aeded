"""The egress proxy beside a direct connection and tinyproxy: `python3 -m tests.bench.egress`.

Client, server and proxy are processes of their own on this host's loopback; the ways alternate
within each round. The proxy is the daemon's code with two things put in: a resolver that answers
at once, and a dialer that goes to the bench's server. So "added" is what the proxy adds beyond
resolution. Nothing is asserted about time; exit status 1 when a way failed.
"""

import argparse
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import trio
from msgspec import Struct

from tests.bench.egress_roles import HOST, KIND_ECHO, KIND_FLOOD, proxy, server
from tests.bench.machine import Machine, machine
from tests.bench.samples import OperationFailed, percentile
from tests.bench.spawn import ENVIRONMENT, must

TINYPROXY = "tinyproxy"
_TICKS = os.sysconf("SC_CLK_TCK")
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int
    megabytes: int
    connects: int
    tunnels: int
    seconds: float


FULL = Scale(rounds=10, megabytes=512, connects=400, tunnels=500, seconds=20)
QUICK = Scale(rounds=2, megabytes=16, connects=10, tunnels=20, seconds=1)


class Way(Struct, frozen=True, kw_only=True):
    """One way to the server. ratio: its median beside the direct way's in the same run.
    cpu_seconds_per_gib: of the proxy's process, over all rounds."""

    name: str
    mib_per_second: tuple[float, ...]
    throughput_ratio: float
    cpu_seconds_per_gib: float | None
    connect_ms: tuple[float, ...]
    connect_p50_ms: float
    added_p50_ms: float


class Crowd(Struct, frozen=True, kw_only=True):
    """Many tunnels at once through the proxy. Lag: how late a task of the proxy's event loop ran
    that wanted to run every 5 ms, before and during."""

    tunnels: int
    exchanges: int
    mib_per_second: float
    idle_lag_p99_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float


class Results(Struct, frozen=True, kw_only=True):
    """Everything of one run."""

    machine: Machine
    ways: tuple[Way, ...]
    crowd: Crowd | None
    broken: tuple[str, ...]


@dataclass(frozen=True)
class Route:
    """How to come to the server. head: of the CONNECT, b"" for none. pid: of the proxy."""

    name: str
    address: tuple[str, int]
    head: bytes
    pid: int | None

    def connect(self) -> socket.socket:
        """A connection through to the server. Raises OperationFailed."""
        sock = socket.create_connection(self.address, timeout=30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.head:
            sock.sendall(self.head)
            answer = b""
            while not answer.endswith(b"\r\n\r\n"):
                piece = sock.recv(1)
                if not piece:
                    raise OperationFailed(f"{self.name}: {answer!r}")
                answer += piece
            if b" 200 " not in answer.split(b"\r\n")[0] + b" ":
                raise OperationFailed(f"{self.name}: {answer!r}")
        return sock

    def cpu_seconds(self) -> float:
        """What the proxy's process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


def throughput(route: Route, megabytes: int) -> float:
    """MiB per second of one download."""
    buffer = bytearray(_CHUNK)
    with route.connect() as sock:
        sock.sendall(KIND_FLOOD + megabytes.to_bytes(4))
        left, begun = megabytes << 20, time.perf_counter()
        while left:
            size = sock.recv_into(buffer)
            if not size:
                raise OperationFailed(f"{route.name}: ended {left} bytes early")
            left -= size
        return megabytes / (time.perf_counter() - begun)


def connect_ms(route: Route) -> float:
    """From connect(2) to the first byte that the server sent back."""
    begun = time.perf_counter()
    with route.connect() as sock:
        sock.sendall(KIND_ECHO + b"....x")
        if not sock.recv(1):
            raise OperationFailed(f"{route.name}: no answer")
        return (time.perf_counter() - begun) * 1000


async def crowd(route: Route, control: "Role", scale: Scale) -> Crowd:
    """Exchanges of 16 KiB on all tunnels for a while."""
    payload, exchanges = b"x" * 16384, 0
    control.ask("lag")
    await trio.sleep(min(scale.seconds, 2))
    idle = control.lags()

    async def talk(stream: trio.SocketStream) -> None:
        nonlocal exchanges
        async with stream:
            while True:
                await stream.send_all(payload)
                left = len(payload)
                while left:
                    left -= len(await stream.receive_some(left))
                exchanges += 1

    with ExitStack() as stack:
        streams = []
        for _ in range(scale.tunnels):
            sock = stack.enter_context(await trio.to_thread.run_sync(route.connect))
            sock.sendall(KIND_ECHO + b"....")
            streams.append(trio.SocketStream(trio.socket.from_stdlib_socket(sock.dup())))
        control.lags()
        with trio.move_on_after(scale.seconds):
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(talk, stream)
        lags = control.lags()
    return Crowd(
        tunnels=scale.tunnels,
        exchanges=exchanges,
        mib_per_second=exchanges * len(payload) * 2 / 2**20 / scale.seconds,
        idle_lag_p99_ms=percentile(idle, 99),
        lag_p50_ms=percentile(lags, 50),
        lag_p99_ms=percentile(lags, 99),
        lag_max_ms=max(lags),
    )


class Role:
    """A process of this module in another role; it speaks by lines."""

    def __init__(self, name: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.egress", "--role", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said = self.line().split()

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise OperationFailed("a process of the bench has ended")
        return line

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.line()

    def lags(self) -> list[float]:
        """The lags, in milliseconds, since the last call."""
        return msgspec.json.decode(self.ask("lag"), type=list[float]) or [0.0]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@contextmanager
def tinyproxy(port: int) -> Iterator[Route]:
    """tinyproxy with the settings of its package that matter here, and room for the tunnels."""
    program = shutil.which(TINYPROXY, path=ENVIRONMENT["PATH"])
    if program is None:
        raise OperationFailed(f"{TINYPROXY} is not installed: apt-get install tinyproxy-bin")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
        free.close()
        configuration = Path(folder, "tinyproxy.conf")
        configuration.write_text(
            f"Port {own}\nListen 127.0.0.1\nTimeout 600\nMaxClients 1000\nLogLevel Error\n"
            f"Allow 127.0.0.1\nConnectPort {port}\nDisableViaHeader Yes\n"
        )
        process = subprocess.Popen(
            [program, "-d", "-c", str(configuration)], stdout=subprocess.DEVNULL
        )
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", own)) == 0:
                        break
                time.sleep(0.02)
            head = f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
            yield Route(TINYPROXY, ("127.0.0.1", own), head.encode(), process.pid)
        finally:
            process.terminate()
            process.wait(30)


def attempt(broken: list[str], what: Callable[[], float]) -> Iterator[float]:
    """The measured value; nothing, and a note, when it failed."""
    try:
        yield what()
    except (OSError, OperationFailed) as problem:
        broken.append(str(problem))


def measure(scale: Scale) -> Results:
    """All ways, alternating, and the crowd."""
    broken: list[str] = []
    with ExitStack() as stack:
        serving = Role("server")
        stack.callback(serving.end)
        port = int(serving.said[0])
        ours = Role("proxy", str(port), str(scale.tunnels))
        stack.callback(ours.end)
        head = f"CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}:443\r\n\r\n".encode()
        routes = [
            Route("direct", ("127.0.0.1", port), b"", None),
            Route("sbxd", (ours.said[0], int(ours.said[1])), head, ours.process.pid),
        ]
        try:
            routes.append(stack.enter_context(tinyproxy(port)))
        except OperationFailed as problem:
            sys.stderr.write(f"bench: {problem}\n")
        rates: dict[str, list[float]] = {route.name: [] for route in routes}
        times: dict[str, list[float]] = {route.name: [] for route in routes}
        used: dict[str, float] = {route.name: 0.0 for route in routes}
        order = secrets.SystemRandom()
        for _ in range(scale.rounds):
            for route in order.sample(routes, len(routes)):
                before = route.cpu_seconds() if route.pid else 0.0
                rates[route.name] += attempt(broken, partial(throughput, route, scale.megabytes))
                used[route.name] += route.cpu_seconds() - before if route.pid else 0.0
        for _ in range(scale.connects):
            for route in order.sample(routes, len(routes)):
                times[route.name] += attempt(broken, partial(connect_ms, route))
        many: Crowd | None = None
        try:
            many = trio.run(crowd, routes[1], ours, scale)
        except (OSError, OperationFailed) as problem:
            broken.append(str(problem))
    moved_gib = scale.rounds * scale.megabytes / 1024
    floor_rate = statistics.median(rates["direct"] or [0.0]) or 1.0
    floor_ms = percentile(times["direct"] or [0.0], 50)
    ways = tuple(
        Way(
            name=route.name,
            mib_per_second=tuple(rates[route.name]),
            throughput_ratio=statistics.median(rates[route.name] or [0.0]) / floor_rate,
            cpu_seconds_per_gib=used[route.name] / moved_gib if route.pid else None,
            connect_ms=tuple(times[route.name]),
            connect_p50_ms=percentile(times[route.name] or [0.0], 50),
            added_p50_ms=percentile(times[route.name] or [0.0], 50) - floor_ms,
        )
        for route in routes
    )
    return Results(machine=machine(), ways=ways, crowd=many, broken=tuple(broken))


def render(results: Results) -> str:
    """The report."""
    lines = ["way        MiB/s   of direct   CPU s/GiB   connect p50 ms   added"]
    for way in results.ways:
        cpu = "-" if way.cpu_seconds_per_gib is None else f"{way.cpu_seconds_per_gib:.2f}"
        rate = statistics.median(way.mib_per_second or (0.0,))
        lines.append(
            f"{way.name:<9} {rate:>6.0f} {way.throughput_ratio:>11.2f} {cpu:>11} "
            f"{way.connect_p50_ms:>16.2f} {way.added_p50_ms:>7.2f}"
        )
    if results.crowd is not None:
        many = results.crowd
        lines.append(
            f"{many.tunnels} tunnels: {many.mib_per_second:.0f} MiB/s, lag p50 "
            f"{many.lag_p50_ms:.1f} ms, p99 {many.lag_p99_ms:.1f}, max {many.lag_max_ms:.1f} "
            f"(p99 {many.idle_lag_p99_ms:.1f} without)"
        )
    lines += [f"failed: {each}" for each in results.broken]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure, report; the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.bench.egress", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every sample there")
    parser.add_argument(
        "--install", action="store_true", help="install tinyproxy when it is missing (as root)"
    )
    parser.add_argument(
        "--sandbox", action="store_true", help="from inside a sandbox of this lane's daemon"
    )
    parser.add_argument("--role", choices=("server", "proxy"), help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.role == "server":
        return server()
    if options.role == "proxy":
        return proxy(*(int(each) for each in options.arguments))
    if options.install and shutil.which(TINYPROXY, path=ENVIRONMENT["PATH"]) is None:
        must(("apt-get", "install", "-y", "-qq", "--no-install-recommends", "tinyproxy-bin"))
    if options.sandbox:
        from tests.bench import egress_sandbox  # needs the lab

        found = egress_sandbox.measure(*((1, 16, 10) if options.quick else (5, 256, 100)))
        sys.stdout.write(egress_sandbox.render(found))
        if options.json is not None:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        return 0
    results = measure(QUICK if options.quick else FULL)
    sys.stdout.write(render(results))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 1 if results.broken or results.crowd is None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
