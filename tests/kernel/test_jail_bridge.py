"""The bridge's socket as construction leaves it: bound, out of reach, and the daemon's alone."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbxd.jail import bridge
from sbxd.port.environment import BRIDGE_SOCKET_PATH
from tests.kernel.jail_environment import Environment, environment

in_lane = pytest.mark.needs("root", "cgroup2")

CONNECT = """
import errno, json, os, socket, stat
end = socket.socket(socket.AF_UNIX)
try:
    end.connect("/dev/sbx-bridge")
    end.sendall(b"hello")
    outcome = end.recv(100).decode()
except OSError as problem:
    outcome = errno.errorcode[problem.errno]
status = os.stat("/dev/sbx-bridge")
print(json.dumps([outcome, stat.S_IFMT(status.st_mode) == stat.S_IFSOCK,
                  stat.S_IMODE(status.st_mode), status.st_uid]))
"""


@pytest.fixture
def built() -> Iterator[Environment]:
    with environment() as made:
        yield made


def test_the_place_that_init_binds_is_the_place_that_a_specification_names() -> None:
    assert f"/dev/{bridge.NAME}" == BRIDGE_SOCKET_PATH


@in_lane
def test_nobody_listens_until_the_holder_of_the_descriptor_does(built: Environment) -> None:
    refused = ["ECONNREFUSED", True, 0o222, 0]
    assert built.script(CONNECT).json() == refused
    built.bridge.listen(1)
    running = built.release(built.park(), built.python, "-c", CONNECT)
    end, _ = built.bridge.accept()
    with end:
        assert end.recv(100) == b"hello"
        end.sendall(b"and back")
        assert running.finish().json()[0] == "and back"


@in_lane
def test_there_is_no_second_copy_of_the_descriptor(built: Environment) -> None:
    """Once the daemon has closed its own, the kernel refuses: init and steward hold none."""
    built.read_box("cgroup.events")  # by then the host of this test has closed its copy
    path = f"/proc/{built.facts['init']}/root{BRIDGE_SOCKET_PATH}"
    built.bridge.listen(1)
    with socket.socket(socket.AF_UNIX) as before, socket.socket(socket.AF_UNIX) as after:
        before.connect(path)
        built.bridge.close()
        with pytest.raises(ConnectionRefusedError):
            after.connect(path)


def test_a_directory_that_has_the_name_already_is_an_error(tmp_path: Path) -> None:
    here = Path.cwd()
    directory = os.open(tmp_path, os.O_DIRECTORY)
    try:
        os.close(bridge.bind(directory))
        assert (tmp_path / bridge.NAME).is_socket()
        with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            bridge.bind(directory)
    finally:
        os.close(directory)
        os.chdir(here)
