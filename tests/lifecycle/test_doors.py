"""The listening sockets: passed or made, never taken from a living process."""

import os
import socket
import stat
from pathlib import Path

import pytest
import trio

from sbxd.audit.events import Door
from sbxd.doors import DoorUnavailable, open_doors


def listening_fd(path: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(path))
        made.listen()
        return made.detach()


async def test_doors_that_were_passed_are_taken_over_and_the_others_made(tmp_path: Path) -> None:
    passed = listening_fd(tmp_path / "passed")
    doors = open_doors({"worker": passed, "unknown": 99}, tmp_path)
    assert [each.door for each in doors] == list(Door)
    assert not os.get_inheritable(passed)
    for each, path in zip(doors, ("passed", "admin.sock"), strict=True):
        async with await trio.open_unix_socket(tmp_path / path):
            await (await each.listener.accept()).aclose()
    assert not (tmp_path / "worker.sock").exists()
    for each in doors:
        await each.listener.aclose()


@pytest.mark.case("API-05")
async def test_our_own_doors_are_closed_to_strangers(tmp_path: Path) -> None:
    doors = open_doors({}, tmp_path)
    modes = {each: stat.S_IMODE(os.stat(tmp_path / f"{each}.sock").st_mode) for each in Door}
    assert modes == {Door.WORKER: 0o660, Door.ADMIN: 0o600}
    for each in doors:
        await each.listener.aclose()


@pytest.mark.case("API-05")
async def test_a_dead_ones_socket_is_replaced_and_a_living_ones_is_not(tmp_path: Path) -> None:
    os.close(listening_fd(tmp_path / "worker.sock"))
    doors = open_doors({}, tmp_path)
    with pytest.raises(DoorUnavailable):
        open_doors({}, tmp_path)
    for each in doors:
        await each.listener.aclose()


@pytest.mark.case("API-05")
def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "worker.sock").write_text("precious")
    with pytest.raises(DoorUnavailable):
        open_doors({}, tmp_path)
    assert (tmp_path / "worker.sock").read_text() == "precious"


def test_a_passed_descriptor_that_is_no_listening_unix_stream_is_refused(tmp_path: Path) -> None:
    one, other = socket.socketpair()
    with other, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as internet:
        for descriptor in (one.detach(), internet.detach(), 9999):
            with pytest.raises(DoorUnavailable):
                open_doors({"worker": descriptor}, tmp_path)
