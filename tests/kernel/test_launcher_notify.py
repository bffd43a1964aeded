"""The launcher's words to PID 1, and the sockets that it takes from it."""

import os
import socket
from pathlib import Path

import pytest

from sbxd.launcher import notify


def test_a_state_reaches_who_listens(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        notify.Notifier(address).tell("READY=1")
        assert listener.recv(100) == b"READY=1"


def test_an_abstract_address_is_understood() -> None:
    name = f"sbxd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        notify.Notifier(f"@{name}").tell("READY=1")
        assert listener.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "/nowhere/at/all"])
def test_nobody_who_listens_is_no_reason_to_fail(address: str | None) -> None:
    notify.Notifier(address).tell("READY=1")


def test_only_sockets_meant_for_this_process_are_taken() -> None:
    mine = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}
    assert notify.passed_sockets(mine) == [3, 4]
    assert notify.passed_sockets(mine | {"LISTEN_PID": "1"}) == []
    assert notify.passed_sockets({}) == []
    assert notify.passed_sockets(mine | {"LISTEN_FDS": "x"}) == []


def test_the_watchdog_is_in_seconds_and_only_for_us() -> None:
    mine = {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    assert notify.watchdog_seconds(mine) == 3.0
    assert notify.watchdog_seconds(mine | {"WATCHDOG_PID": "1"}) is None
    assert notify.watchdog_seconds({}) is None
