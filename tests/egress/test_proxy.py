"""The proxy on loopback: what it lets through, what it refuses, and what it says of both."""

import errno
import http.client
import socket
from contextlib import suppress

import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.egress_events import EgressFailed
from sbxd.egress.decisions import Outcome, ProxyReason, RecordUnavailable, TunnelEnd
from sbxd.egress.listening import ListenerUnusable
from sbxd.egress.sockets import PeerMismatch
from sbxd.policy.egress import EgressRefusal
from sbxd.port.errors import BudgetExhausted
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.proxies import Origin, event_of
from tests.egress.world import (
    CONNECT,
    HOST,
    OTHER_PUBLIC,
    POLICY,
    PUBLIC,
    head_of,
    open_world,
    status_of,
    to_end,
    world,
)

ORIGIN = Origin(
    environment_id=EnvironmentId("a" * 32),
    tenant_id=TenantId("tenant"),
    run_id=RunId("run"),
    lease_epoch=1,
    command_number=1,
)


def connect(target: str) -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\n\r\n".encode()


async def test_a_listed_destination_gets_a_tunnel_and_two_records() -> None:
    async with open_world() as here, here.tunnel() as (client, server):
        await client.send_all(b"ping")
        assert await server.receive_some() == b"ping"
        await server.send_all(b"pong!")
        assert await client.receive_some() == b"pong!"
        await client.send_eof()
        assert await server.receive_some() == b""
        await server.send_all(b"late")  # half-closed, and the other way goes on
        await server.send_eof()
        assert await to_end(client) == b"late"
        await here.recorded(2)
        (decision,), (closed,) = here.decisions, here.closed
        assert decision.outcome is Outcome.ALLOWED
        assert (decision.host, decision.port, decision.address) == (HOST, 443, PUBLIC)
        assert decision.rule == f"{HOST}:443"
        assert (closed.up_bytes, closed.down_bytes, closed.end) == (4, 9, TunnelEnd.FINISHED)
        assert closed.connection == decision.connection
        assert here.charges == 1


async def test_bytes_behind_the_head_come_first_through_the_tunnel() -> None:
    early = bytes(range(256)) * 20 + b"GET / HTTP/1.1\r\n\r\n"
    async with open_world() as here, here.tunnel(early) as (client, server):
        await client.send_all(b"more")
        await client.send_eof()
        assert await to_end(server) == early + b"more"


@pytest.mark.case("EGR-07", "EGR-12")
async def test_each_connect_is_one_lookup_of_the_full_name_and_dials_what_was_judged() -> None:
    async with open_world() as here:
        rebinding = iter([(PUBLIC,), ("10.0.0.1",), ("127.0.0.1",)])
        here.answers = lambda _: next(rebinding)
        async with here.tunnel():
            assert here.lookups == [f"{HOST}."]
            assert here.dials == [(PUBLIC, 443)]
        assert (await here.ask())[0] == 403  # the control: the resolver did change its mind
        assert here.lookups == [f"{HOST}."] * 2
        assert here.dials == [(PUBLIC, 443)]
        assert here.reasons == [None, EgressRefusal.ADDRESS_REFUSED]
        assert here.decisions[1].address == "10.0.0.1"


@pytest.mark.case("EGR-07")
async def test_a_dial_that_fails_goes_on_to_the_next_judged_address_and_to_no_other() -> None:
    async with open_world() as here:
        here.answers = lambda _: (PUBLIC, OTHER_PUBLIC)

        async def only_the_second(address: str, port: int) -> socket.socket:
            if address == PUBLIC:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            return await here.to_server(address, port)

        here.reach = only_the_second
        async with here.tunnel():
            assert here.dials == [(PUBLIC, 443), (OTHER_PUBLIC, 443)]
            assert here.decisions[0].address == OTHER_PUBLIC
        assert here.lookups == [f"{HOST}."]


