"""The agent in a lane: output as it was, the exit status as it was, and nothing left."""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.channel import Decoder, Frame, Kind

pytestmark = pytest.mark.needs("cgroup2", "root", "systemd")


class Keeper:
    """The other end of an agent's stream."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.decoder = Decoder()
        self.number = 0

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        self.connection.sendall(Frame(kind, self.number, payload).encode())

    def start(self, *argv: str) -> None:
        self.number += 1
        request = {"argv": argv, "directory": "/", "environment": {}, "terminal": False}
        self.send(Kind.RUN, json.dumps(request).encode())

    def finish(self) -> tuple[int, bytes, bytes]:
        printed = {Kind.STDOUT: b"", Kind.STDERR: b""}
        while True:
            data = self.connection.recv(65536)
            assert data, "the agent is gone"
            for frame in self.decoder.feed(data):
                if frame.kind in printed:
                    printed[frame.kind] += frame.payload
                elif frame.kind is Kind.EXIT:
                    status = int(json.loads(frame.payload)["status"])
                    return status, printed[Kind.STDOUT], printed[Kind.STDERR]
                elif frame.kind is Kind.REFUSED:
                    raise FileNotFoundError(frame.payload.decode())

    def run(self, *argv: str) -> tuple[int, bytes, bytes]:
        self.start(*argv)
        return self.finish()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "sock"))
    listener.listen(1)
    listener.settimeout(30)
    program = Path(__file__).with_name("agent.py")
    unit = ("systemd-run", "--quiet", "--scope", "--property=Delegate=yes")
    agent = subprocess.Popen([*unit, sys.executable, str(program), f"unix:{tmp_path / 'sock'}"])
    connection, _ = listener.accept()
    connection.settimeout(30)
    yield Keeper(connection)
    connection.close()
    listener.close()
    assert agent.wait(timeout=30) == 0


def ends(pid: int) -> bool:
    """Whether it is gone, or a zombie that waits for its new parent, before long: what is killed
    leaves its cgroup a moment before its end is over."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 30)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("status", [0, 1, 7, 126, 255])
def test_the_exit_status_passes_through(keeper: Keeper, status: int) -> None:
    assert keeper.run("/bin/sh", "-c", f"exit {status}")[0] == status


def test_a_signal_is_128_and_its_number(keeper: Keeper) -> None:
    assert keeper.run("/bin/sh", "-c", "kill -9 $$")[0] == 137


def test_the_streams_stay_apart_and_whole(keeper: Keeper) -> None:
    script = "printf out; printf err >&2; head -c 300000 /dev/zero"
    status, out, err = keeper.run("/bin/sh", "-c", script)
    assert (status, err) == (0, b"err")
    assert out == b"out" + bytes(300000)


def test_what_a_command_leaves_running_is_killed_and_does_not_delay_it(keeper: Keeper) -> None:
    status, out, _ = keeper.run("/bin/sh", "-c", "setsid sleep 1000 & echo $!")
    assert status == 0
    assert ends(int(out))


def test_kill_ends_the_whole_tree(keeper: Keeper) -> None:
    keeper.start("/bin/sh", "-c", "setsid sleep 1000 & echo; wait")
    assert keeper.connection.recv(65536)
    keeper.send(Kind.KILL)
    assert keeper.finish()[0] == 137


def test_a_program_that_is_missing_is_refused(keeper: Keeper) -> None:
    with pytest.raises(FileNotFoundError):
        keeper.run("/nonexistent")


def test_a_command_reads_nothing(keeper: Keeper) -> None:
    assert keeper.run("/bin/cat")[:2] == (0, b"")
