"""The shipped conformance probes against the proxy, and against proxies that are wrong.

The programs run as they do in an environment, but on this host; only how the proxy is found is
another. A probe that a wrong proxy passes would prove nothing, so each is failed by one here.
"""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import trio

from sbxd.probes.egress import EGRESS_PROBES
from sbxd.probes.egress_probe import EgressProbe, Need, Target, Yes, program_of
from sbxd.probes.probe import Verdict, attempts, verdict
from tests.egress.world import HOST, World, open_world

# What needs the environment's own namespace is run in one (tests/redteam).
OF_A_NAMESPACE = ("around", "without-yes")
PROBES = [each for each in EGRESS_PROBES if each.probe.id not in OF_A_NAMESPACE]
TUNNELS_MAX = 6
TARGET = Target(
    has_proxy=True,
    host=HOST,
    port=443,
    unlisted_port=444,
    head_seconds=1,
    tunnels_max=TUNNELS_MAX,
)


async def run(each: EgressProbe, address: tuple[str, int], target: Target = TARGET) -> object:
    """What the program answers that finds its proxy here."""
    with trio.fail_after(60):
        done = await trio.run_process(
            [sys.executable, "-c", program_of(each, target)],
            env={"HTTPS_PROXY": f"http://{address[0]}:{address[1]}"},
            capture_stdout=True,
            check=False,
        )
    assert isinstance(done, subprocess.CompletedProcess)
    return json.loads(done.stdout) if done.returncode == 0 else None


async def echo(stream: trio.SocketStream) -> None:
    """A server that sends back what it gets, so a greeting of TLS is answered by one."""
    async with stream:
        try:
            async for piece in stream:
                await stream.send_all(piece)
        except trio.BrokenResourceError:
            return


@asynccontextmanager
async def proxied() -> AsyncIterator[World]:
    """The real proxy, before a server that answers."""
    opened = open_world(head_seconds=1, tunnels_max=TUNNELS_MAX, denials_per_second=1000)
    async with opened as here, trio.open_nursery() as nursery:

        async def serve() -> None:
            while True:
                nursery.start_soon(echo, await here.server.accept())

        nursery.start_soon(serve)
        yield here
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("each", PROBES, ids=[each.probe.id for each in PROBES])
async def test_the_proxy_conforms(each: EgressProbe) -> None:
    async with proxied() as here:
        judged = attempts(each.probe, await run(each, here.address))
    assert [one for one in judged if not one.is_right] == []
    assert verdict(judged) is Verdict.OK


# --- proxies that are wrong -------------------------------------------------------------------

Answer = Callable[[trio.SocketStream], Awaitable[None]]
CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
REFUSED = (
    b'HTTP/1.1 403 no\r\nProxy-Status: x; details="host_not_listed"\r\nConnection: close\r\n\r\n'
)


async def allow(stream: trio.SocketStream) -> None:
    """Lets everything through, at once; early bytes are lost."""
    await stream.receive_some(1)
    await stream.send_all(CONNECTED)
    await stream.send_eof()
    async for _ in stream:
        pass


async def refuse(stream: trio.SocketStream) -> None:
    """Refuses everything, for the reason of a name that is not listed."""
    await stream.receive_some(65536)
    await stream.send_all(REFUSED)


async def close(stream: trio.SocketStream) -> None:
    """Says nothing."""
    await stream.receive_some(1)


@asynccontextmanager
async def wrong(answer: Answer) -> AsyncIterator[tuple[str, int]]:
    async def handle(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                await answer(stream)
            except trio.BrokenResourceError:
                return

    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, handle, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        yield listener.socket.getsockname()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("answer", [allow, refuse, close])
@pytest.mark.parametrize("each", PROBES, ids=[each.probe.id for each in PROBES])
async def test_a_wrong_proxy_does_not_conform(each: EgressProbe, answer: Answer) -> None:
    async with wrong(answer) as address:
        judged = attempts(each.probe, await run(each, address))
    assert verdict(judged) in (Verdict.FAILED, Verdict.INCONCLUSIVE)


async def test_refusing_everything_is_no_conformance_to_a_rule() -> None:
    """Without a listed destination that is reached, a 403 says nothing."""
    (unlisted,) = [each for each in PROBES if each.probe.id == "unlisted-host"]
    async with wrong(refuse) as address:
        judged = attempts(unlisted.probe, await run(unlisted, address))
    assert verdict(judged) is Verdict.INCONCLUSIVE


# --- what is needed ---------------------------------------------------------------------------


def only(**changed: object) -> Target:
    return replace(TARGET, **changed)  # type: ignore[arg-type]


def test_what_needs_a_listed_destination_is_not_run_without_one() -> None:
    wildcards = only(host=None, port=None, unlisted_port=None)
    assert [each.probe.id for each in EGRESS_PROBES if wildcards.has(each.need)] == [
        *("around", "without-yes", "malformed-heads", "malformed-hosts", "methods"),
        *("huge-head", "slow-head"),
    ]
    nothing = only(has_proxy=False, host=None, port=None, unlisted_port=None)
    assert [each for each in EGRESS_PROBES if nothing.has(each.need)] == []
    assert all(TARGET.has(each.need) for each in EGRESS_PROBES)
    assert not only(port=8443).has(Need.LISTED_TLS)
    assert not only(unlisted_port=None).has(Need.UNLISTED_PORT)
    assert not only(tunnels_max=4096).has(Need.TUNNELS)


def test_only_one_probe_is_of_a_command_without_its_yes() -> None:
    assert [each.probe.id for each in EGRESS_PROBES if each.yes is Yes.ONE] == ["without-yes"]
