"""A connection that is handed to another process, by a descriptor or across an exec.

Source: CASES API-03. The kernel's word is that of the moment of `connect` and stays it; the
credential is what stands behind it, and what was handed over does not have it.
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio

from sbxd.audit.events import Door, PeerRefusal, PeerRefused
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.service.listener import DoorListener, Service
from sbxd.service.peer import NOT_AUTHORIZED
from sbxd.settings import AuthMode, DeploymentMode
from sbxd.wire import messages as m
from tests.service.memory import LOG, MemoryDaemon, memory_daemon
from tests.service.raw import HELLO, raw_client
from tests.service.requests import SCRIPT
from tests.service.test_sockets import CREDENTIAL, listen

pytestmark = pytest.mark.needs("root")

# Of no account: a number that nobody else has here.
WORKER_UID, STRANGER_UID = 61000, 61001

# argv: socket, uid. Connects as that uid and becomes another program, which inherits the connection
# and hands it to its parent.
CONNECT = """
import os, socket, sys
NEXT = "import socket, sys; socket.send_fds(socket.socket(fileno=0), [b'x'], [int(sys.argv[1])])"
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
made.connect(sys.argv[1])
made.set_inheritable(True)
os.execv(sys.executable, [sys.executable, "-c", NEXT, str(made.fileno())])
"""


def handed_over(path: Path, uid: int) -> socket.socket:
    """A connection that a process of this uid made, and that is gone."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run(
            [sys.executable, "-c", CONNECT, str(path), str(uid)],
            stdin=theirs.fileno(),
            check=True,
            timeout=60,
        )
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptor)


async def answer(made: socket.socket, credential: bytes | None) -> m.Message | None:
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(made))
    async with stream:
        raw = raw_client(stream)
        with suppress(trio.BrokenResourceError):  # a stranger is closed without being read
            await raw.send(msgspec.structs.replace(HELLO, credential=credential))
        return await raw.receive()


@pytest.fixture
def open_to_all(tmp_path: Path) -> Path:
    """A folder that other uids reach a socket in."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    return tmp_path


async def answers(
    folder: Path, *tries: tuple[int, bytes | None]
) -> tuple[list[m.Message | None], MemoryDaemon]:
    """What is said to connections of these uids, each with this credential, by a daemon that
    admits WORKER_UID."""
    settings = msgspec.structs.replace(
        FAKE_SETTINGS,
        deployment_mode=DeploymentMode.PRODUCTION,
        auth_mode=AuthMode.TOKEN,
        service=msgspec.structs.replace(FAKE_SETTINGS.service, worker_uids=(WORKER_UID,)),
    )
    heard = []
    path = folder / "worker"
    async with memory_daemon(SCRIPT, settings=settings, credential=CREDENTIAL) as daemon:
        service = Service(daemon.context, daemon.audit, LOG)
        listener = listen(path)
        path.chmod(0o666)
        async with trio.open_nursery() as nursery:
            await nursery.start(service.serve, [DoorListener(Door.WORKER, listener)])
            with trio.fail_after(60):
                for uid, credential in tries:
                    made = await trio.to_thread.run_sync(handed_over, path, uid)
                    heard.append(await answer(made, credential))
                daemon.service.shut_down()
        return heard, daemon


@pytest.mark.case("API-03")
async def test_a_connection_that_is_handed_over_still_needs_the_credential(
    open_to_all: Path,
) -> None:
    """By root, who made none of them: the kernel names whoever connected."""
    heard, daemon = await answers(
        open_to_all, (WORKER_UID, None), (WORKER_UID, b"another"), (WORKER_UID, CREDENTIAL)
    )
    assert heard[:2] == [NOT_AUTHORIZED, NOT_AUTHORIZED]
    assert isinstance(heard[2], m.Welcome), "the control: with it, it is served"
    refused = daemon.audit.of(PeerRefused)
    assert [each.reason for each in refused] == [
        PeerRefusal.CREDENTIAL_MISSING,
        PeerRefusal.CREDENTIAL_WRONG,
    ]
    assert {each.peer_uid for each in refused} == {WORKER_UID} != {os.getuid()}


@pytest.mark.case("API-03")
async def test_a_connection_of_a_stranger_stays_one_in_the_hands_of_root(open_to_all: Path) -> None:
    heard, daemon = await answers(open_to_all, (STRANGER_UID, CREDENTIAL))
    assert heard == [NOT_AUTHORIZED]
    (refused,) = daemon.audit.of(PeerRefused)
    assert (refused.reason, refused.peer_uid) == (PeerRefusal.UID_NOT_CONFIGURED, STRANGER_UID)
