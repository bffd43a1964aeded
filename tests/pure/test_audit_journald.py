"""The journal's socket against one of the same kind, made by the test."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from sbxd.audit.encode import encode, serialize
from sbxd.audit.events import ImageRemoved, StartupRefused
from sbxd.audit.journald import JournalReplaced, JournalSocket
from sbxd.audit.sink import AuditUnavailable, MemorySink

EVENT = ImageRemoved(image_digest="sha256:" + "a" * 64, peer_uid=0)
RAW = serialize(encode(EVENT))
LARGE = StartupRefused(settings=tuple(f"{n}" + "x" * 16_000 for n in range(64)))
RAW_LARGE = serialize(encode(LARGE))


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
def sink(path: Path) -> Iterator[JournalSocket]:
    journald = JournalSocket(str(path))
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


async def test_an_event_arrives_as_one_datagram(
    sink: JournalSocket, journal: socket.socket
) -> None:
    await sink.send(RAW)
    await sink.send(RAW)
    assert journal.recv(65536) == RAW
    assert journal.recv(65536) == RAW


async def test_a_large_event_arrives_whole_as_a_sealed_file(
    sink: JournalSocket, journal: socket.socket
) -> None:
    before = os.listdir("/proc/self/fd")
    await sink.send(RAW_LARGE)
    data, fds, _, _ = socket.recv_fds(journal, 65536, 4)
    assert data == b""
    (fd,) = fds
    try:
        with pytest.raises(PermissionError):
            os.write(fd, b"forged")
        os.lseek(fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(fd), "rb") as file:
            assert file.read() == RAW_LARGE
    finally:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1  # the sink's connection


async def test_no_journal_is_unavailable_and_the_sink_recovers_with_it(
    sink: JournalSocket, path: Path
) -> None:
    with pytest.raises(AuditUnavailable):
        await sink.send(RAW)
    with listen(path) as journal:
        await sink.send(RAW)
        assert journal.recv(65536)


async def test_a_journal_that_was_replaced_is_told_with_what_it_may_not_have_read(
    sink: JournalSocket, path: Path
) -> None:
    with listen(path) as first:
        await sink.send(b"A=1\n")
        assert first.recv(65536) == b"A=1\n"
        # The next send sees that the first was read.
        await sink.send(b"A=2\n")
        await sink.send(b"A=3\n")
    remove(path)
    with listen(path) as second:
        with pytest.raises(JournalReplaced):
            await sink.send(b"A=4\n")
        assert sink.take_unread() == [b"A=1\n", b"A=2\n", b"A=3\n"]
        assert sink.take_unread() == []
        await sink.send(b"A=4\n")
        assert second.recv(65536) == b"A=4\n"
    remove(path)
    with pytest.raises(JournalReplaced):
        await sink.send(RAW)
    with pytest.raises(AuditUnavailable):
        await sink.send(RAW)


async def test_what_the_journal_has_not_read_is_measured_and_ages(
    sink: JournalSocket, journal: socket.socket, mock_clock: trio.testing.MockClock
) -> None:
    assert sink.stalled_seconds() == 0.0
    await sink.send(RAW)
    assert sink.unread_bytes() > 0
    mock_clock.jump(3)
    assert sink.stalled_seconds() == pytest.approx(3)
    await sink.send(RAW)
    assert sink.stalled_seconds() == pytest.approx(3), "a send is no sign of a reader"
    assert journal.recv(65536)
    assert sink.stalled_seconds() == 0.0, "something was read"
    mock_clock.jump(3)
    assert sink.stalled_seconds() == pytest.approx(3)
    assert journal.recv(65536)
    assert sink.unread_bytes() == 0
    mock_clock.jump(3)
    assert sink.stalled_seconds() == 0.0


async def test_a_full_queue_is_waited_for_and_then_unavailable(
    sink: JournalSocket, journal: socket.socket, path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    assert fill(path) > 0
    started = trio.current_time()
    with pytest.raises(AuditUnavailable):
        await sink.send(RAW)
    assert trio.current_time() - started == pytest.approx(2.0)
    assert autojump_clock.autojump_threshold == 0


async def test_a_full_queue_that_is_drained_takes_what_waited(
    sink: JournalSocket, journal: socket.socket, path: Path
) -> None:
    queued = fill(path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.send, RAW)
        await trio.testing.wait_all_tasks_blocked()
        received: list[bytes] = []
        while len(received) < queued + 1:
            await trio.lowlevel.wait_readable(journal)
            received.append(journal.recv(65536))
    assert received[queued:] == [RAW]


async def test_a_cancelled_send_sends_nothing_and_the_next_one_works(
    sink: JournalSocket, journal: socket.socket, path: Path
) -> None:
    queued = fill(path)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sink.send, RAW)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    for _ in range(queued):
        assert journal.recv(65536) == b"X=1\n"
    with pytest.raises(BlockingIOError):
        journal.recv(65536)
    await sink.send(RAW)
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