async def test_nothing_is_dialled_when_one_address_of_many_is_bad() -> None:
    async with open_world() as here:
        here.answers = lambda _: (PUBLIC, "fd00:ec2::254")
        status, answer = await here.ask()
        assert (status, here.dials) == (403, [])
        assert b"fd00" not in answer  # the sandbox does not learn what the name resolves to


@pytest.mark.parametrize(
    ("problem", "status", "reason"),
    [
        (ConnectionRefusedError(111, "Connection refused"), 502, ProxyReason.DIAL_FAILED),
        (OSError(101, "Network is unreachable"), 502, ProxyReason.DIAL_FAILED),
        (PeerMismatch(113, "another"), 502, ProxyReason.PEER_MISMATCH),
    ],
)
async def test_a_server_that_is_not_reached_is_a_502(
    problem: OSError, status: int, reason: ProxyReason
) -> None:
    async with open_world() as here:
        here.answers = lambda _: (PUBLIC, OTHER_PUBLIC)

        async def fail(address: str, port: int) -> socket.socket:
            raise problem

        here.reach = fail
        assert (await here.ask())[0] == status
        assert here.reasons == [reason]
        assert here.decisions[0].outcome is Outcome.FAILED
        assert here.decisions[0].addresses == (PUBLIC, OTHER_PUBLIC)
        assert here.decisions[0].address == here.dials[-1][0]
        event = event_of(here.decisions[0], ORIGIN)
        assert isinstance(event, EgressFailed)
        assert (event.addresses, event.address) == ((PUBLIC, OTHER_PUBLIC), here.dials[-1][0])


async def test_a_server_that_does_not_answer_is_a_504(mock_clock: MockClock) -> None:
    async with open_world() as here, trio.open_nursery() as nursery:
        dialled = trio.Event()

        async def hang(address: str, port: int) -> socket.socket:
            dialled.set()
            await trio.sleep_forever()
            raise AssertionError

        here.reach = hang
        found: list[int] = []

        async def ask() -> None:
            found.append((await here.ask())[0])

        nursery.start_soon(ask)
        await dialled.wait()
        mock_clock.jump(11)
        await here.recorded(1)
        assert here.reasons == [ProxyReason.DIAL_TOO_LATE]
        assert (here.decisions[0].address, here.decisions[0].addresses) == (PUBLIC, (PUBLIC,))
    assert found == [504]


async def test_a_name_that_does_not_resolve_is_a_502_with_the_cause() -> None:
    async with open_world() as here:

        def absent(host: bytes) -> list[str]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        here.answers = absent
        status, answer = await here.ask()
        assert status == 502
        assert b"Name or service not known" in answer
        assert here.reasons == [EgressRefusal.RESOLUTION_FAILED]


@pytest.mark.case("EGR-03")
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("evilexample.org:443", EgressRefusal.HOST_NOT_LISTED),
        (f"{HOST}.evil.net:443", EgressRefusal.HOST_NOT_LISTED),
        ("a.b.wild.example.org:443", EgressRefusal.HOST_NOT_LISTED),
        ("wild.example.org:443", EgressRefusal.HOST_NOT_LISTED),
        (f"{HOST}:8443", EgressRefusal.PORT_NOT_LISTED),
        ("localhost:443", EgressRefusal.HOST_NOT_LISTED),
    ],
)
async def test_a_miss_is_a_403_without_a_lookup_that_says_what_to_do(
    target: str, reason: EgressRefusal
) -> None:
    host, _, port = target.partition(":")
    async with open_world() as here:
        status, answer = await here.ask(connect(target))
        assert status == 403
        assert here.lookups == []
        assert here.reasons == [reason]
        head, _, body = answer.partition(b"\r\n\r\n")
        assert f"{target} {reason}".encode() in head.split(b"\r\n")[0]
        lines = dict(line.split(": ", 1) for line in body.decode().splitlines()[1:])
        assert (lines["host"], lines["port"]) == (host, port)
        assert {"rule", "why", "remedy"} <= lines.keys()
        # The control: the same proxy has a tunnel for what is listed.
        async with here.tunnel():
            assert here.lookups == [f"{HOST}."]


