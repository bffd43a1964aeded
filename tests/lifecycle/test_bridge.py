"""One turn of a bridge: who opens it, what passes, what it costs, and when it is over."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.audit.bridge_events import BridgeClosed, BridgeOpened, BridgeRefused
from sbxd.audit.events import AuditEvent, CommandFinished
from sbxd.lifecycle.bridge import Turn
from sbxd.mechanism.protocol import CommandNotStarted, StartFailure
from sbxd.policy.bridge import BridgeCaps, Refusal
from sbxd.policy.budgets import Account
from sbxd.port.command import KillReason
from sbxd.port.environment import BRIDGE_SOCKET_PATH, BridgeEndpoint
from sbxd.port.errors import ExecutionRejected, ExecutionUnavailable, RejectedCode, UnavailableCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.limits import EnvironmentBudgets
from sbxd.wire.messages import BRIDGE_FRAME_BYTES_MAX
from tests.lifecycle.bridge_double import DoubleDoor, DoubleProgram, DoubleWorker
from tests.lifecycle.double import Behaviour, Script
from tests.lifecycle.world import WORKER, World, open_world, spec

TOKEN = "right-token-right"
ENDPOINT = BridgeEndpoint(socket_path=BRIDGE_SOCKET_PATH, token=TOKEN)
ROOMY = EnvironmentBudgets(operations_max=1000, returned_bytes_max=2**30, wall_seconds_max=3600)
CAPS = BridgeCaps(refusals_max=6, refusals_audited_max=2, turn_bytes_max=1_000_000)


@dataclass
class Rig:
    """A turn that runs, and what is around it."""

    door: DoubleDoor
    worker: DoubleWorker
    account: Account
    turn: Turn
    events: list[AuditEvent]
    over_budget: list[bool] = field(default_factory=list)

    async def greet(self, token: str = TOKEN) -> tuple[DoubleProgram, bytes | None]:
        program = self.door.connect()
        await program.send(token.encode())
        return program, await program.receive()

    async def opened(self) -> DoubleProgram:
        program, answer = await self.greet()
        assert answer == b"ACCEPTED"
        return program


@asynccontextmanager
async def turn(
    *, caps: BridgeCaps = CAPS, budgets: EnvironmentBudgets = ROOMY, recorded: bool = True
) -> AsyncIterator[Rig]:
    door, worker, account = DoubleDoor(), DoubleWorker(), Account(budgets)
    events: list[AuditEvent] = []
    over: list[bool] = []

    async def emit(event: AuditEvent) -> bool:
        await trio.lowlevel.checkpoint()
        events.append(event)
        return recorded

    made = Turn(
        door,
        ENDPOINT,
        worker,
        account=account,
        emit=emit,
        over_budget=lambda: over.append(True),
        identity={
            "environment_id": EnvironmentId("0" * 32),
            "tenant_id": TenantId("tenant"),
            "run_id": RunId("run"),
            "lease_epoch": 1,
        },
        command_number=3,
        caps=caps,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        with trio.fail_after(60):
            yield Rig(door, worker, account, made, events, over)
        nursery.cancel_scope.cancel()


async def test_frames_pass_in_order_both_ways_and_are_counted_and_charged() -> None:
    async with turn() as rig:
        program = await rig.opened()
        for number in range(20):
            await program.send(b"%d" % number)
        await rig.worker.wait_frames(20)
        assert rig.worker.frames == [b"%d" % number for number in range(20)]
        for number in range(20):
            await rig.worker.reply(b"r%d" % number)
        assert [await program.receive() for _ in range(20)] == [b"r%d" % n for n in range(20)]
        counts = rig.turn.closing_event().counts
        assert (counts.frames_from_environment, counts.frames_from_worker) == (20, 20)
        assert rig.account.returned_bytes == counts.bytes_from_environment == 30
        assert rig.account.written_bytes == counts.bytes_from_worker == 50
        assert rig.account.operations == 1
        assert rig.worker.told == ["opened"]
    assert program.daemon_end.closed
    assert rig.door.is_closed


async def test_bytes_however_cut_are_the_same_frames() -> None:
    async with turn() as rig:
        program = rig.door.connect()
        whole = b"".join(
            len(body).to_bytes(4, "big") + body for body in (TOKEN.encode(), b"one", b"x" * 3000)
        )
        for byte in whole:
            await program.send_raw(bytes([byte]))
        await rig.worker.wait_frames(2)
        assert rig.worker.frames == [b"one", b"x" * 3000]


@pytest.mark.parametrize(
    ("presented", "refusal"),
    [
        ("wrong-token-wrong", Refusal.WRONG_TOKEN),
        (TOKEN[:-1], Refusal.WRONG_TOKEN),
        (TOKEN + " ", Refusal.WRONG_TOKEN),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), Refusal.WRONG_TOKEN),
    ],
)
async def test_a_wrong_token_is_refused_and_the_right_one_works_afterwards(
    presented: str, refusal: Refusal
) -> None:
    async with turn() as rig:
        program, answer = await rig.greet(presented)
        assert answer == b"REFUSED " + refusal.encode()
        assert await program.receive() is None
        await rig.opened()
        assert rig.account.operations == 2
        (event, _) = rig.events
        assert isinstance(event, BridgeRefused)
        assert (event.refusal, event.command_number) == (refusal, 3)
        assert TOKEN not in repr(rig.events)


async def test_a_token_is_good_for_one_connection_also_when_two_present_it_at_once() -> None:
    async with turn() as rig:
        programs = [rig.door.connect() for _ in range(4)]
        for program in programs:
            await program.send(TOKEN.encode())
        answers = [await program.receive() for program in programs]
        assert sorted(filter(None, answers)) == [b"ACCEPTED", *[b"REFUSED TOKEN_USED"] * 3]
        programs[answers.index(b"ACCEPTED")].close()
        await rig.worker.wait_told("closed ENDED")
        assert (await rig.greet())[1] == b"REFUSED TOKEN_USED"
        assert rig.worker.told.count("opened") == 1


async def test_who_says_nothing_is_refused_in_time_and_holds_nobody_back(
    autojump_clock: MockClock,
) -> None:
    async with turn() as rig:
        silent = rig.door.connect()
        await rig.opened()
        started = trio.current_time()
        assert await silent.receive() == b"REFUSED NO_TOKEN"
        assert trio.current_time() - started == pytest.approx(CAPS.greeting_seconds)
        assert await silent.receive() is None


async def test_only_so_many_are_greeted_at_a_time(autojump_clock: MockClock) -> None:
    async with turn(caps=BridgeCaps(greetings_max=2)) as rig:
        silent = [rig.door.connect() for _ in range(2)]
        started = trio.current_time()
        assert (await rig.greet())[1] == b"ACCEPTED"
        assert trio.current_time() - started == pytest.approx(CAPS.greeting_seconds)
        assert [await program.receive() for program in silent] == [b"REFUSED NO_TOKEN"] * 2


async def test_refusals_are_all_counted_some_audited_and_end_the_listening() -> None:
    async with turn() as rig:
        program = await rig.opened()
        for _ in range(CAPS.refusals_max):
            await rig.greet("wrong-token-wrong")
        await wait_all_tasks_blocked()
        with pytest.raises(ConnectionRefusedError):
            rig.door.connect()
        await program.send(b"still here")
        await rig.worker.wait_frames(1)
        assert sum(isinstance(event, BridgeRefused) for event in rig.events) == 2
        assert rig.turn.closing_event().refused == CAPS.refusals_max


@pytest.mark.parametrize(
    "raw",
    [b"\0\0\0\0", (BRIDGE_FRAME_BYTES_MAX + 1).to_bytes(4, "big"), b"\0\0\0\x09cut"],
    ids=["empty", "too long", "cut"],
)
async def test_an_illegal_frame_ends_the_connection(raw: bytes) -> None:
    async with turn() as rig:
        program = await rig.opened()
        await program.send(b"good")
        await program.send_raw(raw)
        program.half_close()
        await rig.worker.wait_told("closed FRAME_ILLEGAL")
        assert await program.receive() is None
        assert rig.worker.frames == [b"good"]


async def test_a_half_closed_program_reads_on_until_the_worker_says_the_end() -> None:
    async with turn() as rig:
        program = await rig.opened()
        await program.send(b"last")
        program.half_close()
        await rig.worker.wait_told("closed ENDED")
        await rig.worker.reply(b"answer")
        assert await program.receive() == b"answer"
        assert not program.daemon_end.closed
        await rig.worker.reply(None)
        assert await program.receive() is None


async def test_a_worker_that_ends_its_side_still_hears_the_program() -> None:
    async with turn() as rig:
        program = await rig.opened()
        await rig.worker.reply(None)
        assert await program.receive() is None
        await program.send(b"said afterwards")
        await rig.worker.wait_frames(1)
        assert rig.worker.frames == [b"said afterwards"]


async def test_frames_for_a_program_that_is_gone_hold_the_worker_not_back() -> None:
    async with turn() as rig:
        program = await rig.opened()
        program.close()
        await rig.worker.wait_told("closed ENDED")
        for _ in range(50):
            await rig.worker.reply(b"too late")
        await rig.worker.reply(None)
        await wait_all_tasks_blocked()
        assert rig.turn.closing_event().counts.frames_from_worker == 50


@pytest.mark.parametrize("speaker", ["program", "worker"])
async def test_a_turn_carries_so_many_bytes_in_each_direction(speaker: str) -> None:
    async with turn() as rig:
        program = await rig.opened()
        for _ in range(11):  # the last is one too many
            if speaker == "program":
                await program.send(b"x" * 100_000)
            else:
                await rig.worker.reply(b"x" * 100_000)
        await rig.worker.wait_told("closed TURN_BYTES")
        assert rig.over_budget == []
        counts = rig.turn.closing_event().counts
        assert max(counts.bytes_from_environment, counts.bytes_from_worker) == 1_000_000


async def test_what_may_not_be_returned_is_not_passed_on() -> None:
    tight = EnvironmentBudgets(operations_max=9, returned_bytes_max=10, wall_seconds_max=60)
    async with turn(budgets=tight) as rig:
        program = await rig.opened()
        await program.send(b"12345678")
        await program.send(b"123")
        await rig.worker.wait_told("closed BUDGET")
        assert rig.worker.frames == [b"12345678"]
        assert rig.over_budget == [True]


async def test_a_connection_beyond_the_operations_is_not_even_heard() -> None:
    tight = EnvironmentBudgets(operations_max=1, returned_bytes_max=10, wall_seconds_max=60)
    async with turn(budgets=tight) as rig:
        await rig.greet("wrong-token-wrong")
        program = rig.door.connect()
        with suppress(trio.BrokenResourceError):
            await program.send(TOKEN.encode())
        assert await program.receive() is None
        assert rig.over_budget == [True]
        assert rig.worker.told == []


async def test_what_cannot_be_recorded_is_not_opened() -> None:
    async with turn(recorded=False) as rig:
        _, answer = await rig.greet()
        assert answer is None
        assert rig.worker.told == []
        assert isinstance(rig.events[0], BridgeOpened)


async def test_a_worker_that_takes_nothing_holds_one_frame_here_and_the_rest_outside() -> None:
    async with turn() as rig:
        rig.worker.gate = trio.Event()
        program = await rig.opened()
        for _ in range(9):
            await program.send(b"x" * 100_000)
        await wait_all_tasks_blocked()
        assert rig.account.returned_bytes == 100_000
        rig.worker.gate.set()
        await rig.worker.wait_frames(9)


# --- of an environment ------------------------------------------------------------------------


def was_opened(world: World) -> bool:
    return world.mechanism.sandboxes[-1].door is not None


def listens(world: World) -> bool:
    door = world.mechanism.sandboxes[-1].door
    return door is not None and not door.is_closed


@asynccontextmanager
async def talking(world: World, worker: DoubleWorker) -> AsyncIterator[DoubleProgram]:
    """A program of the environment's running command that has opened the bridge."""
    while not (world.mechanism.sandboxes and world.mechanism.sandboxes[-1].door):
        await trio.lowlevel.checkpoint()
    door = world.mechanism.sandboxes[-1].door
    assert door is not None
    program = door.connect()
    await program.send(TOKEN.encode())
    assert await program.receive() == b"ACCEPTED"
    yield program


