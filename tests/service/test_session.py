"""One connection: one terminal reply a request, whatever the peer, the handler or time does."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.events import Door, PeerRefusal, PeerRefused, RequestRejected, RequestUnserved
from sbxd.fake.engine import FAKE_SETTINGS, FakeEngine
from sbxd.fake.service import FakeEnvironments
from sbxd.lifecycle.environments import Peer
from sbxd.port.command import KillReason
from sbxd.port.environment import EnvironmentHandle, EnvironmentSpec
from sbxd.port.errors import ExecutionUnavailable, RejectedCode, UnavailableCode
from sbxd.service.outgoing import OUTGOING_BYTES_MAX
from sbxd.service.peer import PeerCredentials
from sbxd.service.session import Session
from sbxd.wire import messages as m
from sbxd.wire.connection import HELLO_BYTES_MAX, ServerConnection
from sbxd.wire.legality import Role
from tests.service.memory import MemoryDaemon, memory_daemon
from tests.service.raw import HELLO, RawEnd, Stuck, greeted_client, raw_client
from tests.service.requests import SCRIPT, SPECIFICATION, command, provisioned, specification

HEARTBEAT = FAKE_SETTINGS.service.heartbeat_seconds
GRACE = FAKE_SETTINGS.service.orphan_grace_seconds
FOREIGN = PeerCredentials(pid=5, uid=3000, gid=3000, groups=frozenset({3000}))


@asynccontextmanager
async def replaced(
    name: str, method: Callable[..., Awaitable[object]]
) -> AsyncIterator[MemoryDaemon]:
    """A daemon one of whose lifecycle's methods is another."""
    async with trio.open_nursery() as nursery:
        environments = FakeEnvironments(FakeEngine(SCRIPT), nursery, grace_seconds=GRACE)
        setattr(environments, name, method)
        async with memory_daemon(SCRIPT, environments=environments) as daemon:
            yield daemon
        nursery.cancel_scope.cancel()


def execute(handle: EnvironmentHandle, *argv: str, request_id: int = 2, **limits: int) -> m.Execute:
    return m.Execute(request_id=request_id, handle=handle, command=command(*argv, **limits))


async def farewell_of(raw: RawEnd) -> m.Goodbye:
    last = (await raw.receive_all())[-1]
    assert isinstance(last, m.Goodbye)
    return last


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


# --- the greeting -----------------------------------------------------------------------------