@pytest.mark.case("EGR-06", "EGR-13", "EGR-19")
@pytest.mark.parametrize(
    "head",
    [
        connect("169.254.169.254:443"),
        connect("2130706433:443"),
        connect("[::1]:443"),
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\x05\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"connect files.example.org:443 HTTP/1.1\r\n\r\n",
        b"CONNECT files.example.org:443 HTTP/1.1\n\n",
    ],
)
async def test_what_is_malformed_is_a_400_and_nothing_is_looked_up(head: bytes) -> None:
    async with open_world() as here:
        status, answer = await here.ask(head)
        assert status == 400
        assert b"Connection: close" in answer
        assert (here.lookups, here.dials) == ([], [])
        assert here.reasons == [ProxyReason.MALFORMED]
        assert here.charges == 1


@pytest.mark.case("EGR-15")
@pytest.mark.parametrize(
    "line",
    [
        "GET http://files.example.org/ HTTP/1.1",
        "POST http://files.example.org/ HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "TRACE / HTTP/1.1",
        "GET /admin HTTP/1.1",
        "GET /metrics HTTP/1.0",
    ],
)
async def test_other_methods_and_paths_are_a_405(line: str) -> None:
    async with open_world() as here:
        status, answer = await here.ask(f"{line}\r\n\r\n".encode())
        assert status == 405
        assert b"Allow: CONNECT\r\n" in answer
        assert here.reasons == [ProxyReason.METHOD_NOT_ALLOWED]
        assert here.lookups == []


@pytest.mark.case("EGR-16")
async def test_a_head_of_a_mebibyte_is_refused_after_8_kib() -> None:
    async with open_world() as here, await here.client() as client:
        await client.send_all(CONNECT[:-2] + b"x: ")
        with suppress(trio.BrokenResourceError):
            for _ in range(1024):
                await client.send_all(b"a" * 1024)
        await here.recorded(1)
        assert here.reasons == [ProxyReason.HEAD_TOO_LARGE]


@pytest.mark.case("EGR-16")
async def test_a_slow_head_is_ended_after_its_time(mock_clock: MockClock) -> None:
    async with open_world() as here, await here.client() as client:
        await client.send_all(CONNECT[:10])
        await trio.testing.wait_all_tasks_blocked(0.05)
        mock_clock.jump(4.9)
        await client.send_all(CONNECT[10:12])
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert here.reasons == []
        while not here.records:
            mock_clock.jump(0.2)
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert here.reasons == [ProxyReason.HEAD_TOO_LATE]
        assert status_of(await head_of(client)) == 408


async def test_who_goes_away_without_a_request_is_no_attempt() -> None:
    async with open_world() as here:
        await (await here.client()).aclose()
        assert (await here.ask(b"x\r\n"))[0] == 400  # the control: this one is
        assert here.charges == 1
        assert len(here.records) == 1


async def test_above_the_tunnels_there_is_a_503_and_no_lookup_until_one_ends() -> None:
    async with open_world(tunnels_max=2) as here:
        async with here.tunnel(), here.tunnel():
            looked_up = len(here.lookups)
            status, answer = await here.ask()
            assert status == 503
            assert b"Retry-After" in answer
            assert len(here.lookups) == looked_up
            assert here.reasons[-1] is ProxyReason.TOO_MANY_TUNNELS
        await here.recorded(5)
        async with here.tunnel():
            assert here.proxy.tunnels == 1


async def test_a_tunnel_takes_no_place_from_those_who_wait() -> None:
    async with open_world(connections_waiting_max=1) as here, here.tunnel(), here.tunnel():
        async with here.tunnel() as (client, server):
            await client.send_all(b"x")
            assert await server.receive_some() == b"x"
        assert here.proxy.tunnels >= 2


async def test_a_decision_that_cannot_be_recorded_is_no_tunnel() -> None:
    async with open_world() as here:
        here.record_fails = True
        status, answer = await here.ask()
        assert status == 503
        assert b"audit_unavailable" in answer
        async with await here.server.accept() as server:
            with pytest.raises(trio.BrokenResourceError):
                assert await server.receive_some() != b""
        assert here.records == []
        here.record_fails = False
        async with here.tunnel():
            pass


