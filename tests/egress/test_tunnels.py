"""Tunnels: what bounds them, how they end, and that nothing is left of them."""

import errno
import socket

import pytest
import trio
from trio.testing import MockClock

from sbxd.egress.decisions import Outcome, ProxyReason, TunnelEnd
from sbxd.egress.relay import Relay
from tests.egress.hello import client_hello
from tests.egress.world import CONNECT, HOST, World, descriptors, open_world, to_end, world

MIB = 1024 * 1024


async def quiet() -> None:
    """Wait until nothing moves."""
    await trio.testing.wait_all_tasks_blocked(0.05)


async def fill(stream: trio.SocketStream) -> int:
    """Send until the peer takes no more for a while; how much it took."""
    taken, piece = 0, b"x" * 65536
    while True:
        with trio.move_on_after(0.3) as waited:
            taken += await stream.socket.send(piece)
        if waited.cancelled_caught:
            return taken


async def test_ten_mebibytes_each_way_at_once_arrive_whole() -> None:
    payload = bytes(range(256)) * 40_960
    async with open_world() as here, here.tunnel() as (client, server):

        async def send(stream: trio.SocketStream) -> None:
            await stream.send_all(payload)
            await stream.send_eof()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, client)
            nursery.start_soon(send, server)
            assert await to_end(server) == payload
            assert await to_end(client) == payload
        await here.recorded(2)
        assert here.closed[0].up_bytes == here.closed[0].down_bytes == len(payload)


@pytest.mark.case("EGR-16")
async def test_a_peer_that_never_reads_stops_its_sender_and_holds_one_turn_at_most() -> None:
    async with open_world() as here, here.tunnel() as (client, server):
        for each in (client, server):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        # Two sockets' buffers on the way, which the kernel bounds, and no more.
        assert await fill(server) < 64 * MIB
        assert await fill(client) < 64 * MIB
        # The control: once it reads, it goes on.
        first = await client.receive_some(MIB)
        assert set(first) == {ord("x")}


async def test_one_busy_tunnel_does_not_keep_another_from_its_turn() -> None:
    async with open_world() as here, here.tunnel() as (flood, sink), trio.open_nursery() as busy:

        async def send() -> None:
            while True:
                await flood.send_all(b"x" * MIB)

        async def drain() -> None:
            while True:
                await sink.receive_some(MIB)

        busy.start_soon(send)
        busy.start_soon(drain)
        async with here.tunnel() as (client, server):
            for _ in range(50):
                await client.send_all(b"a")
                assert await server.receive_some() == b"a"
        busy.cancel_scope.cancel()


async def test_turns_are_bounded_and_handed_on_in_order_also_past_who_gave_up() -> None:
    relay = Relay(turns_at_once=2)
    order: list[int] = []
    scopes = [trio.CancelScope() for _ in range(4)]

    async def wait(number: int) -> None:
        with scopes[number]:
            await relay.begin_turn()
            order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(wait, number)
            await trio.testing.wait_all_tasks_blocked()
        assert order == [0, 1]
        scopes[2].cancel()
        await trio.testing.wait_all_tasks_blocked()
        relay.end_turn()
        await trio.testing.wait_all_tasks_blocked()
        assert order == [0, 1, 3]
        relay.end_turn()
        relay.end_turn()
    await relay.begin_turn()
    await relay.begin_turn()
    with trio.move_on_after(0) as third:
        await relay.begin_turn()
    assert third.cancelled_caught


async def test_an_idle_tunnel_is_reset_and_one_that_moves_is_not(mock_clock: MockClock) -> None:
    async with open_world(idle_seconds=100) as here, here.tunnel() as (client, server):
        for _ in range(5):
            mock_clock.jump(60)
            await server.send_all(b"x")
            assert await client.receive_some() == b"x"
            await quiet()
        assert here.closed == []
        mock_clock.jump(101)
        await here.recorded(2)
        assert here.closed[0].end is TunnelEnd.IDLE
        assert here.closed[0].duration_ms == 401_000
        for end in (client, server):
            with pytest.raises(trio.BrokenResourceError):
                await end.receive_some()


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_reset_of_one_side_is_a_reset_of_the_other(side: str) -> None:
    async with open_world() as here, here.tunnel() as (client, server):
        broken, other = (client, server) if side == "client" else (server, client)
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await broken.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await other.receive_some()
        await here.recorded(2)
        assert here.closed[0].end is TunnelEnd[f"{side.upper()}_FAILED"]


async def test_a_tunnel_that_the_end_of_open_cuts_is_no_proper_end_for_either_side() -> None:
    async with world() as here:
        async with here.proxy.open():
            client = await here.client()
            await client.send_all(CONNECT)
            server = await here.server.accept()
            await here.recorded(1)
            await server.send_all(b"half of a")
        # Both records are there when the block has been left.
        assert [each.end for each in here.closed] == [TunnelEnd.STOPPED]
        assert here.proxy.tunnels == here.parts.relay.tunnels == 0
        async with client, server:
            for end in (client, server):
                with pytest.raises(trio.BrokenResourceError):
                    await to_end(end)


async def test_after_the_block_nothing_listens_and_it_can_be_opened_again() -> None:
    async with world() as here:
        for _ in range(3):
            async with here.proxy.open(), here.tunnel() as (client, server):
                await client.send_all(b"x")
                assert await server.receive_some() == b"x"
            with pytest.raises(ConnectionRefusedError):
                await here.client()
        await here.proxy.aclose()
        await here.proxy.aclose()
        assert len(here.decisions) == len(here.closed) == 3


