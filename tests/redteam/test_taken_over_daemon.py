"""A daemon that was taken over, against the launcher: what it sends stops nobody else, and nothing
that the launcher keeps grows for ever."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sbxd import rights
from sbxd.launcher import channel
from sbxd.launcher.requests import DropLeaf, Failed
from sbxd.port.ids import EnvironmentId
from tests.redteam.descriptors import (
    SECONDS_MAX,
    UNAVAILABLE,
    has_passrights,
    is_lingering,
    lingers,
    send_lingering,
    stuck_child,
)

# The launcher's own loop, without what it does to a host: it is asked nothing but what it refuses.
PROGRAM = """
import os, socket, sys
from sbxd import rights
from sbxd.launcher import filters, notify
from sbxd.launcher.loop import Launcher
rights.SO_PASSRIGHTS = int(sys.argv[2])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen(8)
launcher = Launcher(
    listener, filters.Filters(b"", b"", b""), allowed_uids=frozenset({int(sys.argv[3])}),
    notifier=notify.Notifier(None), watchdog_seconds=None, width=1,
)
print("listens", flush=True)
launcher.run()
"""
UID = os.getuid()


@contextmanager
def launcher(folder: Path, option: int, allowed_uid: int = UID) -> Iterator[tuple[str, int]]:
    """Its socket and its pid."""
    path = str(folder / "launcher.sock")
    arguments = [sys.executable, "-c", PROGRAM, path, str(option), str(allowed_uid)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"listens\n"
            yield path, process.pid
        finally:
            process.kill()


def client(path: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(SECONDS_MAX)
    end.connect(path)
    return end


def answered(path: str) -> None:
    """A client is served: here, refused by the table of what is legal."""
    with client(path) as end:
        request = DropLeaf(ticket=7, environment_id=EnvironmentId("a" * 32), number=1)
        channel.send(end, channel.encode(request))
        raw, _ = channel.receive(end)
        reply = channel.decode_reply(raw)
        assert isinstance(reply, Failed), raw
        assert (reply.ticket, reply.step) == (7, "legality")


@pytest.mark.case("DMN-01")
@pytest.mark.parametrize("option", [rights.SO_PASSRIGHTS, UNAVAILABLE], ids=["refused", "looked"])
@pytest.mark.parametrize("data", [b"x", b""], ids=["byte", "empty"])
def test_a_descriptor_whose_close_sleeps_does_not_stop_the_launcher(
    tmp_path: Path, option: int, data: bytes
) -> None:
    with launcher(tmp_path, option) as (path, pid):
        for _ in range(10):  # more than it lets wait
            with client(path) as end:
                # Stopped, so that the last drop is the launcher's.
                os.kill(pid, signal.SIGSTOP)
                try:
                    was_sent = send_lingering(end, data)
                finally:
                    os.kill(pid, signal.SIGCONT)
                assert was_sent is (option == UNAVAILABLE or not has_passrights())
                end.close()
            answered(path)
        assert not is_lingering(pid)


@pytest.mark.case("DMN-01")
@pytest.mark.parametrize("option", [rights.SO_PASSRIGHTS, UNAVAILABLE], ids=["refused", "looked"])
def test_neither_does_one_of_a_client_that_is_refused(tmp_path: Path, option: int) -> None:
    with launcher(tmp_path, option, UID + 1) as (path, pid):
        for _ in range(10):
            os.kill(pid, signal.SIGSTOP)
            try:
                end = client(path)
                send_lingering(end)
            finally:
                os.kill(pid, signal.SIGCONT)
            with end, suppress(ConnectionResetError):  # for what it did not read
                assert end.recv(1) == b"", "it is refused, and so the loop turns"
        assert not is_lingering(pid)


@pytest.mark.case("DMN-01")
async def test_control_a_loop_without_a_defence_sleeps() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        assert send_lingering(theirs)
        with stuck_child(ours, receives=True) as pid:
            await lingers(pid)
