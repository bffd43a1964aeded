"""The journal's sink against a socket of the same kind, made by the test."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from sbxd.audit.encode import encode, serialize
from sbxd.audit.events import AuditEvent, ImageRemoved, StartupRefused
from sbxd.audit.journald import JournaldSink
from sbxd.audit.sink import AuditUnavailable, MemorySink

EVENT = ImageRemoved(image_digest="sha256:" + "a" * 64, peer_uid=0)
LARGE = StartupRefused(settings=tuple(f"{n}" + "x" * 16_000 for n in range(64)))


def listen(path: Path) -> socket.socket:
    journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    journal.bind(str(path))
    journal.setblocking(False)
    return journal


def remove(path: Path) -> None:
    path.unlink()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def journal(path: Path) -> Iterator[socket.socket]:
    with listen(path) as bound:
        yield bound


@pytest.fixture
def sink(path: Path) -> Iterator[JournaldSink]:
    journald = JournaldSink(str(path))
    yield journald
    journald.close()


def fill(path: Path) -> int:
    """Fill the queue of the socket at `path`; returns how many datagrams that took. One sender's
    own buffer may be full before the queue is, so senders are added until one can send nothing."""
    total = 0
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.connect(str(path))
            sent = 0
            with suppress(BlockingIOError):
                while True:
                    sender.send(b"X=1\n")
                    sent += 1
        if not sent:
            return total
        total += sent


async def test_an_event_arrives_as_one_datagram(sink: JournaldSink, journal: socket.socket) -> None:
    await sink.emit(EVENT)
    await sink.emit(EVENT)
    assert journal.recv(65536) == serialize(encode(EVENT))
    assert journal.recv(65536) == serialize(encode(EVENT))


async def test_a_large_event_arrives_whole_as_a_sealed_file(
    sink: JournaldSink, journal: socket.socket
) -> None:
    before = os.listdir("/proc/self/fd")
    await sink.emit(LARGE)
    data, fds, _, _ = socket.recv_fds(journal, 65536, 4)
    assert data == b""
    (fd,) = fds
    try:
        with pytest.raises(PermissionError):
            os.write(fd, b"forged")
        os.lseek(fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(fd), "rb") as file:
            assert file.read() == serialize(encode(LARGE))
    finally:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1  # the sink's connection


async def test_no_journal_is_unavailable_and_the_sink_recovers_with_it(
    sink: JournaldSink, path: Path
) -> None:
    with pytest.raises(AuditUnavailable):
        await sink.emit(EVENT)
    with listen(path) as journal:
        await sink.emit(EVENT)
        assert journal.recv(65536)


async def test_a_journal_that_was_replaced_is_found_without_a_lost_event(
    sink: JournaldSink, path: Path
) -> None:
    with listen(path) as first:
        await sink.emit(EVENT)
        assert first.recv(65536)
    remove(path)
    with pytest.raises(AuditUnavailable):
        await sink.emit(EVENT)
    with listen(path):
        await sink.emit(EVENT)
    remove(path)
    with listen(path) as third:
        await sink.emit(EVENT)
        assert third.recv(65536)


async def test_a_full_queue_is_waited_for_and_then_unavailable(
    sink: JournaldSink, journal: socket.socket, path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    assert fill(path) > 0
    started = trio.current_time()
    with pytest.raises(AuditUnavailable):
        await sink.emit(EVENT)
    assert trio.current_time() - started == pytest.approx(2.0)
    assert autojump_clock.autojump_threshold == 0


async def test_a_full_queue_that_is_drained_takes_the_events_in_order(
    sink: JournaldSink, journal: socket.socket, path: Path
) -> None:
    queued = fill(path)
    numbered: list[AuditEvent] = [
        ImageRemoved(image_digest=EVENT.image_digest, peer_uid=n) for n in range(5)
    ]
    async with trio.open_nursery() as nursery:
        for event in numbered:
            nursery.start_soon(sink.emit, event)
            await trio.testing.wait_all_tasks_blocked()
        received: list[bytes] = []
        while len(received) < queued + len(numbered):
            await trio.lowlevel.wait_readable(journal)
            received.append(journal.recv(65536))
    assert received[queued:] == [serialize(encode(event)) for event in numbered]


async def test_a_cancelled_emit_sends_nothing_and_the_next_one_works(
    sink: JournaldSink, journal: socket.socket, path: Path
) -> None:
    queued = fill(path)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sink.emit, EVENT)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    for _ in range(queued):
        assert journal.recv(65536) == b"X=1\n"
    with pytest.raises(BlockingIOError):
        journal.recv(65536)
    await sink.emit(EVENT)
    assert journal.recv(65536)


async def test_the_memory_sink_keeps_order_and_can_be_told_to_fail() -> None:
    memory = MemorySink()
    await memory.emit(EVENT)
    await memory.emit(LARGE)
    assert memory.events == [EVENT, LARGE]
    assert memory.of(StartupRefused) == [LARGE]
    memory.fail()
    with pytest.raises(AuditUnavailable):
        await memory.emit(EVENT)
    memory.recover()
    await memory.emit(EVENT)
    assert memory.of(ImageRemoved) == [EVENT, EVENT]