async def test_the_bodys_own_error_comes_through_as_it_is() -> None:
    async with world() as here:
        with pytest.raises(ZeroDivisionError):
            async with here.proxy.open(), here.tunnel():
                raise ZeroDivisionError
        assert len(here.closed) == 1


async def test_connections_that_wait_in_the_kernel_are_reset_at_the_end() -> None:
    async with world(connections_waiting_max=1) as here:
        async with here.proxy.open():
            clients = [await here.client() for _ in range(5)]
            await quiet()
        for client in clients:
            async with client:
                with pytest.raises(trio.BrokenResourceError):
                    await client.receive_some()


@pytest.mark.case("EGR-16")
async def test_ten_thousand_connections_cost_the_daemon_its_caps_and_no_more() -> None:
    async with open_world(tunnels_max=8, connections_waiting_max=16) as here:
        before = descriptors()
        attempts = 10_000
        held: list[socket.socket] = []
        for number in range(attempts):
            # Never more than a few hundred at a time of this process's own descriptors.
            sock = socket.socket()
            sock.setblocking(False)
            assert sock.connect_ex(here.address) in (0, errno.EINPROGRESS)
            held.append(sock)
            if len(held) > 300:
                held.pop(0).close()
            if number % 100 == 0:
                await trio.lowlevel.checkpoint()
                assert descriptors() - before - len(held) <= 16 + 2 * 8
        for sock in held:
            sock.close()
        # The control: it is a proxy still.
        async with here.tunnel():
            assert here.proxy.tunnels == 1


async def steps_until(count: int, scope: trio.CancelScope, here: World) -> None:
    """One tunnel, end to end; cancelled at the step of that number, whoever's it is."""

    class Cancel(trio.abc.Instrument):
        left = count

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.left -= 1
            if self.left == 0:
                scope.cancel()

    watch = Cancel()
    trio.lowlevel.add_instrument(watch)
    try:
        with scope:
            async with here.proxy.open(), here.tunnel(b"early") as (client, server):
                await client.send_eof()
                assert await to_end(server) == b"early"
                await server.send_all(b"answer")
                await server.send_eof()
                assert await to_end(client) == b"answer"
                await here.recorded(2)
    finally:
        trio.lowlevel.remove_instrument(watch)


async def test_a_cancellation_at_any_step_leaves_no_socket_and_no_half_record() -> None:
    async with world() as here:

        async def take_a_step(_: object) -> None:
            await trio.lowlevel.checkpoint()

        here.before_record = take_a_step
        await steps_until(10_000, trio.CancelScope(), here)  # the control, and the thread's cache
        before, cancelled = descriptors(), 0
        for number in range(1, 200):
            here.records.clear()
            scope = trio.CancelScope()
            await steps_until(number, scope, here)
            while here.resolver.threads:
                await trio.lowlevel.checkpoint()
            # What the kernel connected and nobody took is this test's own.
            while True:
                try:
                    here.server.sock.accept()[0].close()
                except BlockingIOError:
                    break
            assert descriptors() == before, number
            assert here.proxy.tunnels == here.parts.relay.tunnels == 0
            allowed = [each.connection for each in here.decisions]
            assert [each.connection for each in here.closed] == allowed
            if not scope.cancelled_caught:
                break
            cancelled += 1
        assert 8 < cancelled < 190


@pytest.mark.case("EGR-18")
@pytest.mark.parametrize("pieces", [1, 7])
async def test_a_matching_client_hello_goes_through_whole(pieces: int) -> None:
    hello = client_hello(HOST)
    async with open_world(require_matching_sni=True) as here, here.tunnel() as (client, server):
        step = -(-len(hello) // pieces)
        for start in range(0, len(hello), step):
            await client.send_all(hello[start : start + step])
        await client.send_all(b"after")
        await client.send_eof()
        assert await to_end(server) == hello + b"after"


@pytest.mark.case("EGR-18")
@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (client_hello("other.example.org"), ProxyReason.SNI_MISMATCH),
        (client_hello(None), ProxyReason.SNI_ABSENT),
        (b"GET / HTTP/1.1\r\n", ProxyReason.SNI_ABSENT),
    ],
)
async def test_with_the_sni_check_nothing_of_another_beginning_reaches_the_server(
    first: bytes, reason: ProxyReason
) -> None:
    async with open_world(require_matching_sni=True) as here, here.tunnel() as (client, server):
        await client.send_all(first)
        with pytest.raises(trio.BrokenResourceError):
            await to_end(server)
        with pytest.raises(trio.BrokenResourceError):
            await to_end(client)
        await here.recorded(3)
        assert here.reasons == [None, reason]
        assert here.decisions[1].outcome is Outcome.REFUSED
        assert here.decisions[1].address == here.decisions[0].address
        (closed,) = here.closed
        assert (closed.end, closed.up_bytes) == (TunnelEnd.SNI_REFUSED, 0)


@pytest.mark.case("EGR-18")
async def test_without_the_sni_check_the_tunnel_is_opaque() -> None:
    async with open_world() as here, here.tunnel(client_hello("other.example.org")) as (_, server):
        assert await server.receive_some() == client_hello("other.example.org")


async def test_who_sends_nothing_into_a_checked_tunnel_is_ended(mock_clock: MockClock) -> None:
    async with open_world(require_matching_sni=True) as here, here.tunnel() as (client, _):
        while len(here.records) < 3:
            await quiet()
            mock_clock.jump(6)
        assert here.reasons[-1] is ProxyReason.SNI_ABSENT
        with pytest.raises(trio.BrokenResourceError):
            await client.receive_some()
