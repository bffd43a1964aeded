"""A daemon that was taken over, against the launcher: what it sends stops nobody else, and nothing
that the launcher keeps grows for ever."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec import structs

from sbxd import rights
from sbxd.launcher import channel
from sbxd.launcher.books import WAITERS_MAX
from sbxd.launcher.filters import Filters
from sbxd.launcher.helpers import Report
from sbxd.launcher.pool import Job, Lane, Pool
from sbxd.launcher.requests import (
    Acknowledged,
    Destroy,
    DropLeaf,
    Failed,
    ImageDrop,
    ImageUnpack,
    Inventory,
    LauncherReply,
    LauncherRequest,
)
from sbxd.launcher.verbs import Verbs
from sbxd.port.ids import EnvironmentId
from tests.pure.test_launcher_legality import prepare_request
from tests.redteam.descriptors import (
    SECONDS_MAX,
    UNAVAILABLE,
    has_passrights,
    is_lingering,
    lingers,
    send_lingering,
    stuck_child,
)

# The launcher's own loop, without what it does to a host: it is asked nothing but what it refuses.
PROGRAM = """
import os, socket, sys
from sbxd import rights
from sbxd.launcher import filters, notify
from sbxd.launcher.loop import Launcher
rights.SO_PASSRIGHTS = int(sys.argv[2])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen(8)
launcher = Launcher(
    listener, filters.Filters(b"", b"", b""), allowed_uids=frozenset({int(sys.argv[3])}),
    notifier=notify.Notifier(None), watchdog_seconds=None, width=1,
)
print("listens", flush=True)
launcher.run()
"""
UID = os.getuid()


@contextmanager
def launcher(folder: Path, option: int, allowed_uid: int = UID) -> Iterator[tuple[str, int]]:
    """Its socket and its pid."""
    path = str(folder / "launcher.sock")
    arguments = [sys.executable, "-c", PROGRAM, path, str(option), str(allowed_uid)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"listens\n"
            yield path, process.pid
        finally:
            process.kill()


def client(path: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(SECONDS_MAX)
    end.connect(path)
    return end


def answered(path: str) -> None:
    """A client is served: here, refused by the table of what is legal."""
    with client(path) as end:
        request = DropLeaf(ticket=7, environment_id=EnvironmentId("a" * 32), number=1)
        channel.send(end, channel.encode(request))
        raw, _ = channel.receive(end)
        reply = channel.decode_reply(raw)
        assert isinstance(reply, Failed), raw
        assert (reply.ticket, reply.step) == (7, "legality")


@pytest.mark.case("DMN-01")
@pytest.mark.parametrize("option", [rights.SO_PASSRIGHTS, UNAVAILABLE], ids=["refused", "looked"])
@pytest.mark.parametrize("data", [b"x", b""], ids=["byte", "empty"])
def test_a_descriptor_whose_close_sleeps_does_not_stop_the_launcher(
    tmp_path: Path, option: int, data: bytes
) -> None:
    with launcher(tmp_path, option) as (path, pid):
        for _ in range(10):  # more than it lets wait
            with client(path) as end:
                # Stopped, so that the last drop is the launcher's.
                os.kill(pid, signal.SIGSTOP)
                try:
                    was_sent = send_lingering(end, data)
                finally:
                    os.kill(pid, signal.SIGCONT)
                assert was_sent is (option == UNAVAILABLE or not has_passrights())
                end.close()
            answered(path)
        assert not is_lingering(pid)


@pytest.mark.case("DMN-01")
@pytest.mark.parametrize("option", [rights.SO_PASSRIGHTS, UNAVAILABLE], ids=["refused", "looked"])
def test_neither_does_one_of_a_client_that_is_refused(tmp_path: Path, option: int) -> None:
    with launcher(tmp_path, option, UID + 1) as (path, pid):
        for _ in range(10):
            os.kill(pid, signal.SIGSTOP)
            try:
                end = client(path)
                send_lingering(end)
            finally:
                os.kill(pid, signal.SIGCONT)
            with end, suppress(ConnectionResetError):  # for what it did not read
                assert end.recv(1) == b"", "it is refused"
            # A stop would wake a close that sleeps: the next is seen before there is another.
            with client(path) as next_one:
                assert next_one.recv(1) == b"", "and so is the next: the loop turns"
        assert not is_lingering(pid)


@pytest.mark.case("DMN-01")
async def test_control_a_loop_without_a_defence_sleeps() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        assert send_lingering(theirs)
        with stuck_child(ours, receives=True) as pid:
            await lingers(pid)


class Held(Pool):
    """Carries nothing out: ends go well, and everything else fails, once it is let."""

    def __init__(self) -> None:
        super().__init__(1)
        self.held: list[Job] = []

    def submit(self, job: Job) -> None:
        self.held.append(job)

    def let(self) -> None:
        while self.held:
            job = self.held.pop()
            well = job.lane is Lane.END
            job.done((Report(reply=Acknowledged(ticket=1)), []) if well else None)


def verbs() -> tuple[Verbs, Held, list[LauncherReply]]:
    pool, replies = Held(), list[LauncherReply]()
    filters = Filters(b"", b"", b"")
    return Verbs(pool, filters, lambda reply, _: replies.append(reply)), pool, replies


def kept(verbs: Verbs) -> dict[str, int]:
    """What the launcher remembers, by the size of each collection, wherever one is."""
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in (verbs, verbs._books)
        for name, value in vars(owner).items()
        if isinstance(value, MutableMapping | MutableSequence | MutableSet)
    }


@pytest.mark.case("DMN-03")
def test_nothing_that_the_launcher_remembers_grows_with_what_it_was_asked() -> None:
    launcher, pool, replies = verbs()
    asked = 0
    for number in range(1000):
        environment_id = EnvironmentId(f"{number:032x}")
        digest = f"sha256:{number:064x}"
        requests: list[LauncherRequest] = [
            structs.replace(prepare_request(environment_id), image_digest=digest),
            Destroy(ticket=1, environment_id=environment_id),
            DropLeaf(ticket=1, environment_id=environment_id, number=1),
            ImageUnpack(ticket=1, image_digest=digest),
            ImageDrop(ticket=1, image_digest=digest),
            Inventory(ticket=1),
        ]
        for request in requests:
            launcher.dispatch(request)
            pool.let()
        asked += len(requests)
        launcher.reaped(number + 2, 0)
    assert len(replies) == asked
    sizes = kept(launcher)
    assert {"Books.environments", "Books.images", "Verbs._roles"} <= sizes.keys()
    remembered = sizes.pop("Verbs._statuses")
    assert 0 < remembered <= 512, "the last that ended are remembered for a while"
    assert set(sizes.values()) == {0}, sizes


@pytest.mark.case("DMN-03")
@pytest.mark.parametrize("what", ["destroy", "unpack"])
def test_no_more_wait_for_one_end_than_the_launcher_remembers(what: str) -> None:
    launcher, pool, replies = verbs()
    digest = f"sha256:{1:064x}"
    request: LauncherRequest = (
        Destroy(ticket=1, environment_id=EnvironmentId("a" * 32))
        if what == "destroy"
        else ImageUnpack(ticket=1, image_digest=digest)
    )
    for _ in range(WAITERS_MAX + 5):
        launcher.dispatch(request)
    assert len(pool.held) == 1
    assert len(replies) == 5
    assert all(isinstance(each, Failed) and each.step == "legality" for each in replies)
    pool.let()
    assert len(replies) == WAITERS_MAX + 5, "each has its reply"
    assert not launcher._books.images
    assert not launcher._books.environments
