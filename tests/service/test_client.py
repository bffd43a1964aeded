"""The worker's client under asyncio and trio, against a daemon that the test plays."""

import anyio
import msgspec
import pytest

from sbxd.client.remote import GREETINGS_MAX, Hooks, RunDeadline, connect
from sbxd.client.workspace import RemoteWorkspace
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    RunBudgetTooLow,
    ServiceShuttingDown,
    StaleLease,
    UnavailableCode,
)
from sbxd.wire import messages as m
from tests.properties.test_wire_legality import HANDLE
from tests.service.played import COMMAND, Daemon, executed, output, playing, run
from tests.service.raw import WELCOME
from tests.service.requests import SPECIFICATION

# --- connecting -------------------------------------------------------------------------------


@pytest.mark.case("API-14")
def test_no_socket_is_unreachable_and_the_text_names_no_path(backend: str, path: str) -> None:
    async def main() -> None:
        async with connect(path):
            raise AssertionError

    with pytest.raises(ExecutionUnavailable) as caught:
        run(backend, main)
    assert caught.value.code is UnavailableCode.UNREACHABLE
    assert path not in caught.value.detail


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (m.GoodbyeCode.NOT_AUTHORIZED, ExecutionRejected),
        (m.GoodbyeCode.VERSION, ExecutionRejected),
        (m.GoodbyeCode.CAPACITY, ExecutionUnavailable),
    ],
)
def test_a_farewell_instead_of_a_welcome_is_a_typed_error(
    backend: str, path: str, code: m.GoodbyeCode, error: type[Exception]
) -> None:
    async def refuse(daemon: Daemon) -> None:
        await daemon.send(m.Goodbye(reason="no", code=code))  # without reading the Hello

    async def main() -> None:
        async with playing(path, refuse):
            with pytest.raises(error):
                async with connect(path):
                    raise AssertionError

    run(backend, main)


async def _shut_down(daemon: Daemon) -> None:
    await daemon.expect(m.Hello)
    await daemon.send(m.Goodbye(reason="bye", code=m.GoodbyeCode.SHUTTING_DOWN))


def test_a_daemon_that_stops_before_its_greeting_is_waited_for(backend: str, path: str) -> None:
    async def greets(daemon: Daemon) -> None:
        await daemon.greet()
        assert await daemon.receive() is None

    async def main() -> None:
        async with playing(path, _shut_down, _shut_down, greets), connect(path) as environment:
            assert environment.mechanism == WELCOME.mechanism

    run(backend, main)


def test_one_that_only_ever_stops_is_not_waited_for_for_ever(backend: str, path: str) -> None:
    async def main() -> None:
        async with playing(path, *[_shut_down] * GREETINGS_MAX):
            with pytest.raises(ServiceShuttingDown):
                async with connect(path):
                    raise AssertionError

    run(backend, main)


def test_a_daemon_that_does_not_greet_is_unreachable(backend: str, path: str) -> None:
    async def silent(daemon: Daemon) -> None:
        while await daemon.receive() is not None:  # its Hello, if there was time for one
            pass

    async def main() -> None:
        async with playing(path, silent):
            with pytest.raises(ExecutionUnavailable):
                async with connect(path, connect_seconds=0.2):
                    raise AssertionError

    run(backend, main)


class Mine(Exception):
    """An error of the caller's own."""


@pytest.mark.parametrize("error", [Mine, KeyboardInterrupt])
def test_the_callers_errors_leave_the_block_as_they_are(
    backend: str, path: str, error: type[BaseException]
) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        assert await daemon.receive() is None

    async def main() -> None:
        async with playing(path, play):
            with pytest.raises(error):
                async with connect(path):
                    raise error

    run(backend, main)


def test_a_timeout_around_the_block_is_a_timeout(backend: str, path: str) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        assert await daemon.receive() is None

    async def main() -> None:
        async with playing(path, play):
            with anyio.CancelScope() as scope:
                async with connect(path):
                    scope.deadline = anyio.current_time() + 0.05  # once it is greeted
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
            await anyio.lowlevel.checkpoint()

    run(backend, main)