async def test_a_peer_that_does_not_greet_in_time_is_closed(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        start = trio.current_time()
        farewell = await farewell_of(raw_client(await daemon.connect()))
        assert trio.current_time() - start == FAKE_SETTINGS.service.hello_seconds
        assert farewell.code is m.GoodbyeCode.IDLE
        await settled()
        assert daemon.audit.of(PeerRefused)[0].reason is PeerRefusal.HELLO_TOO_LATE


@pytest.mark.case("API-06")
async def test_a_greeting_one_byte_a_second_is_closed_by_the_same_deadline(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = raw_client(await daemon.connect())
        frame = raw.connection.send(HELLO)

        async def drip() -> None:
            for byte in frame:
                try:
                    await raw.stream.send_all(bytes([byte]))
                except trio.BrokenResourceError:
                    return
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip)
            assert (await farewell_of(raw)).code is m.GoodbyeCode.IDLE
        assert trio.current_time() < 10


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        (HELLO_BYTES_MAX + 1).to_bytes(4, "big"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\x01\xc0",
    ],
    ids=["empty", "huge", "above the cap", "http", "null"],
)
@pytest.mark.case("API-06")
async def test_what_is_no_greeting_is_closed_with_a_reason(
    autojump_clock: MockClock, garbage: bytes
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = raw_client(await daemon.connect())
        await raw.stream.send_all(garbage)
        assert (await farewell_of(raw)).code is m.GoodbyeCode.PROTOCOL
        await settled()
        assert daemon.audit.of(PeerRefused)[0].reason is PeerRefusal.PROTOCOL_VIOLATED
        assert trio.current_time() == 0


async def test_a_request_instead_of_a_greeting_provisions_nothing(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = raw_client(await daemon.connect())
        await raw.send_illegal(m.Provision(request_id=1, specification=SPECIFICATION))
        assert (await farewell_of(raw)).code is m.GoodbyeCode.PROTOCOL
        assert await daemon.environments.list() == ()
        await provisioned(await greeted_client(await daemon.connect()))
        assert len(await daemon.environments.list()) == 1


async def test_another_protocol_version_is_told_which_one_is_spoken(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = raw_client(await daemon.connect())
        await raw.send(msgspec.structs.replace(HELLO, protocol_version=99))
        farewell = await farewell_of(raw)
        assert farewell.code is m.GoodbyeCode.VERSION
        assert str(m.PROTOCOL_VERSION) in farewell.reason


# --- requests and their replies ---------------------------------------------------------------


async def test_requests_of_one_connection_run_concurrently(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        one = await provisioned(raw, 1, run="one")
        two = await provisioned(raw, 2, run="two")
        await raw.send(execute(one, "forever", request_id=3, timeout_seconds=10))
        await raw.send(execute(two, "hello", request_id=4))
        order = [
            message.request_id
            for message in [await raw.receive() for _ in range(4)]
            if isinstance(message, m.Executed)
        ]
        assert order == [4, 3]


async def test_a_crashed_handler_is_answered_logged_and_survived(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(owner: Peer, wanted: EnvironmentSpec) -> EnvironmentHandle:
        raise RuntimeError("a bug at /var/lib/secret/path")

    async with replaced("provision", crash) as daemon:
        raw = await greeted_client(await daemon.connect())
        await raw.send(m.Provision(request_id=1, specification=SPECIFICATION))
        reply = await raw.receive()
        assert isinstance(reply, m.Unavailable)
        assert "/var" not in reply.detail
        assert [record.exc_info is not None for record in caplog.records] == [True]
        await raw.send(m.Ping(token=5))
        assert await raw.receive() == m.Pong(token=5)


async def test_an_illegal_reply_of_a_handler_is_answered_as_unavailable(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def wrong(peer: Peer, request: m.AnyRequest, exchange: object) -> m.TerminalReply:
        return m.Reconciled(request_id=request.request_id, destroyed=(), quarantined=())

    async with memory_daemon(SCRIPT) as daemon:
        daemon.context.dispatch.handle = wrong  # type: ignore[method-assign]
        raw = await greeted_client(await daemon.connect())
        await raw.send(m.Provision(request_id=1, specification=SPECIFICATION))
        assert isinstance(await raw.receive(), m.Unavailable)
        assert len(caplog.records) == 1


async def test_a_refusal_is_audited_and_an_unserved_request_too(
    autojump_clock: MockClock,
) -> None:
    async def no_place(owner: Peer, wanted: EnvironmentSpec) -> EnvironmentHandle:
        raise ExecutionUnavailable(UnavailableCode.CAPACITY, "no place")

    async with replaced("provision", no_place) as daemon:
        raw = await greeted_client(await daemon.connect())
        await raw.send(m.Provision(request_id=1, specification=SPECIFICATION))
        assert isinstance(await raw.receive(), m.Unavailable)
        (unserved,) = daemon.audit.of(RequestUnserved)
        assert (unserved.verb, unserved.tenant_id) == ("provision", SPECIFICATION.tenant_id)
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        handle = await provisioned(raw)
        daemon.audit.fail()
        await raw.send(execute(handle, "./relative"))
        reply = await raw.receive()
        assert isinstance(reply, m.Rejected)
        daemon.audit.recover()
        await raw.send(execute(handle, "./relative", request_id=3))
        await raw.receive()
        (rejected,) = daemon.audit.of(RequestRejected)
        assert rejected.code is RejectedCode.INVALID_COMMAND
        assert rejected.environment_id == handle.environment_id


@pytest.mark.case("API-09")
async def test_another_uids_environment_is_as_one_that_never_was(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        handle = await provisioned(await greeted_client(await daemon.connect()))
        daemon.peer = FOREIGN
        foreign = await greeted_client(await daemon.connect())
        await foreign.send(execute(handle, "true", request_id=1))
        theirs = await foreign.receive()
        never = msgspec.structs.replace(handle, environment_id="0" * 32)
        await foreign.send(execute(never, "true", request_id=2))
        unknown = await foreign.receive()
        assert isinstance(theirs, m.Rejected)
        assert isinstance(unknown, m.Rejected)
        assert (theirs.code, theirs.detail) == (unknown.code, unknown.detail)
        assert theirs.code is RejectedCode.ENVIRONMENT_GONE


# --- cancel, and the end of a connection ------------------------------------------------------


async def test_cancel_of_a_command_gives_its_result_with_partial_output(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        handle = await provisioned(raw)
        await raw.send(execute(handle, "forever"))
        assert isinstance(await raw.receive(), m.Output)
        await raw.send(m.Cancel(request_id=2))
        reply = await raw.receive()
        assert isinstance(reply, m.Executed)
        assert reply.killed_by is KillReason.CANCELLED
        assert reply.exit_code is None


async def test_cancel_of_what_has_no_result_is_answered_cancelled(
    autojump_clock: MockClock,
) -> None:
    async with replaced("provision", hang) as daemon:
        raw = await greeted_client(await daemon.connect())
        await raw.send(m.Provision(request_id=1, specification=SPECIFICATION))
        await raw.send(m.Cancel(request_id=1))
        assert await raw.receive() == m.Cancelled(request_id=1)


async def test_cancel_of_a_command_whose_stdin_is_still_coming_starts_nothing(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        handle = await provisioned(raw)
        await raw.send(msgspec.structs.replace(execute(handle, "stdin"), stdin_bytes=10))
        await raw.send(m.Upload(request_id=2, data=b"12345"))
        await raw.send(m.Cancel(request_id=2))
        assert await raw.receive() == m.Cancelled(request_id=2)
        (info,) = await daemon.environments.list()
        assert info.commands_run == 0


async def hang(*arguments: object, **keywords: object) -> EnvironmentHandle:
    await trio.sleep_forever()
    raise AssertionError


@pytest.mark.case("API-15")
async def test_the_end_of_a_connection_cancels_its_requests_and_releases_its_environments(
    autojump_clock: MockClock,
) -> None:
    cancelled = trio.Event()

    async def until_cancelled(*arguments: object, **keywords: object) -> object:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with replaced("execute", until_cancelled) as daemon:
        raw = await greeted_client(await daemon.connect())
        handle = await provisioned(raw)
        await raw.send(execute(handle, "forever"))
        await settled()
        assert not cancelled.is_set()
        await raw.stream.aclose()
        await cancelled.wait()
        await settled()
        assert daemon.service.connections == 0
        assert len(await daemon.environments.list()) == 1
        await trio.sleep(GRACE + 1)
        assert await daemon.environments.list() == ()


async def test_an_environment_that_another_connection_of_its_owner_uses_outlives_the_first(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        first = await greeted_client(await daemon.connect())
        handle = await provisioned(first)
        await first.stream.aclose()
        second = await greeted_client(await daemon.connect())
        await second.send(execute(handle, "true", request_id=1))
        assert isinstance(await second.receive(), m.Executed)
        await trio.sleep(GRACE - 1)
        await second.send(m.Ping(token=1))
        await second.receive()
        assert len(await daemon.environments.list()) == 1


@pytest.mark.parametrize(
    "illegal",
    [
        (HELLO,),
        (m.AdminList(request_id=1),),
        (m.Cancel(request_id=9),),
        (m.Upload(request_id=9, data=b"x"),),
        (m.Pong(token=1),),
        (m.Welcome(protocol_version=1, server="", mechanism=""),),
        (
            m.Provision(request_id=1, specification=SPECIFICATION),
            m.Provision(request_id=1, specification=SPECIFICATION),
        ),
        tuple(
            m.Provision(request_id=n, specification=specification(f"run-{n}"))
            for n in range(1, m.REQUESTS_IN_FLIGHT_MAX + 2)
        ),
    ],
    ids=[
        "second hello",
        "admin verb",
        "unknown cancel",
        "unknown upload",
        "pong",
        "a server's message",
        "duplicate id",
        "too many",
    ],
)
async def test_an_illegal_message_ends_the_connection_with_a_reason(
    autojump_clock: MockClock, illegal: tuple[m.Message, ...]
) -> None:
    async with replaced("provision", hang) as daemon:
        raw = await greeted_client(await daemon.connect())
        await raw.send_illegal(*illegal)
        assert (await farewell_of(raw)).code is m.GoodbyeCode.PROTOCOL
        await settled()
        assert daemon.audit.of(PeerRefused)[0].reason is PeerRefusal.PROTOCOL_VIOLATED
        assert daemon.service.connections == 0


async def test_an_operators_request_is_answered_on_the_admin_socket(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        admin = await greeted_client(await daemon.connect(Door.ADMIN), Role.ADMIN)
        await admin.send(m.AdminList(request_id=1))
        assert await admin.receive() == m.Environments(request_id=1, environments=())


# --- time and backpressure --------------------------------------------------------------------


async def test_a_silent_peer_is_pinged_and_one_that_answers_stays(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        for _ in range(5):
            ping = await raw.receive()
            assert isinstance(ping, m.Ping)
            await raw.send(m.Pong(token=ping.token))
        assert trio.current_time() == 5 * HEARTBEAT
        assert daemon.service.connections == 1


async def test_a_peer_that_answers_no_ping_is_closed(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        farewell = await farewell_of(raw)
        assert farewell.code is m.GoodbyeCode.IDLE
        assert trio.current_time() == 2 * HEARTBEAT


@pytest.mark.case("API-10")
async def test_a_peer_that_never_reads_is_held_back_and_then_closed_while_others_are_served(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []
    original = Session.__init__

    def remember(self: Session, *arguments: object, **keywords: object) -> None:
        original(self, *arguments, **keywords)  # type: ignore[arg-type]
        sessions.append(self)

    monkeypatch.setattr(Session, "__init__", remember)
    async with memory_daemon(SCRIPT) as daemon:
        other = await greeted_client(await daemon.connect())
        client, server = trio.testing.memory_stream_pair()
        stuck = Stuck(server, taken=1000)
        await daemon.listeners[Door.WORKER].offer(stuck)
        raw = raw_client(client)
        await raw.send(HELLO)
        raw.connection.receive_data(ServerConnection(role=Role.WORKER).send(m.Goodbye(reason="")))
        requests = [
            m.Provision(request_id=n, specification=specification(f"stuck-{n}"))
            for n in range(1, 65)
        ]
        await raw.send_illegal(*requests)
        await settled()
        assert sessions[1]._outgoing.waiting_bytes <= OUTGOING_BYTES_MAX + m.FRAME_BYTES_MAX
        await provisioned(other)
        assert not stuck.closed.is_set()
        with trio.fail_after(5 * HEARTBEAT):
            await stuck.closed.wait()
        assert trio.current_time() >= HEARTBEAT


async def test_output_waits_for_credit_and_other_requests_do_not(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        handle = await provisioned(raw)
        await raw.send(execute(handle, "bytes", str(3 * m.INITIAL_CREDIT_BYTES)))
        received = 0
        while received < m.INITIAL_CREDIT_BYTES:
            message = await raw.receive()
            assert isinstance(message, m.Output)
            received += len(message.data)
        assert received == m.INITIAL_CREDIT_BYTES
        await provisioned(raw, 3, run="other")
        while True:
            await raw.send(m.Credit(request_id=2, size_bytes=m.INITIAL_CREDIT_BYTES // 2))
            taken = 0
            while taken < m.INITIAL_CREDIT_BYTES // 2:
                message = await raw.receive()
                if isinstance(message, m.Executed):
                    assert received == 3 * m.INITIAL_CREDIT_BYTES
                    return
                assert isinstance(message, m.Output)
                taken += len(message.data)
                received += len(message.data)
