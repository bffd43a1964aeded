"""A hostile worker, or a local user without a credential: while an attack on a socket is held open,
another tenant's requests finish.

Each attack is tried on this kernel's SO_PASSRIGHTS, where it has that, and as if it had none.
"""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio

from sbxd import closing, rights
from sbxd.audit.events import Door
from sbxd.client.admin import connect_admin
from sbxd.client.remote import connect
from sbxd.closing import Closers
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.port.command import ExecutionCommand
from sbxd.service.unix import UnixListener
from sbxd.wire.connection import ClientConnection
from sbxd.wire.legality import Role
from tests.pacing import next_look
from tests.redteam.attacked import Attacked, attacked_daemon
from tests.redteam.descriptors import (
    SECONDS_MAX,
    UNAVAILABLE,
    connected,
    has_passrights,
    interrupts_only_at_the_end,
    lingers,
    send_lingering,
    stuck_child,
)
from tests.service.raw import HELLO
from tests.service.requests import SPECIFICATION

Attack = Callable[[Attacked, str], socket.socket]


@pytest.fixture(params=["refused", "looked-into"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the kernel refuses descriptors; the attack is held open if not."""
    if request.param == "looked-into":
        monkeypatch.setattr(rights, "SO_PASSRIGHTS", UNAVAILABLE)
    with interrupts_only_at_the_end():
        yield request.param == "refused" and has_passrights()


async def victim_is_served(attacked: Attacked) -> None:
    """A tenant's environment is made, runs a command and is destroyed; an operator is answered."""
    command = ExecutionCommand(
        argv=("hello",),
        working_directory=".",
        stdin=b"",
        timeout_seconds=60,
        maximum_output_bytes=1000,
    )
    with trio.fail_after(SECONDS_MAX):
        async with connect(attacked.worker) as remote:
            environment = await remote.provision(SPECIFICATION)
            result = await remote.execute(environment, command)
            await remote.destroy(environment)
        assert result.stdout == b"hello"
        async with connect_admin(attacked.admin) as operator:
            await operator.list()


def greeting(role: Role) -> bytes:
    return ClientConnection(role=role).send(HELLO)


def role_of(path: str) -> Role:
    return Role.ADMIN if path.endswith("admin.sock") else Role.WORKER


def before_the_greeting(attacked: Attacked, path: str) -> socket.socket:
    with attacked.stopped():
        end = connected(path)
        send_lingering(end)
    return end


def within_the_greeting(attacked: Attacked, path: str) -> socket.socket:
    end = connected(path)
    frame = greeting(role_of(path))
    end.send(frame[:3])
    with attacked.stopped():
        send_lingering(end, frame[3:])
    return end


def after_the_greeting(attacked: Attacked, path: str) -> socket.socket:
    end = connected(path)
    end.sendall(greeting(role_of(path)))
    assert end.recv(1)  # the Welcome
    with attacked.stopped():
        send_lingering(end)
    return end


def out_of_band(attacked: Attacked, path: str) -> socket.socket:
    with attacked.stopped():
        end = connected(path)
        send_lingering(end, flags=socket.MSG_OOB)
        end.send(b"x")
    return end


def behind_other_bytes(attacked: Attacked, path: str) -> socket.socket:
    with attacked.stopped():
        end = connected(path)
        end.send(b"\0\0")
        send_lingering(end)
        end.send(b"\0\0")
    return end


def then_gone(attacked: Attacked, path: str) -> socket.socket:
    with attacked.stopped():
        end = connected(path)
        send_lingering(end)
        end.close()
    return end


def without_a_credential(attacked: Attacked, path: str) -> socket.socket:
    """From a uid that may connect and is not listed."""
    attacked.strangers = True
    return before_the_greeting(attacked, path)


def read_to_the_end(end: socket.socket) -> None:
    """Its end is a reset where something that it sent was not read."""
    with suppress(ConnectionResetError):
        while end.recv(1000):
            pass


ATTACKS = (
    before_the_greeting,
    within_the_greeting,
    after_the_greeting,
    out_of_band,
    behind_other_bytes,
    then_gone,
)


async def attack(attacked: Attacked, door: Door, how: Attack) -> socket.socket:
    """In a thread: some wait for the daemon."""
    with trio.fail_after(SECONDS_MAX):
        return await trio.to_thread.run_sync(how, attacked, attacked.path(door))


@pytest.mark.case("PEER-01")
@pytest.mark.parametrize("door", list(Door))
@pytest.mark.parametrize("how", ATTACKS, ids=lambda how: how.__name__)
async def test_a_descriptor_whose_close_sleeps_holds_up_nobody(
    tmp_path: Path, kernel: bool, door: Door, how: Attack
) -> None:
    async with attacked_daemon(tmp_path) as attacked:
        with await attack(attacked, door, how):
            await attacked.closing(door, 0 if kernel else 1)
            await victim_is_served(attacked)
            assert attacked.closers[door].busy == (0 if kernel else 1), "it is held open still"


@pytest.mark.case("PEER-02")
async def test_a_refused_peers_descriptor_holds_up_nobody(tmp_path: Path, kernel: bool) -> None:
    service = msgspec.structs.replace(FAKE_SETTINGS.service, worker_uids=(1000,))
    settings = msgspec.structs.replace(FAKE_SETTINGS, service=service)
    async with attacked_daemon(tmp_path, settings=settings) as attacked:
        with await attack(attacked, Door.WORKER, without_a_credential) as end:
            await trio.to_thread.run_sync(read_to_the_end, end)
            attacked.strangers = False
            await attacked.closing(Door.WORKER, 0 if kernel else 1)
            await victim_is_served(attacked)
            assert attacked.closers[Door.WORKER].busy == (0 if kernel else 1)


@pytest.mark.case("PEER-02")
async def test_a_descriptor_on_a_connection_too_many_holds_up_nobody(
    tmp_path: Path, kernel: bool
) -> None:
    service = msgspec.structs.replace(FAKE_SETTINGS.service, connections_per_peer_max=1)
    settings = msgspec.structs.replace(FAKE_SETTINGS, service=service)
    async with attacked_daemon(tmp_path, settings=settings) as attacked:
        attacked.strangers = True
        with connected(attacked.worker) as held:
            held.sendall(greeting(Role.WORKER))
            assert await trio.to_thread.run_sync(held.recv, 1)
            with await attack(attacked, Door.WORKER, before_the_greeting) as end:
                await trio.to_thread.run_sync(read_to_the_end, end)
                await attacked.closing(Door.WORKER, 0 if kernel else 1)
                attacked.strangers = False
                await victim_is_served(attacked)


@pytest.mark.case("PEER-01")
async def test_who_connected_before_the_daemon_listened_is_looked_into(tmp_path: Path) -> None:
    """The service manager's socket has no SO_PASSRIGHTS turned off before the first start."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(tmp_path / "s"))
    listening.listen(4)
    closers = Closers()
    with interrupts_only_at_the_end(), connected(str(tmp_path / "s")) as early:
        assert send_lingering(early)
        async with UnixListener(listening, closers) as listener:
            with connected(str(tmp_path / "s")) as late:
                assert send_lingering(late) is not has_passrights()
                for _ in range(2):
                    await (await listener.accept()).aclose()
        assert closers.busy == (1 if has_passrights() else 2)


@pytest.mark.case("PEER-01")
@pytest.mark.parametrize("receives", [True, False], ids=["receives", "closes"])
async def test_control_without_a_defence_whoever_receives_or_closes_sleeps(receives: bool) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        assert send_lingering(theirs)
        with stuck_child(ours, receives=receives) as pid:
            await lingers(pid)


@pytest.mark.case("PEER-03")
async def test_closes_that_sleep_are_interrupted() -> None:
    before = signal.getsignal(closing.INTERRUPT)
    closing.allow_interrupts()
    try:
        closers = Closers()
        for _ in range(2 * closing.THREADS_MAX):
            ours, theirs = socket.socketpair()
            assert send_lingering(theirs)
            theirs.close()
            closers.close(ours)
        with trio.fail_after(SECONDS_MAX):  # a fifth of what one of them would take
            while closers.busy:
                await next_look()
    finally:
        signal.signal(closing.INTERRUPT, before)


@pytest.mark.case("PEER-03")
async def test_closes_that_cannot_end_are_bounded_and_hold_up_no_connection_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rights, "SO_PASSRIGHTS", UNAVAILABLE)
    with interrupts_only_at_the_end():
        async with attacked_daemon(tmp_path) as attacked, connect(attacked.worker) as remote:
            ends = []
            for number in range(closing.WAITING_MAX):
                ends.append(await attack(attacked, Door.WORKER, then_gone))
                await attacked.closing(Door.WORKER, number + 1)
            assert not attacked.closers[Door.WORKER].has_room
            last = await attack(attacked, Door.WORKER, then_gone)
            with trio.fail_after(SECONDS_MAX):
                environment = await remote.provision(SPECIFICATION)
                await remote.destroy(environment)
                async with connect_admin(attacked.admin) as operator:
                    await operator.list()
            assert attacked.closers[Door.WORKER].busy == closing.WAITING_MAX
            for each in (*ends, last):
                each.close()
