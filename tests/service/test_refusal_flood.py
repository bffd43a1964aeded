"""A peer that is refused without end fills no journal and costs nobody else anything."""

import msgspec
import pytest
import trio
from trio.testing import MockClock

from sbxd.audit.counted_events import RefusalsCounted, WorkspaceUsed, WorkspaceUsesCounted
from sbxd.audit.counting import FREE_MAX, RECORDED_MAX
from sbxd.audit.events import Door, EnvironmentDestroyed, PeerRefused, RequestRejected
from sbxd.metrics.sink import CountedSink
from sbxd.port.errors import RejectedCode, WorkspaceCode
from sbxd.service.peer import PeerCredentials
from sbxd.service.session import REFUSAL_PAUSE_SECONDS
from sbxd.wire import messages as m
from sbxd.wire.legality import Role
from tests.metrics.test_derived import destroyed, rejected
from tests.pacing import next_look
from tests.service.memory import MemoryDaemon, memory_daemon
from tests.service.raw import RawEnd, greeted_client, raw_client
from tests.service.requests import SCRIPT, command, provisioned

HOSTILE = PeerCredentials(pid=7, uid=2000, gid=2000, groups=frozenset({2000}))
VICTIM = PeerCredentials(pid=8, uid=1000, gid=1000, groups=frozenset({1000}))


async def dead_handle(raw: RawEnd) -> m.Execute:
    """A command for an environment that is gone."""
    handle = await provisioned(raw)
    await raw.send(m.Destroy(request_id=2, handle=handle))
    assert isinstance(await raw.receive(), m.Done)
    return m.Execute(request_id=3, handle=handle, command=command("true"))


async def ask(raw: RawEnd, request: m.Execute, number: int) -> None:
    for request_id in range(10, 10 + number):
        await raw.send(
            m.Execute(request_id=request_id, handle=request.handle, command=request.command)
        )
        reply = await raw.receive()
        assert isinstance(reply, m.Rejected)
        assert reply.code is RejectedCode.ENVIRONMENT_GONE


def sink_of(daemon: MemoryDaemon) -> CountedSink:
    assert isinstance(daemon.recorded, CountedSink)
    return daemon.recorded


@pytest.mark.case("PEER-20")
async def test_refusals_are_counted_exactly_and_cost_the_peer_its_time(
    autojump_clock: MockClock,
) -> None:
    asked = RECORDED_MAX + 300
    async with memory_daemon(SCRIPT) as daemon:
        daemon.peer = HOSTILE
        hostile = await greeted_client(await daemon.connect())
        request = await dead_handle(hostile)
        began = trio.current_time()
        await ask(hostile, request, asked)
        waited = trio.current_time() - began
        # Ten a second are free; each beyond those waits.
        assert waited >= (asked - FREE_MAX) / 10 * REFUSAL_PAUSE_SECONDS / 2
        daemon.peer = VICTIM
        victim = await greeted_client(await daemon.connect())
        began = trio.current_time()
        await ask(victim, await dead_handle(victim), 20)
        assert trio.current_time() == began, "another uid waits for nothing"
        assert await sink_of(daemon).settle()
        recorded = [each for each in daemon.audit.of(RequestRejected) if each.peer_uid == 2000]
        counted = [each for each in daemon.audit.of(RefusalsCounted) if each.peer_uid == 2000]
        assert {each.counts[0].partition("=")[0] for each in counted} == {
            "RequestRejected.ENVIRONMENT_GONE"
        }
        assert len(recorded) + sum(each.total for each in counted) == asked
        assert len(recorded) <= RECORDED_MAX + waited / 6 + 1
        assert sink_of(daemon).derived.denials.total.total == asked + 20