async def test_no_byte_reaches_the_server_and_no_200_the_client_before_the_record() -> None:
    async with open_world() as here, trio.open_nursery() as nursery:
        recording, go_on = trio.Event(), trio.Event()

        async def wait(_: object) -> None:
            recording.set()
            await go_on.wait()

        here.before_record = wait
        async with await here.client() as client:
            await client.send_all(CONNECT + b"early")
            await recording.wait()
            async with await here.server.accept() as server:
                with trio.move_on_after(0.05) as quiet:
                    async with trio.open_nursery() as either:
                        either.start_soon(client.receive_some)
                        either.start_soon(server.receive_some)
                assert quiet.cancelled_caught
                go_on.set()
                assert await server.receive_some() == b"early"
        nursery.cancel_scope.cancel()


async def test_an_attempt_beyond_the_budget_is_refused_and_recorded() -> None:
    async with open_world() as here:

        def spent() -> None:
            raise BudgetExhausted("spent", field="budgets.operations_max")

        here.charge = spent
        status, _ = await here.ask()
        assert (status, here.lookups, here.dials) == (403, [], [])
        assert here.reasons == [ProxyReason.BUDGET_EXHAUSTED]


@pytest.mark.case("EGR-22")
async def test_denials_beyond_the_rate_are_paused_counted_and_charged_exactly(
    mock_clock: MockClock,
) -> None:
    denials, rate, places = 400, 10, 16
    async with open_world(denials_per_second=rate, connections_waiting_max=places) as here:
        answered = 0

        async def deny() -> None:
            nonlocal answered
            for _ in range(denials // 50):
                assert (await here.ask(connect("secret-bits.evil.net:443")))[0] == 403
                answered += 1

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(deny)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert here.charges <= rate + places  # and the others wait for these
            while answered < denials:
                await trio.testing.wait_all_tasks_blocked(0.01)
                # Within one second no more than the rate and the places are through.
                before = here.charges
                mock_clock.jump(1)
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert here.charges - before <= rate + 2 * places
        mock_clock.jump(1.01)
        while len(here.decisions) + here.counted < denials:
            await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(here.decisions) + here.counted == denials == here.charges
    assert here.counted > denials / 2
    assert set(here.reasons) == {EgressRefusal.HOST_NOT_LISTED}


async def test_denials_that_could_not_be_recorded_are_counted_later() -> None:
    async with world() as here:
        here.record_fails = True
        async with here.proxy.open():
            for _ in range(3):
                assert (await here.ask(connect("evil.net:443")))[0] == 403
        assert here.proxy.unrecorded == 1
        with pytest.raises(RecordUnavailable):
            async with here.proxy.open():
                raise AssertionError("it listens without its records")
        here.record_fails = False
        async with here.proxy.open():
            assert here.counted == 3
            async with here.tunnel():
                pass


async def test_the_error_of_an_ordinary_client_names_the_refusal() -> None:
    async with open_world() as here:

        def ask() -> None:
            connection = http.client.HTTPSConnection(*here.address, timeout=30)
            connection.set_tunnel("pypi.example.net", 443)
            try:
                connection.request("GET", "/")
            finally:
                connection.close()

        with pytest.raises(OSError, match=r"403 pypi\.example\.net:443 host_not_listed: none of"):
            await trio.to_thread.run_sync(ask)


async def test_an_open_proxy_is_not_opened_again() -> None:
    async with open_world() as here:
        with pytest.raises(ListenerUnusable):
            async with here.proxy.open():
                raise AssertionError
        async with here.tunnel():  # and goes on
            pass


async def test_the_policy_is_the_environments_own() -> None:
    async with open_world(POLICY) as here, here.tunnel():
        pass
    denying = type(POLICY)()
    async with open_world(denying) as here:
        assert (await here.ask())[0] == 403
        assert here.reasons == [EgressRefusal.MODE_DENY]