async def test_a_turn_is_audited_between_its_commands_start_and_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world, trio.open_nursery() as nursery:
        worker = DoubleWorker()
        handle = await world.environments.provision(WORKER, spec(bridge=ENDPOINT))

        async def run() -> None:
            await world.run(handle, Behaviour(seconds=5), bridge=worker)

        nursery.start_soon(run)
        async with talking(world, worker) as program:
            await program.send(b"last words")
            program.close()
        await worker.wait_frames(1)
        await trio.sleep(10)
        kinds = [type(event).__name__ for event in world.sink.events]
        first = kinds.index("CommandStarted")
        assert kinds[first:] == [
            "CommandStarted",
            "BridgeOpened",
            "BridgeClosed",
            "CommandFinished",
        ]
        closed = world.sink.events[-2]
        assert isinstance(closed, BridgeClosed)
        assert closed.opened
        assert isinstance(world.sink.events[-1], CommandFinished)
        assert world.environments is not None


async def test_the_first_command_that_starts_with_the_bridge_is_the_turn(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec(bridge=ENDPOINT))
        sandbox = world.mechanism.sandboxes[-1]
        await world.run(handle)
        assert not was_opened(world)
        absent = CommandNotStarted(StartFailure.NOT_FOUND, "no such program")
        with pytest.raises(ExecutionRejected) as not_found:
            await world.run(handle, Behaviour(not_started=absent), bridge=DoubleWorker())
        assert not_found.value.code is RejectedCode.COMMAND_NOT_FOUND
        await world.run(handle, Behaviour(), bridge=DoubleWorker())
        assert was_opened(world)
        assert not listens(world)
        with pytest.raises(ExecutionRejected) as refused:
            await world.run(handle, Behaviour(), bridge=DoubleWorker())
        assert (refused.value.code, refused.value.field) == (RejectedCode.BRIDGE_REFUSED, "bridge")
        variables = [dict(each.spec.environment) for each in sandbox.commands]
        assert [b"SBX_BRIDGE_TOKEN" in each for each in variables] == [False, True]


