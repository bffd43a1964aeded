"""What the service manager passes and what it is told."""

import os
import socket
from pathlib import Path

from sbxd.notify import Notifier, passed_sockets, watchdog_seconds

MINE = str(os.getpid())


def test_passed_sockets_are_known_by_name() -> None:
    environ = {"LISTEN_PID": MINE, "LISTEN_FDS": "3", "LISTEN_FDNAMES": "worker:admin:worker"}
    assert passed_sockets(environ) == {"worker": 3, "admin": 4}


def test_sockets_of_another_process_or_without_sense_are_none() -> None:
    full = {"LISTEN_PID": MINE, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "worker"}
    assert passed_sockets(full) == {"worker": 3}
    assert passed_sockets({}) == {}
    assert passed_sockets({**full, "LISTEN_PID": "1"}) == {}
    for nonsense in ("", "-1", "x", "²"):
        assert passed_sockets({**full, "LISTEN_FDS": nonsense}) == {}


def test_the_watchdog_is_for_this_process_alone() -> None:
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": MINE}) == 30.0
    assert watchdog_seconds({"WATCHDOG_USEC": "1500000"}) == 1.5
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}) is None
    for nonsense in ("", "0", "x"):
        assert watchdog_seconds({"WATCHDOG_USEC": nonsense}) is None


def test_states_arrive_in_one_datagram_and_nobody_listening_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        Notifier(str(path)).tell("READY=1", "STATUS=serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"
    Notifier(str(path)).tell("READY=1")
    Notifier(None).tell("READY=1")


def test_an_abstract_address_is_understood() -> None:
    name = f"sbxd-test-{MINE}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        Notifier(f"@{name}").tell("STOPPING=1")
        assert manager.recv(100) == b"STOPPING=1"
