"""A daemon on real sockets in a thread of its own, so that a test whose attack stops its event loop
fails in time, and does not stop with it."""

import queue
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from sbxd.audit.events import Door
from sbxd.closing import Closers
from sbxd.doors import open_doors
from sbxd.fake.engine import FAKE_SETTINGS
from sbxd.service.listener import Service
from sbxd.service.peer import PeerCredentials
from sbxd.service.unix import UnixListener, UnixStream
from sbxd.settings import Settings
from tests.pacing import next_look
from tests.redteam.descriptors import SECONDS_MAX
from tests.service.memory import LOG, ROOT, memory_daemon
from tests.service.requests import SCRIPT

STRANGER = PeerCredentials(pid=7, uid=2000, gid=2000, groups=frozenset({2000}))


@dataclass
class Attacked:
    """A running daemon. `strangers`: connections whose peer, from now on, is an unlisted uid."""

    worker: str
    admin: str
    closers: dict[Door, Closers]
    token: trio.lowlevel.TrioToken
    strangers: bool = False

    def path(self, door: Door) -> str:
        return self.worker if door is Door.WORKER else self.admin

    def peer(self, stream: trio.abc.Stream) -> PeerCredentials:
        assert isinstance(stream, UnixStream)
        return STRANGER if self.strangers else ROOT

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Its loop does nothing within the block: what is sent there is received afterwards."""
        reached, on = threading.Event(), threading.Event()

        def wait() -> None:
            reached.set()
            on.wait(SECONDS_MAX)

        self.token.run_sync_soon(wait)
        assert reached.wait(SECONDS_MAX)
        try:
            yield
        finally:
            on.set()

    async def closing(self, door: Door, count: int) -> None:
        """Until so many ends of a door are not closed yet."""
        with trio.fail_after(SECONDS_MAX):
            while self.closers[door].busy != count:
                await next_look()


@asynccontextmanager
async def attacked_daemon(
    folder: Path, *, settings: Settings = FAKE_SETTINGS
) -> AsyncIterator[Attacked]:
    """A daemon that serves both doors until the block ends."""
    started: queue.Queue[tuple[Attacked, trio.CancelScope]] = queue.Queue()

    async def serve() -> None:
        doors = open_doors({}, folder)
        closers = {}
        for each in doors:
            assert isinstance(each.listener, UnixListener)
            closers[each.door] = each.listener.closers
        attacked = Attacked(
            str(folder / "worker.sock"),
            str(folder / "admin.sock"),
            closers,
            trio.lowlevel.current_trio_token(),
        )
        async with memory_daemon(SCRIPT, settings=settings) as daemon, trio.open_nursery() as tasks:
            service = Service(daemon.context, daemon.audit, LOG, read_peer=attacked.peer)
            await tasks.start(service.serve, doors)
            started.put((attacked, tasks.cancel_scope))

    thread = threading.Thread(target=trio.run, args=(serve,), name="daemon", daemon=True)
    thread.start()
    attacked, scope = await trio.to_thread.run_sync(started.get)
    try:
        yield attacked
    finally:
        attacked.token.run_sync_soon(scope.cancel)
        # Where the attack has stopped the loop, the same signal lets it go.
        before = signal.signal(signal.SIGURG, lambda *_: None)
        while thread.is_alive():
            thread.join(0.1)
            if thread.is_alive() and thread.ident is not None:
                signal.pthread_kill(thread.ident, signal.SIGURG)
        signal.signal(signal.SIGURG, before)