async def test_a_command_without_the_bridge_finds_nobody_listening_after_a_failed_start(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world:
        handle = await world.environments.provision(WORKER, spec(bridge=ENDPOINT))
        absent = CommandNotStarted(StartFailure.NOT_FOUND, "no such program")
        with pytest.raises(ExecutionRejected):
            await world.run(handle, Behaviour(not_started=absent), bridge=DoubleWorker())
        assert listens(world)
        await world.run(handle, Behaviour())
        assert not listens(world)


async def test_a_bridge_that_was_not_provisioned_or_cannot_be_opened_is_a_refusal(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, script=Script(bridge_fails=True)) as world:
        without = await world.environments.provision(WORKER, spec(run="a"))
        with pytest.raises(ExecutionRejected) as refused:
            await world.run(without, bridge=DoubleWorker())
        assert refused.value.code is RejectedCode.BRIDGE_REFUSED
        broken = await world.environments.provision(WORKER, spec(run="b", bridge=ENDPOINT))
        with pytest.raises(ExecutionUnavailable) as failed:
            await world.run(broken, bridge=DoubleWorker())
        assert failed.value.code is UnavailableCode.SETUP_FAILED
        assert (await world.run(broken, Behaviour())).exit_code == 0


async def test_a_worker_that_takes_nothing_delays_the_result_by_the_drain_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world, trio.open_nursery() as nursery:
        worker = DoubleWorker()
        worker.gate = trio.Event()
        handle = await world.environments.provision(WORKER, spec(bridge=ENDPOINT))
        ended_at: list[float] = []

        async def run() -> None:
            result = await world.run(handle, Behaviour(seconds=5), bridge=worker)
            assert result.killed_by is None
            ended_at.append(trio.current_time())

        started = trio.current_time()
        nursery.start_soon(run)
        async with talking(world, worker) as program:
            await program.send(b"never taken")
            program.close()
        await trio.sleep(60)
        assert ended_at[0] - started == pytest.approx(5 + 2, abs=0.5)


async def test_an_overrun_over_the_bridge_kills_the_command_and_ends_the_environment(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path) as world, trio.open_nursery() as nursery:
        worker = DoubleWorker()
        budgets = EnvironmentBudgets(operations_max=9, returned_bytes_max=100, wall_seconds_max=600)

        asked = msgspec.structs.replace(spec(bridge=ENDPOINT), budgets=budgets)
        handle = await world.environments.provision(WORKER, asked)
        results: list[KillReason | None] = []

        async def run() -> None:
            result = await world.run(handle, Behaviour(seconds=None), bridge=worker)
            results.append(result.killed_by)

        nursery.start_soon(run)
        async with talking(world, worker) as program:
            await program.send(b"x" * 101)
        await trio.sleep(60)
        assert results == [KillReason.OUTPUT_LIMIT]
        assert world.consistent_and_empty()