def test_a_lost_connection_ends_what_waits_and_what_comes(backend: str, path: str) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        await daemon.expect(m.Provision)

    async def main() -> None:
        async with playing(path, play), connect(path) as environment:
            for _ in range(2):
                with pytest.raises(ExecutionUnavailable) as caught:
                    await environment.provision(SPECIFICATION)
                assert caught.value.code is UnavailableCode.UNREACHABLE

    run(backend, main)


def test_a_daemon_that_breaks_the_protocol_is_unreachable(backend: str, path: str) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        await daemon.expect(m.Provision)
        await daemon.stream.send(b"\0\0\0\x01\xc0")
        assert await daemon.receive() is None

    async def main() -> None:
        async with playing(path, play), connect(path) as environment:
            with pytest.raises(ExecutionUnavailable):
                await environment.provision(SPECIFICATION)

    run(backend, main)


def test_a_farewell_while_shutting_down_is_retriable_as_such(backend: str, path: str) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        await daemon.expect(m.Provision)
        await daemon.send(m.Goodbye(reason="bye", code=m.GoodbyeCode.SHUTTING_DOWN))

    async def main() -> None:
        async with playing(path, play), connect(path) as environment:
            for _ in range(2):  # the answer of this connection from now on
                with pytest.raises(ServiceShuttingDown) as caught:
                    await environment.provision(SPECIFICATION)
                assert caught.value.code is UnavailableCode.SHUTTING_DOWN

    run(backend, main)


def test_a_ping_is_answered_while_nothing_is_asked(backend: str, path: str) -> None:
    ponged = []

    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        await daemon.send(m.Ping(token=7))
        ponged.append(await daemon.expect(m.Pong))

    async def main() -> None:
        async with playing(path, play), connect(path):
            while not ponged:
                await anyio.lowlevel.checkpoint()

    run(backend, main)
    assert ponged == [m.Pong(token=7)]


# --- requests ---------------------------------------------------------------------------------


def test_output_and_changes_are_gathered_in_order(backend: str, path: str) -> None:
    told: list[bytes] = []

    async def on_output(stream: m.OutputStream, data: bytes) -> None:
        told.append(data)

    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        request = await daemon.expect(m.Execute)
        assert request.command.argv == (b"true", b"\xff")
        assert request.stdin_bytes == 3
        assert (await daemon.expect(m.Upload)).data == b"abc"
        for piece in (b"1", b"2", b"3"):
            await daemon.send(output(request.request_id, piece))
        await daemon.send(executed(request.request_id))

    async def main() -> None:
        async with playing(path, play), connect(path, hooks=Hooks(on_output=on_output)) as e:
            command = msgspec.structs.replace(COMMAND, argv=("true", "\udcff"), stdin=b"abc")
            result = await e.execute(HANDLE, command)
            assert result.stdout == b"123"
            assert told == [b"1", b"2", b"3"]

    run(backend, main)


def test_typed_refusals_become_typed_errors(backend: str, path: str) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        for code in (RejectedCode.STALE_LEASE, RejectedCode.ENVIRONMENT_BUSY):
            request = await daemon.expect(m.Execute)
            await daemon.send(
                m.Rejected(request_id=request.request_id, code=code, detail="d", field="f")
            )

    async def main() -> None:
        async with playing(path, play), connect(path) as environment:
            with pytest.raises(StaleLease):
                await environment.execute(HANDLE, COMMAND)
            with pytest.raises(ExecutionRejected) as caught:
                await environment.execute(HANDLE, COMMAND)
            assert caught.value.code is RejectedCode.ENVIRONMENT_BUSY
            assert caught.value.field == "f"

    run(backend, main)


