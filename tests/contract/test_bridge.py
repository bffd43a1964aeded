"""The orchestration bridge, on every adapter: one turn, answered by the worker's handler."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.port.command import KillReason
from sbxd.port.environment import BRIDGE_SOCKET_PATH, BridgeEndpoint, EnvironmentHandle
from sbxd.port.errors import BudgetExhausted, ExecutionRejected, RejectedCode
from sbxd.port.limits import EnvironmentBudgets
from tests.contract.subjects import Subject

Clock = MockClock | None


def endpoint(path: str = BRIDGE_SOCKET_PATH) -> BridgeEndpoint:
    return BridgeEndpoint(socket_path=path, token=secrets.token_hex(16))


@asynccontextmanager
async def provisioned(subject: Subject) -> AsyncIterator[EnvironmentHandle]:
    handle = await subject.environment.provision(subject.specification(bridge=endpoint()))
    try:
        yield handle
    finally:
        await subject.environment.destroy(handle)


async def upper(frame: bytes) -> bytes:
    return frame.upper()


async def test_a_command_calls_the_worker(subject: Subject, clock: Clock) -> None:
    seen: list[bytes] = []

    async def handler(frame: bytes) -> bytes:
        seen.append(frame)
        return b"<" + frame.upper() + b">"

    async with provisioned(subject) as handle:
        result = await subject.with_bridge(handler).run(
            handle, subject.commands.call_bridge("one", "two")
        )
        assert (result.exit_code, result.stdout) == (0, b"<ONE><TWO>"), result
        assert seen == [b"one", b"two"]


async def test_the_two_variables_are_there_with_the_bridge_alone(
    subject: Subject, clock: Clock
) -> None:
    async with provisioned(subject) as handle:
        plain = await subject.run(handle, subject.commands.print_environment())
        bridged = await subject.with_bridge(upper).run(handle, subject.commands.print_environment())
    names = (b"SBX_BRIDGE_SOCKET=" + BRIDGE_SOCKET_PATH.encode(), b"SBX_BRIDGE_TOKEN=")
    assert not any(name in plain.stdout for name in names)
    assert all(name in bridged.stdout for name in names)


async def test_without_a_handler_the_command_reaches_nobody(subject: Subject, clock: Clock) -> None:
    async with provisioned(subject) as handle:
        result = await subject.run(handle, subject.commands.call_bridge("one"))
        assert (result.exit_code, result.stdout) == (1, b"")
        assert b"refuse" in result.stderr


async def test_an_environment_has_one_turn(subject: Subject, clock: Clock) -> None:
    async with provisioned(subject) as handle:
        bridged = subject.with_bridge(upper)
        first = await bridged.run(handle, subject.commands.write())  # does not even connect
        assert first.exit_code == 0
        with pytest.raises(ExecutionRejected) as refused:
            await bridged.run(handle, subject.commands.call_bridge("one"))
        assert (refused.value.code, refused.value.field) == (RejectedCode.BRIDGE_REFUSED, "bridge")
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_a_handler_needs_a_bridge_in_the_specification(
    subject: Subject, clock: Clock
) -> None:
    async with subject.provisioned() as handle:
        with pytest.raises(ExecutionRejected) as refused:
            await subject.with_bridge(upper).run(handle, subject.commands.write())
        assert refused.value.code is RejectedCode.BRIDGE_REFUSED


async def test_the_socket_has_one_place(subject: Subject, clock: Clock) -> None:
    asked = subject.specification(bridge=endpoint("/run/bridge.sock"))
    with pytest.raises(ExecutionRejected) as refused:
        await subject.environment.provision(asked)
    assert refused.value.field == "bridge.socket_path"


class Mine(Exception):
    """The handler's own."""


async def test_what_the_handler_raises_ends_the_command_and_comes_out(
    subject: Subject, clock: Clock
) -> None:
    async def handler(_frame: bytes) -> bytes:
        raise Mine

    async with provisioned(subject) as handle:
        with pytest.raises(Mine):
            await subject.with_bridge(handler).run(
                handle, subject.commands.call_bridge("one", "two")
            )
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_a_call_that_waits_extends_no_clock(subject: Subject, clock: Clock) -> None:
    async def never(_frame: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with provisioned(subject) as handle:
        result = await subject.with_bridge(never).run(
            handle, subject.commands.call_bridge("one"), timeout_seconds=2
        )
        assert (result.killed_by, result.timed_out) == (KillReason.TIMEOUT, True)
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_a_waiting_call_is_cancelled_with_its_execute(subject: Subject, clock: Clock) -> None:
    called = trio.Event()
    was_cancelled = False

    async def never(_frame: bytes) -> bytes:
        nonlocal was_cancelled
        called.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            was_cancelled = True
            raise
        raise AssertionError

    async with provisioned(subject) as handle:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                subject.with_bridge(never).run, handle, subject.commands.call_bridge("one")
            )
            await called.wait()
            nursery.cancel_scope.cancel()
        assert was_cancelled
        (told,) = subject.told.cancelled
        assert told.killed_by is KillReason.CANCELLED
        assert (await subject.run(handle, subject.commands.write())).exit_code == 0


async def test_what_is_said_counts_as_returned_bytes(subject: Subject, clock: Clock) -> None:
    asked = msgspec.structs.replace(
        subject.specification(bridge=endpoint()),
        budgets=EnvironmentBudgets(
            operations_max=20, returned_bytes_max=1000, wall_seconds_max=600
        ),
    )
    handle = await subject.environment.provision(asked)
    result = await subject.with_bridge(upper).run(
        handle, subject.commands.call_bridge("x" * 900, "x" * 200)
    )
    assert result.killed_by is KillReason.OUTPUT_LIMIT
    with pytest.raises(BudgetExhausted):
        await subject.run(handle, subject.commands.write())
