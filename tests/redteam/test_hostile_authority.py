"""Descriptors in flight on the sockets of the worker's side: to a lease authority, from one to the
daemon, and from a daemon that was taken over to a worker."""

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from sbxd import rights
from sbxd.client import unix
from sbxd.client.authority import Admitted, LeaseAuthority
from sbxd.closing import Closers
from sbxd.service.unix import DescriptorsSent, connect
from tests.redteam.descriptors import (
    SECONDS_MAX,
    UNAVAILABLE,
    connected,
    has_passrights,
    interrupts_only_at_the_end,
    send_lingering,
)

UID = os.getuid()


@pytest.fixture(params=["refused", "looked-into"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the kernel refuses descriptors."""
    if request.param == "looked-into":
        monkeypatch.setattr(rights, "SO_PASSRIGHTS", UNAVAILABLE)
    monkeypatch.setattr(unix, "closers", Closers())
    with interrupts_only_at_the_end():
        yield request.param == "refused" and has_passrights()


@asynccontextmanager
async def authority(path: str) -> AsyncIterator[LeaseAuthority]:
    served = LeaseAuthority(Admitted(holder_uids=frozenset({UID}), asker_uids=frozenset({UID})))
    async with anyio.create_task_group() as tasks:
        await tasks.start(served.serve, path)
        yield served
        tasks.cancel_scope.cancel()


@pytest.mark.case("PEER-05")
@pytest.mark.parametrize("flags", [0, socket.MSG_OOB], ids=["in-band", "out-of-band"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_descriptor_sent_to_a_lease_authority_holds_up_nobody(
    tmp_path: Path, kernel: bool, backend: str, flags: int
) -> None:
    path = str(tmp_path / "s")

    async def main() -> None:
        async with authority(path):
            # Nothing is accepted before the next await.
            attacker = connected(path)
            assert send_lingering(attacker, flags=flags) is not kernel
            with anyio.fail_after(SECONDS_MAX):
                stream = await unix.connect(path)
                await stream.aclose()
                while unix.closers.busy != (0 if kernel else 1):
                    await anyio.lowlevel.checkpoint()
            attacker.close()

    anyio.run(main, backend=backend)


@contextmanager
def listening(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
        made.listen(4)
        yield made


@pytest.mark.case("PEER-05")
async def test_a_descriptor_sent_by_a_lease_authority_holds_up_no_daemon(
    tmp_path: Path, kernel: bool
) -> None:
    path, closers = str(tmp_path / "s"), Closers()
    with listening(path) as hostile:
        stream = await connect(path, closers)
        end, _ = hostile.accept()
        with end:
            assert send_lingering(end) is not kernel
            if not kernel:
                with pytest.raises(DescriptorsSent):
                    await stream.receive_some(100)
            await stream.aclose()
        assert closers.busy == (0 if kernel else 1)


@pytest.mark.case("DMN-02")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_descriptor_sent_by_a_daemon_holds_up_no_worker(
    tmp_path: Path, kernel: bool, backend: str
) -> None:
    path = str(tmp_path / "s")

    async def main() -> None:
        with listening(path) as hostile:
            stream = await unix.connect(path)
            end, _ = hostile.accept()
            with end:
                assert send_lingering(end) is not kernel
                if not kernel:
                    with pytest.raises(anyio.BrokenResourceError):
                        await stream.receive(100)
                await stream.aclose()
            assert unix.closers.busy == (0 if kernel else 1)

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_stream_that_is_closed_wakes_who_receives_from_it(tmp_path: Path, backend: str) -> None:
    path = str(tmp_path / "s")

    async def main() -> None:
        with listening(path):
            stream = await unix.connect(path)
            ended = list[str]()

            async def receive() -> None:
                with pytest.raises(anyio.ClosedResourceError):
                    await stream.receive(100)
                ended.append("woken")

            with anyio.fail_after(SECONDS_MAX):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(receive)
                    await anyio.wait_all_tasks_blocked()
                    await stream.aclose()
            assert ended == ["woken"]

    anyio.run(main, backend=backend)
