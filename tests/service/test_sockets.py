"""The service on real Unix sockets, with the kernel's word on the peer and both kinds of client."""

import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest
import trio

from sbxd.audit.events import Door, PeerRefused
from sbxd.client.admin import connect_admin
from sbxd.client.remote import connect
from sbxd.client.workspace import RemoteWorkspace
from sbxd.closing import Closers
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.port.command import ExecutionCommand
from sbxd.port.errors import ExecutionRejected, RejectedCode
from sbxd.service.listener import DoorListener, Service
from sbxd.service.unix import UnixListener
from sbxd.settings import AuthMode
from tests.service.memory import LOG, MemoryDaemon, memory_daemon
from tests.service.requests import SCRIPT, SPECIFICATION

CREDENTIAL = b"credential-of-the-service"


def listen(path: Path) -> UnixListener:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(16)
    return UnixListener(listening, Closers())


async def serving(
    tmp_path: Path, ask: Callable[[str, str], Awaitable[None]], backend: str
) -> MemoryDaemon:
    """Serve on two sockets in trio, and run `ask(worker, admin)` in another thread's loop."""
    settings = msgspec.structs.replace(FAKE_SETTINGS, auth_mode=AuthMode.TOKEN)
    worker, admin = tmp_path / "worker", tmp_path / "admin"
    async with memory_daemon(SCRIPT, settings=settings, credential=CREDENTIAL) as daemon:
        service = Service(daemon.context, daemon.audit, LOG)
        listeners = [
            DoorListener(Door.WORKER, listen(worker)),
            DoorListener(Door.ADMIN, listen(admin)),
        ]
        async with trio.open_nursery() as nursery:
            await nursery.start(service.serve, listeners)
            run = partial(anyio.run, ask, str(worker), str(admin), backend=backend)
            with trio.fail_after(120):
                await trio.to_thread.run_sync(run)
                daemon.service.shut_down()  # of both services: they share the event
        return daemon


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
async def test_a_worker_and_an_operator_are_served_over_sockets(
    tmp_path: Path, backend: str
) -> None:
    async def ask(worker: str, admin: str) -> None:
        async with (
            connect(worker, credential=CREDENTIAL) as environment,
            connect_admin(admin) as operator,
        ):
            assert environment.mechanism == "fake"
            handle = await environment.provision(SPECIFICATION)
            (info,) = await operator.list()
            assert info.handle == handle
            assert info.owner_uid == os.getuid()
            workspace = RemoteWorkspace(environment.channel, handle)
            content = os.urandom(5_000_000)
            await workspace.write("large", content)
            assert await workspace.read("large") == content
            result = await environment.execute(
                handle,
                ExecutionCommand(
                    argv=("both",),
                    working_directory=".",
                    timeout_seconds=5,
                    stdin=None,
                    maximum_output_bytes=2**22,
                ),
            )
            assert len(result.stdout) == len(result.stderr) == 3 * 2**20
            await environment.destroy(handle)

    await serving(tmp_path, ask, backend)


async def test_a_worker_without_the_credential_is_told_so_and_recorded_by_the_kernels_word(
    tmp_path: Path,
) -> None:
    async def ask(worker: str, admin: str) -> None:
        with pytest.raises(ExecutionRejected) as caught:
            async with connect(worker, credential=b"wrong"):
                raise AssertionError
        assert caught.value.code is RejectedCode.NOT_AUTHORIZED

    daemon = await serving(tmp_path, ask, "asyncio")
    (event,) = daemon.audit.of(PeerRefused)
    assert (event.peer_uid, event.peer_pid) == (os.getuid(), os.getpid())
