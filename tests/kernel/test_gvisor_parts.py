"""The parts of the gvisor mechanism one by one: what is refused, and whose word counts."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from sbxd.jail import frames
from sbxd.jail.plan import SENTRY_ID, SENTRY_INNER_IDS, IdBlock
from sbxd.launcher.kernel import cgroup, probe, runsc
from sbxd.launcher.requests import LEAF_DESCRIPTORS, CgroupLimits, Kernel
from sbxd.launcher.verify import (
    CAPABILITY_SETS,
    NotConfined,
    check_runsc_status,
    check_sentry_status,
)
from sbxd.mechanism import gvisor_sandbox
from sbxd.mechanism.guest_client import GuestClient
from sbxd.mechanism.gvisor_sandbox import GvisorCommand, GvisorSandbox, Sentry
from sbxd.mechanism.leaf import Leaf
from sbxd.mechanism.protocol import CommandExit, SandboxLost
from sbxd.mechanism.refused_forks import RefusedForks

IDS = IdBlock(1_900_000_000, SENTRY_INNER_IDS)
SENTRY = {
    "Uid": "\t".join(["1900000002"] * 4),
    "Gid": "\t".join(["1900000002"] * 4),
    "Groups": "",
    "NoNewPrivs": "1",
    "Seccomp": "2",
    **dict.fromkeys(CAPABILITY_SETS, "0000000000000000"),
}

# what the launcher verifies ----------------------------------------------------------------------


def test_the_block_of_a_sentry_maps_its_own_id_and_no_more() -> None:
    assert IDS.map_lines() == "0 1900000000 1\n10001 1900000001 1\n65534 1900000002 1\n"
    assert IDS.outer(SENTRY_ID) == 1_900_000_002


def test_control_a_confined_sentry_passes() -> None:
    check_runsc_status(SENTRY)
    check_sentry_status(SENTRY, IDS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Uid", "\t".join(["65534"] * 4)),  # the host's nobody, as runsc alone would have it
        ("Uid", "1900000002\t0\t1900000002\t1900000002"),
        ("Gid", "\t".join(["0"] * 4)),
        *((name, "0000000000000001") for name in CAPABILITY_SETS),
    ],
)
def test_a_sentry_with_more_than_it_needs_is_refused(field: str, value: str) -> None:
    with pytest.raises(NotConfined):
        check_sentry_status({**SENTRY, field: value}, IDS)


@pytest.mark.parametrize(
    ("field", "value"), [("NoNewPrivs", "0"), ("Seccomp", "0"), ("Groups", "4")]
)
def test_a_process_of_runsc_that_lacks_a_layer_is_refused(field: str, value: str) -> None:
    with pytest.raises(NotConfined):
        check_runsc_status({**SENTRY, field: value})


def test_a_sentrys_leaf_holds_more_than_the_guest_is_promised() -> None:
    promised = CgroupLimits(cpu_millicores=1000, memory_bytes=64 << 20, pids_max=64)
    assert cgroup.kernel_limits(promised, Kernel.HOST) == promised
    given = cgroup.kernel_limits(promised, Kernel.SENTRY)
    assert given.cpu_millicores == promised.cpu_millicores
    assert given.memory_bytes == promised.memory_bytes + cgroup.SENTRY_MEMORY_BYTES
    assert given.pids_max > 3 * promised.pids_max


# which runsc -------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "runsc"
    path.write_text("#!/bin/sh\necho runsc version 1.2.3\n")
    path.chmod(0o755)
    return path


def usable(program: Path) -> runsc.Runsc:
    found = runsc.find(str(program))
    assert isinstance(found, runsc.Runsc)
    return found


def test_no_runsc_is_said_and_no_failure_of_the_launcher(tmp_path: Path) -> None:
    found = runsc.find(str(tmp_path / "runsc"))
    assert found == runsc.NOT_INSTALLED
    assert probe.of_runsc(found).state == "missing"
    with pytest.raises(FileNotFoundError):
        runsc.open_program(found, None)


def test_a_program_that_does_not_run_is_said_and_no_failure_of_the_launcher(
    program: Path,
) -> None:
    program.write_text("#!/bin/sh\nexit 1\n")
    found = runsc.find(str(program))
    assert isinstance(found, runsc.Unusable)
    item = probe.of_runsc(found)
    assert (item.state, "does not tell its version" in item.detail) == ("missing", True)
    assert "runsc --version" in item.fix
    with pytest.raises(OSError, match="does not tell its version"):
        runsc.open_program(found, None)


def test_the_program_is_hashed_and_asked_for_its_version(program: Path) -> None:
    found = usable(program)
    assert found.version == "1.2.3"
    assert len(found.sha256) == 64
    os.close(runsc.open_program(found, None))
    os.close(runsc.open_program(found, found.sha256))


def test_another_digest_than_the_configured_one_is_refused(program: Path) -> None:
    with pytest.raises(PermissionError):
        runsc.open_program(usable(program), "0" * 64)


def test_a_program_that_was_replaced_is_refused(program: Path) -> None:
    found = usable(program)
    program.write_text("#!/bin/sh\necho runsc version 1.2.4\n")
    with pytest.raises(OSError, match="replaced"):
        runsc.open_program(found, None)


def test_a_program_that_others_may_write_is_refused(program: Path) -> None:
    program.chmod(0o777)
    found = runsc.find(str(program))
    assert isinstance(found, runsc.Unusable)
    assert "root's alone" in found.detail


# process 1's word --------------------------------------------------------------------------------


class Guest:
    """Process 1, played by the test."""

    def __init__(self, end: socket.socket) -> None:
        self.end = trio.socket.from_stdlib_socket(end)
        self.lost = 0

    async def next(self) -> frames.Frame:
        return frames.decode(await self.end.recv(frames.FRAME_BYTES_MAX))

    async def say(self, frame: frames.Frame) -> None:
        await self.end.send(frames.encode(frame))

    def count(self) -> None:
        self.lost += 1


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[GuestClient, Guest]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        guest = Guest(theirs)
        client = GuestClient(trio.socket.from_stdlib_socket(ours), guest.count)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.read)
            yield client, guest
            nursery.cancel_scope.cancel()


async def test_a_command_is_quiet_when_process_1_says_so() -> None:
    async with connected() as (client, guest):
        client.expect(1)
        assert client.kill_nowait(1)
        assert await guest.next() == frames.Kill(1)
        await guest.say(frames.Exited(1, 9))
        await guest.say(frames.Quiet(1))
        with trio.fail_after(60):
            await client.wait_quiet(1)
            assert await client.wait_exit(1) == CommandExit(exit_code=None, signal=9)


async def test_a_quiet_of_another_command_is_not_this_ones() -> None:
    async with connected() as (client, guest):
        client.expect(2)
        await guest.say(frames.Quiet(1))
        await guest.say(frames.Quiet(2))
        with trio.fail_after(60):
            await client.wait_quiet(2)


async def test_a_guest_that_ends_was_never_quiet() -> None:
    async with connected() as (client, guest):
        client.expect(1)
        guest.end.close()
        with trio.fail_after(60), pytest.raises(SandboxLost):
            await client.wait_quiet(1)
        assert guest.lost == 1
        assert not client.kill_nowait(1)


async def test_a_guest_that_says_more_than_it_was_asked_is_lost() -> None:
    async with connected() as (client, guest):
        client.expect(1)
        for frame in (frames.Started(1), frames.Exited(1, 0), frames.Quiet(1)):
            await guest.say(frame)
        with trio.fail_after(60):
            await client.wait_quiet(1)
        assert guest.lost == 0, "the control: this much is right"
        await guest.say(frames.Quiet(1))
        await trio.testing.wait_all_tasks_blocked()
        assert guest.lost == 1


@pytest.mark.parametrize("frame", [frames.Kill(1), frames.Limit(1), frames.Filter(bytes(8))])
async def test_what_process_1_has_no_business_to_say_ends_it(frame: frames.Frame) -> None:
    async with connected() as (client, guest):
        client.expect(1)
        await guest.say(frame)
        with trio.fail_after(60), pytest.raises(SandboxLost):
            await client.wait_exit(1)


# evidence ----------------------------------------------------------------------------------------


class Counted:
    """A leaf of ordinary files, whose counters the test writes."""

    def __init__(self, folder: Path) -> None:
        self.files = {name: folder / name for name in LEAF_DESCRIPTORS[1:]}
        for path in self.files.values():
            path.write_text("")
        self.write(oom=0, cpu=100)
        self.files["leaf_events"].write_text("populated 0\n")
        self.files["leaf_memory_peak"].write_text("4096\n")
        self.files["leaf_pids_peak"].write_text("50\n")
        self.files["leaf_pids_events"].write_text("max 7\n")
        directory = os.open(folder, os.O_DIRECTORY)
        opened = [os.open(path, os.O_RDWR) for path in self.files.values()]
        self.leaf = Leaf(1, [directory, *opened])

    def write(self, *, oom: int, cpu: int) -> None:
        self.files["leaf_memory_events"].write_text(f"oom_kill {oom}\noom_group_kill {oom}\n")
        self.files["leaf_cpu_stat"].write_text(f"usage_usec {cpu}\n")


class Slot:
    """What a command tells its sandbox."""

    def __init__(self) -> None:
        self.over: list[Sentry] = []
        self.losses = 0

    def command_over(self, sentry: Sentry) -> None:
        self.over.append(sentry)

    def sentry_lost(self) -> None:
        self.losses += 1


@asynccontextmanager
async def running(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[GvisorCommand, Guest, Counted, Sentry, Slot]]:
    class NoWatch:
        def close(self) -> None:
            """Ordinary files cannot be watched."""

    monkeypatch.setattr(Leaf, "watch", lambda self: NoWatch())
    async with connected() as (client, guest):
        counted = Counted(folder)
        told, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forks = RefusedForks(ours.detach())
        sentry = Sentry(counted.leaf, client, trio.socket.socket(), forks, [])
        slot = Slot()
        command = GvisorCommand(cast(GvisorSandbox, slot), sentry, 1, b"")
        try:
            yield command, guest, counted, sentry, slot
        finally:
            command.release()
            assert slot.over == [sentry]
            sentry.close()
            told.close()


async def test_a_command_counts_what_it_added_and_not_what_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch) as (command, _, counted, _, _):
        counted.write(oom=0, cpu=350)
        now = command.counters()
        assert (now.oom_kill, now.cpu_usage_us, now.memory_peak_bytes) == (0, 250, 4096)
        assert now.pids_max_events == 0, "the host's 7 are threads of the Sentry and its stubs"
        assert now.pids_peak is None


@pytest.mark.parametrize("by_us", [False, True])
async def test_a_sentry_that_ends_without_an_oom_kill_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_us: bool
) -> None:
    """With its environment, unless it was killed for not answering."""
    monkeypatch.setattr(gvisor_sandbox, "PATIENCE_SECONDS", 0)
    async with running(tmp_path, monkeypatch) as (command, guest, _, sentry, slot):
        if by_us:
            sentry.kill()
        guest.end.close()
        with trio.fail_after(60), pytest.raises(SandboxLost):
            await command.wait_exit()
        assert slot.losses == (0 if by_us else 1)


async def test_of_a_sentry_that_was_killed_for_memory_only_the_counter_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the verdict is the counters', and the end of the channel says nothing."""
    async with running(tmp_path, monkeypatch) as (command, guest, counted, _, slot):
        counted.write(oom=3, cpu=100)
        guest.end.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(command.wait_exit)
            await command.wait_empty()
            await trio.testing.wait_all_tasks_blocked()
            assert command.counters().oom_kill == 3
            nursery.cancel_scope.cancel()
        assert slot.losses == 0


async def test_a_guest_that_does_not_get_quiet_is_killed_by_its_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gvisor_sandbox, "PATIENCE_SECONDS", 0)
    async with running(tmp_path, monkeypatch) as (command, guest, counted, sentry, _):
        command.kill()
        assert await guest.next() == frames.Kill(1)
        await command.wait_empty()
        assert counted.files["leaf_kill"].read_text() == "1"
        assert sentry.is_gone