def test_a_refusal_before_the_end_of_an_upload_ends_the_upload(backend: str, path: str) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        request = await daemon.expect(m.WorkspaceWrite)
        await daemon.send(
            m.Rejected(request_id=request.request_id, code=RejectedCode.ENVIRONMENT_GONE, detail="")
        )
        assert await daemon.receive() is None  # what was uploaded until then is dropped

    async def main() -> None:
        async with playing(path, play), connect(path) as environment:
            workspace = RemoteWorkspace(environment.channel, HANDLE)
            with pytest.raises(ExecutionRejected):
                await workspace.write("file", bytes(10 * m.INITIAL_CREDIT_BYTES))

    run(backend, main)


def test_no_more_requests_are_open_than_the_protocol_allows(backend: str, path: str) -> None:
    total = m.REQUESTS_IN_FLIGHT_MAX + 40
    most = 0

    async def play(daemon: Daemon) -> None:
        nonlocal most
        await daemon.greet()
        waiting: list[int] = []
        answered = 0
        while answered < total:
            request = await daemon.expect(m.Destroy)
            waiting.append(request.request_id)
            most = max(most, daemon.connection.open_requests)
            if len(waiting) == m.REQUESTS_IN_FLIGHT_MAX or answered + len(waiting) == total:
                for request_id in waiting:
                    await daemon.send(m.Done(request_id=request_id))
                answered += len(waiting)
                waiting.clear()

    async def main() -> None:
        async with (
            playing(path, play),
            connect(path) as environment,
            anyio.create_task_group() as group,
        ):
            for _ in range(total):
                group.start_soon(environment.destroy, HANDLE)

    run(backend, main)
    assert most == m.REQUESTS_IN_FLIGHT_MAX


def test_leaving_a_read_early_cancels_it_and_the_connection_goes_on(
    backend: str, path: str
) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        request = await daemon.expect(m.WorkspaceRead)
        await daemon.send(m.Content(request_id=request.request_id, data=b"first"))
        cancel = await daemon.expect(m.Cancel)
        assert cancel.request_id == request.request_id
        await daemon.send(m.Cancelled(request_id=request.request_id))
        destroy = await daemon.expect(m.Destroy)
        await daemon.send(m.Done(request_id=destroy.request_id))

    async def main() -> None:
        async with playing(path, play), connect(path) as environment:
            workspace = RemoteWorkspace(environment.channel, HANDLE)
            async with workspace.read_stream("file", maximum_bytes=100) as pieces:
                async for piece in pieces:
                    assert piece == b"first"
                    break
            await environment.destroy(HANDLE)

    run(backend, main)


# --- the run's deadline -----------------------------------------------------------------------


def deadline(remaining: float) -> RunDeadline:
    return RunDeadline(clock=lambda: 1000.0, at=1000.0 + remaining)


@pytest.mark.parametrize(("remaining", "sent"), [(7.9, 7), (5.0, 5), (600.0, 60)])
def test_the_runs_deadline_lowers_the_timeout(
    backend: str, path: str, remaining: float, sent: int
) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        request = await daemon.expect(m.Execute)
        assert request.command.timeout_seconds == sent
        await daemon.send(executed(request.request_id))

    async def main() -> None:
        async with (
            playing(path, play),
            connect(path, run_deadline=deadline(remaining)) as environment,
        ):
            await environment.execute(HANDLE, COMMAND)

    run(backend, main)


@pytest.mark.parametrize("remaining", [4.99, 0.0, -1.0])
def test_below_the_floor_nothing_is_sent(backend: str, path: str, remaining: float) -> None:
    async def play(daemon: Daemon) -> None:
        await daemon.greet()
        assert await daemon.receive() is None

    async def main() -> None:
        async with playing(path, play), connect(path) as environment:
            limited = environment.with_run_deadline(deadline(remaining))
            with pytest.raises(RunBudgetTooLow):
                await limited.execute(HANDLE, COMMAND)

    run(backend, main)
