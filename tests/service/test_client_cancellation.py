"""A cancelled call of the client under asyncio and trio: what is told, waited for and left."""

import asyncio

import anyio
import pytest

from sbxd.client import remote
from sbxd.client.remote import Hooks, RemoteExecutionEnvironment, connect
from sbxd.port.command import ExecutionResult, KillReason
from sbxd.wire import messages as m
from tests.properties.test_wire_legality import HANDLE
from tests.service.played import COMMAND, WITHIN_SECONDS, Daemon, executed, output, playing, run
from tests.service.requests import SPECIFICATION

# --- cancellation -----------------------------------------------------------------------------


async def cancel_once(
    environment: RemoteExecutionEnvironment, started: anyio.Event
) -> anyio.CancelScope:
    """Execute, and cancel it once `started` is set."""
    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()

        async def execute() -> None:
            with scope:
                await environment.execute(HANDLE, COMMAND)
                raise AssertionError("it was to be cancelled")

        group.start_soon(execute)
        await started.wait()
        scope.cancel()
    return scope


@pytest.fixture
def patient_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is heard out, though this machine be slow."""
    monkeypatch.setattr(remote, "CANCEL_WAIT_SECONDS", WITHIN_SECONDS)


@pytest.mark.usefixtures("patient_cancel")
def test_a_cancelled_execute_tells_the_partial_result_and_then_raises(
    backend: str, path: str
) -> None:
    told: list[ExecutionResult] = []

    async def main() -> None:
        started = anyio.Event()

        async def play(daemon: Daemon) -> None:
            await daemon.greet()
            request = await daemon.expect(m.Execute)
            await daemon.send(output(request.request_id, b"before "))
            started.set()
            await daemon.expect(m.Cancel)
            await daemon.send(output(request.request_id, b"after"))
            await daemon.send(executed(request.request_id, KillReason.CANCELLED))

        async with (
            playing(path, play),
            connect(path, hooks=Hooks(on_cancelled=told.append)) as environment,
        ):
            scope = await cancel_once(environment, started)
            assert scope.cancelled_caught

    run(backend, main)
    assert [(each.killed_by, each.stdout) for each in told] == [
        (KillReason.CANCELLED, b"before after")
    ]


@pytest.mark.usefixtures("patient_cancel")
def test_a_cancelled_asyncio_task_does_the_same(path: str) -> None:
    told: list[ExecutionResult] = []

    async def main() -> None:
        started = anyio.Event()

        async def play(daemon: Daemon) -> None:
            await daemon.greet()
            request = await daemon.expect(m.Execute)
            started.set()
            await daemon.expect(m.Cancel)
            await daemon.send(executed(request.request_id, KillReason.CANCELLED))

        async with (
            playing(path, play),
            connect(path, hooks=Hooks(on_cancelled=told.append)) as environment,
        ):
            task = asyncio.create_task(environment.execute(HANDLE, COMMAND))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    anyio.run(main)
    assert [each.killed_by for each in told] == [KillReason.CANCELLED]


def test_a_daemon_that_does_not_answer_a_cancel_delays_it_by_no_more_than_the_bound(
    backend: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CANCEL_WAIT_SECONDS", 0.05)
    told: list[ExecutionResult] = []

    async def main() -> None:
        started, given_up, drained = anyio.Event(), anyio.Event(), anyio.Event()

        async def play(daemon: Daemon) -> None:
            await daemon.greet()
            request = await daemon.expect(m.Execute)
            started.set()
            await daemon.expect(m.Cancel)
            await given_up.wait()
            # The abandoned call is drained, with credit, and the connection goes on.
            sent = 0
            while sent < 3 * m.INITIAL_CREDIT_BYTES:
                while not daemon.connection.credit_bytes(request.request_id):
                    await daemon.expect(m.Credit)
                await daemon.send(output(request.request_id, b"x" * m.CHUNK_BYTES_MAX))
                sent += m.CHUNK_BYTES_MAX
            await daemon.send(executed(request.request_id, KillReason.CANCELLED))
            drained.set()
            destroy = await daemon.expect(m.Destroy)  # late credit is dropped
            await daemon.send(m.Done(request_id=destroy.request_id))

        async with (
            playing(path, play),
            connect(path, hooks=Hooks(on_cancelled=told.append)) as environment,
        ):
            with anyio.fail_after(WITHIN_SECONDS):
                scope = await cancel_once(environment, started)
            assert scope.cancelled_caught
            given_up.set()
            await drained.wait()
            await environment.destroy(HANDLE)

    run(backend, main)
    assert told == []


@pytest.mark.parametrize("when", ["in time", "late"])
def test_what_a_cancelled_provision_made_all_the_same_is_destroyed(
    backend: str, path: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if when == "late":
        monkeypatch.setattr(remote, "CANCEL_WAIT_SECONDS", 0.05)
    destroyed = []

    async def main() -> None:
        started, given_up = anyio.Event(), anyio.Event()

        async def play(daemon: Daemon) -> None:
            await daemon.greet()
            request = await daemon.expect(m.Provision)
            started.set()
            await daemon.expect(m.Cancel)
            if when == "late":
                await given_up.wait()
            await daemon.send(m.Provisioned(request_id=request.request_id, handle=HANDLE))
            destroy = await daemon.expect(m.Destroy)
            destroyed.append(destroy.handle)
            await daemon.send(m.Done(request_id=destroy.request_id))

        async with playing(path, play), connect(path) as environment:
            async with anyio.create_task_group() as group:
                group.start_soon(environment.provision, SPECIFICATION)
                await started.wait()
                group.cancel_scope.cancel()
            given_up.set()
            while not destroyed:
                await anyio.lowlevel.checkpoint()

    run(backend, main)
    assert destroyed == [HANDLE]


def test_a_cancelled_destroy_goes_on_in_the_daemon(backend: str, path: str) -> None:
    async def main() -> None:
        started = anyio.Event()

        async def play(daemon: Daemon) -> None:
            await daemon.greet()
            request = await daemon.expect(m.Destroy)
            started.set()
            provision = await daemon.expect(m.Provision)  # no Cancel in between
            await daemon.send(m.Done(request_id=request.request_id))
            await daemon.send(m.Provisioned(request_id=provision.request_id, handle=HANDLE))

        async with playing(path, play), connect(path) as environment:
            async with anyio.create_task_group() as group:
                group.start_soon(environment.destroy, HANDLE)
                await started.wait()
                group.cancel_scope.cancel()
            assert await environment.provision(SPECIFICATION) == HANDLE

    run(backend, main)
