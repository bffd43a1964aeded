"""The client against slow and hostile stewards, the steward against hostile bytes, and the whole
protocol under the filter that is shipped."""

import os
import random
import socket
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from sbxd.jail import syscalls
from sbxd.launcher.kernel.seccomp import ProfileName, compile_profile, profile_text
from sbxd.mechanism.protocol import SandboxLost
from sbxd.mechanism.steward_client import StewardClient
from sbxd.port.errors import WorkspaceError, WorkspaceEscape
from sbxd.port.workspace import WorkspaceProvenance
from sbxd.steward import frames
from sbxd.steward.frames import Data, End, Entry, Kind, Opened, Status
from sbxd.steward.server import serve
from tests.kernel.steward_bench import collect, listing, once, paths, steward

STAMP = bytes(frames.STAMP_BYTES)


@asynccontextmanager
async def scripted(raw: bytes) -> AsyncIterator[StewardClient]:
    """A steward that answers everything with these bytes and then ends."""
    ours, theirs = socket.socketpair()
    theirs.sendall(raw)
    theirs.shutdown(socket.SHUT_WR)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    with ours, theirs:
        yield StewardClient(stream)


def answer(*replies: frames.Reply) -> bytes:
    return b"".join(frames.encode(reply) for reply in replies)


async def test_a_right_answer_is_believed() -> None:
    """The positive control of what follows."""
    entry = Entry(Kind.CREATED, 3, bytes(32), b"f")
    async with scripted(answer(entry, End(Status.OK, True, 5, 6))) as client:
        changes = await client.changes(1)
    assert [(e.path, e.sha256) for e in changes.entries] == [("f", "00" * 32)]
    assert (changes.truncated, changes.workspace_bytes, changes.workspace_inodes) == (True, 5, 6)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0",
        struct.pack("!I", 0),
        struct.pack("!I", frames.FRAME_BYTES_MAX + 1),
        struct.pack("!I", 2**32 - 1) + b"x" * 100,
        struct.pack("!I", 1) + b"\xff",
        answer(Opened(1, STAMP)),
        answer(Data(b"x"), End(Status.OK)),
        answer(*(Entry(Kind.CREATED, 0, None, b"f") for _ in range(3)), End(Status.OK)),
        answer(Entry(Kind.DELETED, 0, bytes(32), b"f"), End(Status.OK)),
        answer(Entry(Kind.CREATED, 2**64 - 1, None, b"f"), End(Status.OK)),
        answer(Entry(Kind.CREATED, 1, None, b"ab"), End(Status.OK)).replace(b"ab", b"/b"),
        answer(Entry(Kind.CREATED, 1, None, b"abc"), End(Status.OK)).replace(b"abc", b"a//"),
        answer(End(Status.OK, False, 2**64 - 1)),
        answer(End(Status.OK), End(Status.OK)),
    ],
)
async def test_what_a_broken_steward_says_is_lost_and_stays_lost(raw: bytes) -> None:
    async with scripted(raw) as client:
        with pytest.raises(SandboxLost):
            await client.changes(2)
        with pytest.raises(SandboxLost):
            await client.snapshot()


@pytest.mark.parametrize(
    "raw",
    [
        answer(End(Status.OK)),
        answer(Opened(2, STAMP), Data(b"123"), End(Status.OK)),
        answer(Opened(4, STAMP), Data(b"12"), End(Status.OK)),
        answer(Opened(101, STAMP), Data(bytes(101)), End(Status.OK)),
        answer(Opened(2, STAMP), Opened(2, STAMP), End(Status.OK)),
    ],
)
async def test_a_read_that_does_not_add_up_is_lost(raw: bytes) -> None:
    async with scripted(raw) as client:
        with pytest.raises(SandboxLost):
            await collect(await client.read(b"f", 100))


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=400), framed=st.booleans(), kind=st.sampled_from([32, 33, 34, 35, 0]))
def test_no_bytes_of_a_steward_do_more_than_fail(raw: bytes, framed: bool, kind: int) -> None:
    """Any bytes, and any bytes in a right frame: an answer or one of the three errors."""
    if framed:
        raw = struct.pack("!IB", 1 + len(raw), kind) + raw

    async def ask() -> None:
        async with scripted(raw) as client:
            for attempt in (client.changes(3), listing(client, b"."), client.usage()):
                with suppress(SandboxLost, WorkspaceError, WorkspaceEscape):
                    await attempt

    trio.run(ask)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_bytes_make_the_steward_do_more_than_end(data: st.DataObject) -> None:
    pieces = data.draw(
        st.lists(
            st.one_of(
                st.binary(max_size=60),
                st.builds(
                    lambda kind, body: struct.pack("!IB", 1 + len(body), kind) + body,
                    st.integers(0, 40),
                    st.binary(max_size=80),
                ),
                st.sampled_from(
                    [
                        frames.encode(frames.Snapshot()),
                        frames.encode(frames.Changes(5, 100)),
                        frames.encode(frames.Stop()),
                        frames.encode(frames.Piece(7, b"x")),
                        frames.encode(frames.Commit(1)),
                        frames.encode(frames.Read(9, 2**64 - 1, 5, STAMP, b"f")),
                        frames.encode(frames.List(1, 0, b"", b".")),
                    ]
                ),
            ),
            max_size=6,
        )
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join(pieces))
        ours.shutdown(socket.SHUT_WR)
        with tempfile.TemporaryDirectory() as name:
            directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
            assert serve(theirs.fileno(), directory, owner=os.geteuid()) in (0, 1)
            os.close(directory)


