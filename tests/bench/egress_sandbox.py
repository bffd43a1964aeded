"""A tunnel from inside a sandbox of the installed daemon, beside the same program on the lane.

`python3 -m tests.bench.egress --sandbox` in a lane: `container` for the host's kernel, `gvisor` for
a guest's, whose connections go through the relay of `guest/relay.h` as well. The server echoes, so
every byte goes through the tunnel twice, and it is the same for all. Nothing is asserted about
time.
"""

import statistics
import subprocess
import sys

import msgspec
import trio
from msgspec import Struct

from tests.bench.samples import OperationFailed, percentile
from tests.lab import internet as lab
from tests.redteam.egress import Networked, allowlist, configured, networked
from tests.redteam.live import admin

HOST = "files.lab-allowed.com"
PORT = 7777
SECONDS = 300
PROGRAM = """
import json, socket, sys, threading, time
place, head, megabytes, connects = sys.argv[1:5]
address, port = place.split(":")
def connected():
    end = socket.create_connection((address, int(port)), 30)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if head:
        end.sendall(f"CONNECT {head} HTTP/1.1\\r\\nHost: {head}\\r\\n\\r\\n".encode())
        answer = b""
        while not answer.endswith(b"\\r\\n\\r\\n"):
            piece = end.recv(1)
            assert piece, answer
            answer += piece
        assert b" 200 " in answer.split(b"\\r\\n")[0] + b" ", answer
    return end
def rate(size):
    end, chunk, left = connected(), bytes(1 << 18), size
    def send():
        for _ in range(size >> 18):
            end.sendall(chunk)
    begun = time.perf_counter()
    thread = threading.Thread(target=send)
    thread.start()
    while left:
        got = len(end.recv(min(left, 1 << 18)))
        assert got
        left -= got
    thread.join()
    return (size >> 20) / (time.perf_counter() - begun)
def connect():
    begun = time.perf_counter()
    end = connected()
    end.sendall(b"x")
    assert end.recv(1)
    took = (time.perf_counter() - begun) * 1000
    end.close()
    return took
rate(1 << 20)
print(json.dumps([rate(int(megabytes) << 20), [connect() for _ in range(int(connects))]]))
"""


class Way(Struct, frozen=True, kw_only=True):
    """One way to the server: echoed MiB per second of each round, and each connection's time to
    its first byte back in milliseconds."""

    name: str
    mib_per_second: tuple[float, ...]
    connect_ms: tuple[float, ...]


class SandboxResults(Struct, frozen=True, kw_only=True):
    """Everything of one run."""

    mechanism: str
    ways: tuple[Way, ...]


def _answer(
    name: str, exit_code: int | None, said: bytes, wrong: bytes
) -> tuple[float, list[float]]:
    if exit_code != 0:
        raise OperationFailed(f"{name}: {wrong!r}")
    return msgspec.json.decode(said, type=tuple[float, list[float]])


def direct(megabytes: int, connects: int) -> tuple[float, list[float]]:
    """The same program outside, without a proxy. Raises OperationFailed."""
    words = (sys.executable, "-c", PROGRAM, f"{lab.ALLOWED}:{PORT}", "")
    done = subprocess.run(
        [*words, str(megabytes), str(connects)], capture_output=True, timeout=SECONDS, check=False
    )
    return _answer("direct", done.returncode, done.stdout, done.stderr)


async def tunnelled(one: Networked, megabytes: int, connects: int) -> tuple[float, list[float]]:
    """The program in the sandbox. Raises OperationFailed."""
    words = ("python3", "-c", PROGRAM, "127.0.0.1:3128", f"{HOST}:{PORT}")
    result = await one.run(
        *words, str(megabytes), str(connects), network_enabled=True, timeout_seconds=SECONDS
    )
    return _answer("sandbox", result.exit_code, result.stdout, result.stderr)


async def _measure(rounds: int, megabytes: int, connects: int) -> tuple[Way, ...]:
    found: dict[str, list[tuple[float, list[float]]]] = {"direct": [], "sandbox": []}
    for _ in range(rounds):
        found["direct"].append(await trio.to_thread.run_sync(direct, megabytes, connects))
        # One environment a round: its budget of operations counts connections.
        async with networked() as one:
            found["sandbox"].append(await tunnelled(one, megabytes, connects))
    return tuple(
        Way(
            name=name,
            mib_per_second=tuple(rate for rate, _ in runs),
            connect_ms=tuple(each for _, times in runs for each in times),
        )
        for name, runs in found.items()
    )


async def _mechanism() -> str:
    async with admin() as client:
        return (await client.describe()).mechanism


def measure(rounds: int, megabytes: int, connects: int) -> SandboxResults:
    """Both ways, in turns, in the lab's own internet. Raises OperationFailed."""
    with lab.internet(), configured(allowlist()):
        return SandboxResults(
            mechanism=trio.run(_mechanism),
            ways=trio.run(_measure, rounds, megabytes, connects),
        )


def render(results: SandboxResults) -> str:
    """The report."""
    lines = [f"{results.mechanism}: MiB/s echoed (least to most)   connect p50   p99 ms"]
    for way in results.ways:
        rates = way.mib_per_second
        lines.append(
            f"{way.name:<9} {statistics.median(rates):>6.0f} ({min(rates):.0f} to {max(rates):.0f})"
            f" {percentile(list(way.connect_ms), 50):>20.2f} "
            f"{percentile(list(way.connect_ms), 99):>7.2f}"
        )
    return "\n".join(lines) + "\n"
