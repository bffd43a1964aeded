"""The recorder against a journal's socket that the test makes, and takes away."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
import trio.testing

from sbxd.audit.events import (
    AuditEvent,
    CommandStarted,
    DestroyReason,
    EnvironmentDestroyed,
    EnvironmentProvisioned,
    ImageRemoved,
    RequestUnserved,
    SlotOrigin,
)
from sbxd.audit.recorder import RETRY_SECONDS, Recorder, open_recorder
from sbxd.audit.sink import AuditUnavailable
from sbxd.policy.timeouts import TimeoutBound
from sbxd.port.egress import EgressMode
from sbxd.port.errors import UnavailableCode
from sbxd.port.ids import EnvironmentId, RunId, TenantId
from sbxd.port.limits import MIB, ResourceLimits
from tests.pacing import next_look
from tests.pure.test_audit_journald import fill, listen

BOOT, OTHER_BOOT = "b" * 32, "c" * 32
IDENTITY = {
    "environment_id": EnvironmentId("a" * 32),
    "tenant_id": TenantId("t"),
    "run_id": RunId("r"),
    "lease_epoch": 1,
}


def removed(number: int) -> AuditEvent:
    return ImageRemoved(image_digest=f"sha256:{number:064}", peer_uid=0)


def destroyed() -> AuditEvent:
    return EnvironmentDestroyed(
        **IDENTITY,  # type: ignore[arg-type]
        reason=DestroyReason.REQUESTED,
        commands_run=0,
        lifetime_ms=1,
        executing_ms=0,
    )


def provisioned() -> AuditEvent:
    return EnvironmentProvisioned(
        **IDENTITY,  # type: ignore[arg-type]
        mechanism="fake",
        image_digest="sha256:" + "0" * 64,
        limits=ResourceLimits(
            cpu_millicores=1000,
            memory_bytes=64 * MIB,
            pids_max=8,
            workspace_bytes=16 * MIB,
            inodes_max=100,
            wall_clock_seconds=10,
        ),
        egress_mode=EgressMode.DENY,
        egress_destinations=(),
        origin=SlotOrigin.COLD,
        duration_ms=1,
        expires_at=datetime(2030, 1, 1, tzinfo=UTC),
        owner_uid=0,
    )


def started() -> AuditEvent:
    return CommandStarted(
        **IDENTITY,  # type: ignore[arg-type]
        command_number=1,
        program="true",
        program_bytes=4,
        argv_count=1,
        argv_sha256="0" * 64,
        stdin_bytes=0,
        network_enabled=False,
        effective_timeout_ms=1,
        timeout_bound=TimeoutBound.COMMAND,
    )


def refused_for_the_outage() -> AuditEvent:
    return RequestUnserved(
        verb="provision", peer_uid=0, code=UnavailableCode.AUDIT_UNAVAILABLE, detail="x"
    )


class Read:
    """One record as the journal would read it."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        fields: dict[str, str] = {}
        while raw:
            line, _, raw = raw.partition(b"\n")
            name, equals, value = line.partition(b"=")
            if not equals:
                (size,) = struct.unpack("<Q", raw[:8])
                value, raw = raw[8 : 8 + size], raw[9 + size :]
            fields[name.decode()] = value.decode()
        self.fields = fields

    @property
    def event(self) -> str:
        return self.fields["SBX_EVENT"]

    @property
    def sequence(self) -> int:
        return int(self.fields["SBX_AUDIT_SEQUENCE"])


def drain(journal: socket.socket) -> list[Read]:
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(Read(journal.recv(1 << 20)))
    return found


def end(journal: socket.socket, path: Path) -> None:
    """The journal is gone, its socket too."""
    journal.close()
    path.unlink()


def halve_the_last(spool: Path) -> None:
    os.truncate(spool, spool.stat().st_size - 1)


async def fill_spool(recorder: Recorder, event: AuditEvent) -> None:
    """Record until nothing is taken any more."""
    with suppress(AuditUnavailable):
        while True:
            await recorder.emit(event)


