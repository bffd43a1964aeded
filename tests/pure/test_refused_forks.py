"""The Sentry's messages about forks: which is a refusal, and what a hostile one can do."""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from sbxd.launcher.kernel import trace
from sbxd.mechanism import refused_forks
from sbxd.mechanism.refused_forks import BadMessage, RefusedForks, refused
from sbxd.policy.fork_refusals import refusals_window_seconds
from sbxd.settings import SandboxMechanism, Settings

# As this build of runsc sends them, of `fork`: one refused with EAGAIN, one that made process 7.
HEADER = struct.pack("<HHI", 8, 3, 0)


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def message(*, result: int, error: int, header: bytes = HEADER) -> bytes:
    call = b"".join(
        bytes([number << 3]) + varint(value) for number, value in ((1, result), (2, error)) if value
    )
    exit_of_call = b"\x12" + varint(len(call)) + call
    return header + b"\x0a\x00" + exit_of_call + b"\x20" + varint(57)


REFUSED = message(result=-1, error=errno.EAGAIN)
MADE = message(result=7, error=0)


def test_a_call_that_ended_with_eagain_is_a_refusal_and_no_other() -> None:
    assert refused(REFUSED)
    assert not refused(MADE)
    assert not refused(message(result=-1, error=errno.ENOMEM))
    assert not refused(HEADER)


def test_a_longer_header_of_a_later_build_is_passed_over() -> None:
    longer = struct.pack("<HHI", 16, 3, 0) + bytes(8)
    assert refused(message(result=-1, error=errno.EAGAIN, header=longer))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        HEADER[:7],
        struct.pack("<HHI", 7, 3, 0) + b"\x12\x00",
        struct.pack("<HHI", 900, 3, 0),
        HEADER + b"\x12\x40\x10",
        HEADER + b"\x12",
        HEADER + b"\xff" * 30,
        HEADER + b"\x0b",
        HEADER + b"\x12\x02\x10\x8b",
    ],
)
def test_what_is_no_message_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(BadMessage):
        refused(raw)


@given(st.binary(max_size=300))
def test_no_bytes_whatever_raise_anything_else(raw: bytes) -> None:
    with suppress(BadMessage):
        refused(raw)


class Sentry:
    """The other end."""

    def __init__(self) -> None:
        self.end, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.setblocking(False)
        self.forks = RefusedForks(ours.detach())

    def tell(self, *messages: bytes) -> None:
        for each in messages:
            self.end.send(each)

    def flood(self) -> int:
        """As many as it takes."""
        sent = 0
        try:
            while True:
                self.end.send(REFUSED)
                sent += 1
        except BlockingIOError:
            return sent


@pytest.fixture
def sentry() -> Iterator[Sentry]:
    one = Sentry()
    yield one
    one.end.close()


async def test_refusals_are_counted_for_one_command(sentry: Sentry) -> None:
    sentry.tell(REFUSED, MADE, REFUSED)
    assert sentry.forks.count() == 2
    sentry.tell(REFUSED)
    sentry.forks.begin()
    assert sentry.forks.count() == 0, "those of the command before are none of this one's"
    sentry.tell(b"junk", REFUSED)
    assert sentry.forks.count() == 1
    sentry.forks.close()


async def test_a_wait_ends_with_a_refusal_and_not_with_a_fork(
    sentry: Sentry, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sentry.forks.wait_more)
        sentry.tell(MADE)
        await wait_all_tasks_blocked()
        assert nursery.child_tasks, "the control: it still waits"
        sentry.tell(REFUSED)
    assert sentry.forks.count() == 1
    sentry.forks.close()


async def test_of_a_flood_a_bounded_part_is_read_at_a_time(
    sentry: Sentry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_forks, "MESSAGES_MAX", 16)
    sent = sentry.flood()
    assert sent > 160
    assert sentry.forks.count() == 16
    assert sentry.forks.count() == 32
    sentry.flood()
    sentry.forks.begin()
    assert sentry.forks.count() <= 16, "a flood does not hold up the next command"
    sentry.forks.close()


async def test_a_sentry_that_tells_no_more_ends_no_wait_and_costs_nothing(sentry: Sentry) -> None:
    sentry.tell(REFUSED)
    sentry.end.close()
    assert sentry.forks.count() == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sentry.forks.wait_more)
        await wait_all_tasks_blocked()
        assert nursery.child_tasks
        nursery.cancel_scope.cancel()
    assert sentry.forks.count() == 1
    sentry.forks.close()
    sentry.forks.close()


# the session -------------------------------------------------------------------------------------


def test_the_session_tells_of_calls_that_make_processes_and_of_nothing_else() -> None:
    for machine, calls in (("x86_64", "56 57 58 435"), ("aarch64", "220 435")):
        text = trace.document(machine).decode()
        points = [word.split("/")[2] for word in text.split('"') if word.startswith("syscall/")]
        assert points == calls.split()
        assert "field" not in text, "no name, no path, no credential"
    with pytest.raises(KeyError):
        trace.document("pdp11")


def test_a_connection_is_greeted_and_one_that_never_comes_is_none(tmp_path: object) -> None:
    root = os.open(str(tmp_path), os.O_DIRECTORY)
    reader, writer = os.pipe()  # stands for the pidfd: readable once runsc is gone
    try:
        with trace.furnish(root, os.getuid()) as listener:
            assert trace.accept(listener, reader, 0.0) is None
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as runsc:
                runsc.connect(f"{tmp_path}/{trace.SOCKET}")
                runsc.send(b"\x08\x01")
                connection = trace.accept(listener, reader, 5.0)
                assert connection is not None
                with connection:
                    assert runsc.recv(16) == b"\x08\x01"
            os.close(writer)
            assert trace.accept(listener, reader, 30.0) is None, "runsc ended first"
    finally:
        os.close(reader)
        os.close(root)


def test_on_a_guests_kernel_the_same_number_is_counted_over_a_longer_time() -> None:
    settings = Settings()
    assert settings.sandbox is SandboxMechanism.GVISOR
    assert refusals_window_seconds(settings) == 60
    other = msgspec.structs.replace(settings, sandbox=SandboxMechanism.NAMESPACES)
    assert refusals_window_seconds(other) == 10