async def test_a_cancelled_comparison_keeps_the_snapshot_and_the_place(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        await client.snapshot()
        volume = os.statvfs(tmp_path)
        size = min(volume.f_blocks * volume.f_frsize // 8, 2**31)  # so that all are digested
        for number in range(4):
            with (tmp_path / f"large{number}").open("wb") as file:
                file.truncate(size)
        with trio.move_on_after(0.02) as scope:
            await client.changes(10)
        assert scope.cancelled_caught
        for number in range(4):
            (tmp_path / f"large{number}").unlink()
        (tmp_path / "small").write_text("x")
        assert await client.provenance(b"small") is WorkspaceProvenance.SANDBOX_WRITTEN
        assert paths((await client.changes(10)).entries) == [("CREATED", "small")]


async def test_cancelling_at_any_checkpoint_never_loses_the_place(tmp_path: Path) -> None:
    """Cancel each call after each number of its steps; the next call is answered rightly."""
    content = os.urandom(frames.READ_BYTES_MAX + 5)

    async def use(client: StewardClient) -> None:
        await client.write(b"f", len(content), once(content))
        assert await collect(await client.read(b"f", len(content))) == content
        await client.snapshot()
        await client.changes(10)
        await listing(client, b".")

    async with steward(tmp_path) as client:
        for steps in count(1):
            with trio.CancelScope() as scope:
                instrument = _CancelAfter(scope, steps)
                trio.lowlevel.add_instrument(instrument)
                try:
                    await use(client)
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            assert [entry.path for entry in await listing(client, b".")] in ([], ["f"])
            assert await client.provenance(b"none") is WorkspaceProvenance.UNKNOWN
            if not scope.cancelled_caught:
                break
    assert steps > 20
    assert os.listdir(tmp_path) == ["f"]


class _CancelAfter(trio.abc.Instrument):
    """Cancels a scope when its task has been scheduled so many times."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self._scope = scope
        self._left = steps
        self._task = trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self._scope.cancel()


async def test_a_dropped_read_and_a_failed_upload_hold_nothing(tmp_path: Path) -> None:
    async with steward(tmp_path) as client:
        await client.write(b"f", 3 * frames.READ_BYTES_MAX, once(bytes(3 * frames.READ_BYTES_MAX)))
        pieces = await client.read(b"f", 2**30)
        await anext(pieces)

        async def fails() -> AsyncIterator[bytes]:
            yield b"x"
            raise RuntimeError("the uploader is gone")

        with pytest.raises(RuntimeError, match="uploader"):
            await client.write(b"g", 2, fails())
        assert [entry.path for entry in await listing(client, b".")] == ["f"]
        assert os.listdir(tmp_path) == ["f"]


async def test_more_uploads_than_are_kept_end_the_oldest(tmp_path: Path) -> None:
    started = 0
    refused: list[WorkspaceError] = []

    async with steward(tmp_path) as client:
        all_started = trio.Event()

        async def slow() -> AsyncIterator[bytes]:
            nonlocal started
            started += 1
            if started == 10:
                all_started.set()
            await all_started.wait()
            yield b"xy"

        async def upload(number: int) -> None:
            try:
                await client.write(b"f%d" % number, 2, slow())
            except WorkspaceError as problem:
                refused.append(problem)

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(upload, number)
        assert len(refused) == 2
        assert len(await listing(client, b".")) == 8


async def test_requests_at_the_same_time_take_turns(tmp_path: Path) -> None:
    contents = {b"f%d" % n: random.Random(n).randbytes(n * 100_000) for n in range(8)}
    async with steward(tmp_path) as client:

        async def use(path: bytes) -> None:
            await client.write(path, len(contents[path]), once(contents[path]))
            assert await collect(await client.read(path, 2**30)) == contents[path]

        async with trio.open_nursery() as nursery:
            for path in contents:
                nursery.start_soon(use, path)
        assert len(await listing(client, b".")) == 8


async def test_a_steward_that_ends_is_lost() -> None:
    ours, theirs = socket.socketpair()
    told: list[str] = []
    client = StewardClient(
        trio.SocketStream(trio.socket.from_stdlib_socket(ours)),
        on_lost=lambda: told.append("lost"),
    )
    with ours:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(SandboxLost):
                    await client.snapshot()
                # Whoever draws consequences from the refusal finds the loss known.
                assert told == ["lost"]

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert told == []
            theirs.close()
        with pytest.raises(SandboxLost):
            await client.snapshot()
        assert told == ["lost"]


async def test_the_whole_protocol_runs_under_the_shipped_filter(tmp_path: Path) -> None:
    program = compile_profile(profile_text(ProfileName.STEWARD)).bpf
    ours, theirs = socket.socketpair()
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            ours.close()
            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            syscalls.seccomp_set_mode_filter(program)
            try:
                os.open("/", os.O_RDONLY)
            except OSError:  # the positive control: the filter is on
                code = serve(theirs.fileno(), root, owner=os.geteuid())
        finally:
            os._exit(code)
    theirs.close()
    os.close(root)
    with ours:
        client = StewardClient(trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        await client.snapshot()
        size = 3 * frames.DATA_BYTES_MAX
        await client.write(b"a/b/f", size, once(bytes(size)))
        assert await collect(await client.read(b"a/b/f", size)) == bytes(size)
        (tmp_path / "made").write_text("x")
        os.symlink("made", tmp_path / "link")
        changed = paths((await client.changes(10)).entries)
        assert changed == [("CREATED", "link"), ("CREATED", "made")]
        assert len(await listing(client, b".")) == 3
        assert await client.provenance(b"a/b/f") is WorkspaceProvenance.TOOL_WRITTEN
        await client.usage()
        await client.snapshot()
        with pytest.raises(WorkspaceError):
            await client.write(b"a", 1, once(b"x"))
    _, status = await trio.to_thread.run_sync(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