def numbers(records: list[Read]) -> list[int]:
    return [each.sequence for each in records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "audit"


@pytest.fixture
def journal(path: Path) -> Iterator[socket.socket]:
    with listen(path) as bound:
        yield bound


def opened(
    state: Path, path: Path, boot_id: str = BOOT, spool_bytes_max: int = 1 << 20
) -> AbstractAsyncContextManager[Recorder]:
    return open_recorder(
        state, str(path), boot_id=boot_id, clock=lambda: 7, spool_bytes_max=spool_bytes_max
    )


async def read_while(journal: socket.socket, found: list[Read]) -> None:
    """A journal that reads."""
    while True:
        await trio.lowlevel.wait_readable(journal)
        found += drain(journal)


async def test_records_are_numbered_and_begin_with_the_opening(
    state: Path, path: Path, journal: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(state, path) as recorder:
        await recorder.emit(removed(1))
        await recorder.emit(destroyed())
        found = drain(journal)
        assert recorder.counts.written == 3
        assert recorder.counts.sequence == 3
    assert [each.event for each in found] == ["AuditOpened", "ImageRemoved", "EnvironmentDestroyed"]
    assert numbers(found) == [1, 2, 3]
    assert {each.fields["SBX_AUDIT_BOOT_ID"] for each in found} == {BOOT}
    assert {each.fields["SBX_AUDIT_SCHEMA"] for each in found} == {"1"}
    assert {each.fields["SBX_AUDIT_TIME"] for each in found} == {"7"}
    assert len({each.fields["SBX_AUDIT_INSTANCE"] for each in found}) == 1


async def test_a_restart_goes_on_and_a_new_boot_begins_anew_and_names_the_old(
    state: Path, path: Path, journal: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    found: list[Read] = []
    for _ in range(2):
        async with opened(state, path) as recorder:
            await recorder.emit(removed(1))
            found = drain(journal)
    assert numbers(found) == [3, 4]
    assert found[0].fields["SBX_RESUMED_AFTER"] == "2"
    assert "SBX_PREVIOUS_BOOT_ID" not in found[0].fields
    async with opened(state, path, OTHER_BOOT):
        (first,) = drain(journal)
    assert first.sequence == 1
    assert first.fields["SBX_PREVIOUS_BOOT_ID"] == BOOT
    assert first.fields["SBX_PREVIOUS_BOOT_SEQUENCE"] == "4"


async def test_a_second_daemon_is_refused_and_a_damaged_position_too(
    state: Path, path: Path, journal: socket.socket
) -> None:
    async with opened(state, path):
        with pytest.raises(AuditUnavailable, match="another daemon"):
            async with opened(state, path):
                pass
        drain(journal)
    (state / "position").write_text("0\n")
    with pytest.raises(AuditUnavailable, match="damaged"):
        async with opened(state, path):
            pass


async def test_many_tasks_get_numbers_in_the_order_of_the_journal(
    state: Path, path: Path, journal: socket.socket
) -> None:
    found: list[Read] = []
    async with opened(state, path) as recorder, trio.open_nursery() as readers:
        readers.start_soon(read_while, journal, found)
        async with trio.open_nursery() as nursery:
            for number in range(500):
                nursery.start_soon(recorder.emit, removed(number))
        with trio.fail_after(60):
            while len(found) < 501:
                await next_look()
        readers.cancel_scope.cancel()
    assert numbers(found) == list(range(1, 502))


@pytest.mark.case("AUD-05")
async def test_without_a_journal_running_work_is_spooled_and_new_work_refused(
    state: Path, path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    with listen(path) as journal:
        async with opened(state, path) as recorder:
            recorder.admit()
            (first,) = drain(journal)
            end(journal, path)
            await recorder.emit(destroyed())
            with pytest.raises(AuditUnavailable):
                recorder.admit()
            with pytest.raises(AuditUnavailable):
                await recorder.emit(provisioned())
            with pytest.raises(AuditUnavailable):
                await recorder.emit(started())
            for _ in range(3):
                await recorder.emit(refused_for_the_outage())
            await recorder.emit(removed(1))
            # AuditOpened was read, but nothing had been sent since to show it.
            counts = recorder.counts
            assert counts.refused == 3
            assert counts.unrecorded == 0
            assert counts.sequence == 4
            with listen(path) as back:
                await trio.sleep(3 * RETRY_SECONDS)
                found = drain(back)
                recorder.admit()
    assert first.sequence == 1
    new = [each for each in found if each.sequence > 1]
    assert [each.event for each in new] == [
        "EnvironmentDestroyed",
        "CommandStarted",
        "ImageRemoved",
        "AuditRecovered",
    ]
    assert numbers(new) == [2, 3, 4, 5]
    assert [each.raw for each in found if each.sequence == 1] in ([], [first.raw])
    assert new[-1].fields["SBX_REFUSED"] == "3"
    assert new[-1].fields["SBX_UNRECORDED"] == "0"


async def test_a_journal_that_was_replaced_gets_what_the_old_one_had_not_read(
    state: Path, path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    with listen(path) as journal:
        async with opened(state, path) as recorder:
            drain(journal)
            for number in range(5):
                await recorder.emit(removed(number))
            end(journal, path)
            with listen(path) as back:
                # It listens already, so that even what is refused in an outage goes through.
                await recorder.emit(provisioned())
                await trio.sleep(2 * RETRY_SECONDS)
                found = drain(back)
    assert sorted({each.sequence for each in found}) in (
        list(range(1, 9)),
        list(range(2, 9)),
    )
    assert numbers(found) == sorted(numbers(found))
    assert [each.event for each in found][-2:] == ["EnvironmentProvisioned", "AuditRecovered"]


@pytest.mark.case("AUD-05")
async def test_a_journal_that_reads_nothing_gets_no_new_work(
    state: Path, path: Path, journal: socket.socket, mock_clock: trio.testing.MockClock
) -> None:
    async with opened(state, path) as recorder:
        recorder.admit()
        mock_clock.jump(2.5)
        with pytest.raises(AuditUnavailable, match="reads nothing"):
            recorder.admit()
        assert drain(journal)
        recorder.admit()


async def test_the_spool_survives_the_daemon_and_goes_before_the_next_opening(
    state: Path, path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(state, path) as recorder:
        for number in range(4):
            await recorder.emit(removed(number))
        assert recorder.counts.waiting == 5
    with listen(path) as journal:
        async with opened(state, path, OTHER_BOOT):
            found = drain(journal)
    assert [(each.fields["SBX_AUDIT_BOOT_ID"], each.sequence) for each in found] == [
        *((BOOT, number) for number in range(1, 6)),
        (OTHER_BOOT, 1),
        (OTHER_BOOT, 2),
    ]
    assert [each.event for each in found[-2:]] == ["AuditRecovered", "AuditOpened"]
    assert found[-1].fields["SBX_WAITING"] == "5"


@pytest.mark.case("AUD-05")
async def test_a_full_spool_keeps_room_for_ends_and_then_takes_nothing(
    state: Path, path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(state, path, spool_bytes_max=20_000) as recorder:
        refusal = RequestUnserved(
            verb="provision", peer_uid=0, code=UnavailableCode.CAPACITY, detail="x"
        )
        await fill_spool(recorder, refusal)
        await recorder.emit(destroyed())
        await fill_spool(recorder, destroyed())
        counts = recorder.counts
        assert counts.unrecorded == 2
        assert (state / "spool").stat().st_size <= 20_000
        with listen(path) as journal:
            found: list[Read] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read_while, journal, found)
                # In one go: what waits for room does not wait for the next retry.
                await trio.sleep(1.5 * RETRY_SECONDS)
                while len(found) <= counts.sequence:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
    assert numbers(found) == list(range(1, counts.sequence + 2))
    assert found[-1].event == "AuditRecovered"
    assert found[-1].fields["SBX_UNRECORDED"] == "2"


async def test_a_record_that_was_half_written_is_discarded_and_counted(
    state: Path, path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(state, path) as recorder:
        await recorder.emit(removed(1))
    halve_the_last(state / "spool")
    with listen(path) as journal:
        async with opened(state, path):
            found = drain(journal)
    assert [each.event for each in found] == ["AuditOpened", "AuditRecovered", "AuditOpened"]
    assert int(found[-1].fields["SBX_DISCARDED_BYTES"]) > 0


async def test_a_cancelled_emit_takes_no_number(
    state: Path, path: Path, journal: socket.socket
) -> None:
    async with opened(state, path) as recorder:
        fill(path)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(recorder.emit, removed(1))
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert recorder.counts.sequence == 1
        drained = []
        with suppress(BlockingIOError):
            while True:
                drained.append(journal.recv(65536))
        await recorder.emit(removed(2))
        assert numbers(drain(journal)) == [2]