@pytest.mark.case("PEER-22")
async def test_a_peer_that_leaves_pays_with_its_place(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        daemon.peer = HOSTILE
        hostile = await greeted_client(await daemon.connect())
        request = await dead_handle(hostile)
        for request_id in range(10, 10 + FREE_MAX):
            await hostile.send(
                m.Execute(request_id=request_id, handle=request.handle, command=request.command)
            )
            await hostile.receive()
        owed = 30
        for request_id in range(1000, 1000 + owed):
            await hostile.send(
                m.Execute(request_id=request_id, handle=request.handle, command=request.command)
            )
            await hostile.send(m.Cancel(request_id=request_id))
        await trio.testing.wait_all_tasks_blocked()
        assert daemon.service.connections == 1
        began = trio.current_time()
        await hostile.stream.aclose()
        with trio.fail_after(10 * owed):
            while daemon.service.connections:
                await next_look()
        # Some were free again by then.
        assert trio.current_time() - began >= owed / 2 * REFUSAL_PAUSE_SECONDS


@pytest.mark.case("PEER-22")
async def test_a_peer_that_breaks_the_protocol_again_and_again_is_counted_and_turned_away(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        daemon.peer = HOSTILE
        asked = RECORDED_MAX + 500
        for _ in range(asked):
            stream = await daemon.connect()
            async with stream:
                await stream.send_all(b"\xff" * 8)
                assert await raw_client(stream).receive_all()
        assert not daemon.service.connections, "nothing that is broken holds a place"
        assert len(daemon.audit.of(PeerRefused)) <= RECORDED_MAX + 1
        await sink_of(daemon).settle()
        recorded = len(daemon.audit.of(PeerRefused))
        (counted,) = daemon.audit.of(RefusalsCounted)
        assert recorded + counted.total == asked
        assert any("CONNECTING_TOO_FAST" in each for each in counted.counts)
        daemon.peer = VICTIM
        await greeted_client(await daemon.connect())
        daemon.peer = HOSTILE
        await greeted_client(await daemon.connect(Door.ADMIN), Role.ADMIN)


async def test_counts_are_recorded_in_each_window_and_at_the_end(
    autojump_clock: MockClock,
) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        sink = sink_of(daemon)
        async with sink.counting():
            for _ in range(2):
                for _ in range(2 * RECORDED_MAX):
                    await sink.emit(rejected())
                await trio.sleep(61)
            in_windows = len(daemon.audit.of(RefusalsCounted))
            await sink.emit(rejected())
            for _ in range(RECORDED_MAX):
                await sink.emit(rejected())
        counted = daemon.audit.of(RefusalsCounted)
        assert (in_windows, len(counted)) == (2, 3)
        asked = 5 * RECORDED_MAX + 1
        assert len(daemon.audit.of(RequestRejected)) + sum(e.total for e in counted) == asked


# --- workspaces ---------------------------------------------------------------------------------


async def test_every_workspace_operation_is_in_a_record(autojump_clock: MockClock) -> None:
    async with memory_daemon(SCRIPT) as daemon:
        raw = await greeted_client(await daemon.connect())
        handle = await provisioned(raw)
        for request_id in range(10, 22, 2):
            await raw.send(m.WorkspaceList(request_id=request_id, handle=handle, path=b"."))
            while not isinstance(await raw.receive(), m.Listed):
                pass
            await raw.send(
                m.WorkspaceRead(
                    request_id=request_id + 1, handle=handle, path=b"absent", maximum_bytes=9
                )
            )
            reply = await raw.receive()
            assert isinstance(reply, m.WorkspaceFailed)
            assert reply.code is WorkspaceCode.NOT_FOUND
        used = daemon.audit.of(WorkspaceUsed)
        assert [(each.verb, each.code) for each in used] == [
            ("workspace_list", None),
            ("workspace_read", WorkspaceCode.NOT_FOUND),
        ]
        ended = msgspec.structs.replace(destroyed(), environment_id=handle.environment_id)
        await daemon.recorded.emit(ended)
        kinds = [type(each) for each in daemon.audit.events[-2:]]
        assert kinds == [WorkspaceUsesCounted, EnvironmentDestroyed]
        (counted,) = daemon.audit.of(WorkspaceUsesCounted)
        assert counted.total == 12
        assert counted.counts == (
            "workspace_list=6", "workspace_read.NOT_FOUND=6",
        )  # fmt: skip
