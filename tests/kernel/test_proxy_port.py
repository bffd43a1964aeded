"""The proxy's port of a sandbox: bound before its first command, and nobody else's ever."""

import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio

from sbxd.mechanism.namespaces import NamespacesMechanism
from sbxd.mechanism.namespaces_sandbox import NamespacesSandbox
from sbxd.mechanism.protocol import MechanismError, SlotProfile
from sbxd.mechanism.proxy_port import ProxyPort
from sbxd.port.network import PROXY_ADDRESS, PROXY_PORT, NetworkShape
from tests.kernel import launcher_subject as subject
from tests.kernel.launcher_subject import LIMITS, WAIT_SECONDS, Launcher

pytestmark = [
    pytest.mark.needs("cgroup2", "idmap", "image", "loop", "root", "systemd"),
    pytest.mark.also("uml"),
]
PROXY = (PROXY_ADDRESS, PROXY_PORT)
CONNECT = f"""
import errno, socket
s = socket.socket(); s.settimeout(10)
try:
    s.connect({PROXY!r}); print(s.recv(100).decode())
except OSError as problem:
    print(errno.errorcode[problem.errno])
"""
# Every combination of the options that let two sockets share an address.
TAKE = """
import errno, itertools, json, socket
answers = {}
for host in ("127.0.0.1", "0.0.0.0"):
    for mask in range(4):
        s = socket.socket()
        for bit, option in enumerate((socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
            s.setsockopt(socket.SOL_SOCKET, option, mask >> bit & 1)
        try:
            s.bind((host, NUMBER)); s.listen()
            answers[f"{host} {mask}"] = "taken"
        except OSError as problem:
            answers[f"{host} {mask}"] = errno.errorcode[problem.errno]
        s.close()
print(json.dumps(answers))
"""
# Leaves the port's connections in the states that outlive a process.
TALK = f"""
import socket
for end in ("client", "server"):
    s = socket.create_connection({PROXY!r}, 10)
    assert s.recv(5) == b"hello"
    if end == "server":
        assert s.recv(1) == b""
    s.close()
print("talked")
"""


@pytest.fixture(scope="module")
def image() -> str:
    return subject.unpacked_image()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with subject.launcher(tmp_path_factory.mktemp("launcher")) as running:
        yield running


@asynccontextmanager
async def slot_with(
    opened: NamespacesMechanism, image: str, shape: NetworkShape
) -> AsyncIterator[NamespacesSandbox]:
    slot = await opened.prepare(
        subject.fresh_id(), SlotProfile(image, LIMITS, shape), back_stop_seconds=600
    )
    try:
        await slot.assign(LIMITS)
        yield slot
    finally:
        with trio.move_on_after(WAIT_SECONDS, shield=True):
            await slot.destroy()


@contextmanager
def end_of(slot: NamespacesSandbox) -> Iterator[socket.socket]:
    assert isinstance(slot.proxy_listener, int)
    with socket.socket(fileno=os.dup(slot.proxy_listener)) as end:
        yield end


async def python(slot: NamespacesSandbox, source: str) -> str:
    done = await subject.run(slot, "python3", "-c", source)
    assert done.end.exit_code == 0, done
    return done.stdout.decode().strip()


async def test_the_socket_is_bound_in_the_sandbox_and_refuses_until_it_listens(
    launcher: Launcher, image: str
) -> None:
    async with (
        subject.mechanism(launcher) as opened,
        slot_with(opened, image, NetworkShape.PROXY_PORT) as slot,
    ):
        with end_of(slot) as end:
            assert end.getsockname() == PROXY
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
            with socket.socket() as ours:  # the host's own loopback has no such socket
                ours.bind(PROXY)
            assert await python(slot, CONNECT) == "ECONNREFUSED"
            end.listen()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_serve, end, 1)
                assert await python(slot, CONNECT) == "hello"
        slot.give_up_proxy_port()
        assert slot.proxy_listener is None
        assert await python(slot, CONNECT) == "ECONNREFUSED"


async def test_a_slot_without_destinations_has_no_socket(launcher: Launcher, image: str) -> None:
    async with (
        subject.mechanism(launcher) as opened,
        slot_with(opened, image, NetworkShape.NONE) as slot,
    ):
        assert slot.proxy_listener is None
        answers = json.loads(await python(slot, TAKE.replace("NUMBER", str(PROXY_PORT))))
        assert set(answers.values()) == {"taken"}, "the port is free: the control of the next test"


@pytest.mark.parametrize("listens", ["bound", "listening", "listened before"])
async def test_no_command_can_take_the_port(launcher: Launcher, image: str, listens: str) -> None:
    async with (
        subject.mechanism(launcher) as opened,
        slot_with(opened, image, NetworkShape.PROXY_PORT) as slot,
    ):
        with end_of(slot) as end:
            if listens != "bound":
                end.listen()
            if listens == "listened before":
                end.shutdown(socket.SHUT_RD)
            answers = json.loads(await python(slot, TAKE.replace("NUMBER", str(PROXY_PORT))))
            assert set(answers.values()) == {"EADDRINUSE"}, answers
            elsewhere = json.loads(await python(slot, TAKE.replace("NUMBER", "3129")))
            assert set(elsewhere.values()) == {"taken"}, "the program can take a port"


async def test_the_socket_can_listen_again_after_connections_that_linger(
    launcher: Launcher, image: str
) -> None:
    async with (
        subject.mechanism(launcher) as opened,
        slot_with(opened, image, NetworkShape.PROXY_PORT) as slot,
    ):
        with end_of(slot) as end:
            for _ in range(3):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                end.listen()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_serve, end, 2)
                    assert await python(slot, TALK) == "talked"
                end.shutdown(socket.SHUT_RD)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                assert await python(slot, CONNECT) == "ECONNREFUSED"
                answers = json.loads(await python(slot, TAKE.replace("NUMBER", str(PROXY_PORT))))
                assert set(answers.values()) == {"EADDRINUSE"}, answers


async def _serve(end: socket.socket, count: int) -> None:
    """Greet so many; the odd ones are closed by this side first."""
    end.setblocking(False)
    with trio.socket.from_stdlib_socket(end.dup()) as listener:
        for number in range(count):
            accepted, _ = await listener.accept()
            with accepted:
                await accepted.send(b"hello")
                if number % 2 == 0:
                    await accepted.recv(1)


async def test_another_socket_than_the_proxys_is_refused() -> None:
    with socket.socket() as wrong_address, socket.socket() as listening:
        wrong_address.bind(("127.0.0.1", 0))
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        for each in (wrong_address, listening):
            port = ProxyPort(os.dup(each.fileno()))
            with pytest.raises(MechanismError):
                port.check()
            port.close()
    with socket.socket() as right:
        right.bind(PROXY)
        port = ProxyPort(os.dup(right.fileno()))
        port.check()
        right.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(MechanismError):
            port.check()
        port.close()
        assert port.descriptor is None
