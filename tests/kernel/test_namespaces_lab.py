"""The mechanism on a real systemd and a real kernel: what it starts, measures, ends and leaves."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio

from sbxd.jail.frames import Run, RunFailed
from sbxd.launcher.kernel import hostpaths
from sbxd.mechanism.namespaces_sandbox import PARKED_LOST_MAX, NamespacesSandbox
from sbxd.mechanism.protocol import (
    CommandExit,
    CommandNotStarted,
    CommandSpec,
    MechanismError,
    SandboxLost,
    SlotProfile,
    StartFailure,
)
from sbxd.mechanism.starting import NeverReleased
from tests.kernel import launcher_subject as subject
from tests.kernel.launcher_subject import ENVIRONMENT, LIMITS, Launcher
from tests.pacing import next_look

pytestmark = pytest.mark.needs("cgroup2", "idmap", "image", "loop", "root", "systemd")
SHOWN = (
    "Slice,Delegate,KillSignal,CollectMode,RuntimeMaxUSec,TimeoutStopUSec,OOMPolicy,ActiveState,"
    "MemorySwapMax"
)
limited = pytest.mark.needs("limits", "nsdelegate")


@pytest.fixture(scope="module")
def image() -> str:
    return subject.unpacked_image()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with subject.launcher(tmp_path_factory.mktemp("launcher")) as running:
        yield running


@pytest.fixture
def own_launcher(tmp_path: Path) -> Iterator[Launcher]:
    with subject.launcher(tmp_path) as running:
        yield running


def box(slot: NamespacesSandbox) -> Path:
    return Path(hostpaths.scope_directory(slot.environment_id)) / "box"


def processes(group: Path) -> list[int]:
    """All of them, at or below. (PID 1 removes the cgroups of a scope that has become empty.)"""
    found = []
    for file in group.rglob("cgroup.procs"):
        with suppress(OSError):
            found += [int(pid) for pid in file.read_text().split()]
    return found


async def test_a_command_runs_as_the_workload_and_its_streams_are_its_own(
    launcher: Launcher, image: str
) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        script = "cat; id -u; pwd; echo problem >&2; exit 3"
        done = await subject.run(slot, "sh", "-c", script, stdin=b"given\n")
        assert done.end == CommandExit(exit_code=3, signal=None)
        assert done.stdout == b"given\n10001\n/workspace\n"
        assert done.stderr == b"problem\n"


async def test_a_command_may_reopen_its_streams_by_path(launcher: Launcher, image: str) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        done = await subject.run(slot, "sh", "-c", "echo a > /dev/stdout; echo b > /dev/stderr")
        assert (done.stdout, done.stderr) == (b"a\n", b"b\n")


async def test_death_by_its_own_signal_is_told_apart(launcher: Launcher, image: str) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        killed = await subject.run(slot, "sh", "-c", "kill -9 $$")
        assert killed.end == CommandExit(exit_code=None, signal=9)
        assert (await subject.run(slot, "sh", "-c", "exit 137")).end.exit_code == 137


@pytest.mark.parametrize(
    ("argv", "directory", "failure"),
    [
        (b"no-such-program", b".", StartFailure.NOT_FOUND),
        (b"/no/such/program", b".", StartFailure.NOT_FOUND),
        (b"/etc/passwd", b".", StartFailure.NOT_EXECUTABLE),
        (b"/etc", b".", StartFailure.NOT_EXECUTABLE),
        (b"true", b"missing", StartFailure.BAD_WORKING_DIRECTORY),
        (b"true", b"../etc", StartFailure.BAD_WORKING_DIRECTORY),
    ],
)
async def test_a_command_that_cannot_start_is_a_typed_refusal_and_the_next_one_runs(
    launcher: Launcher, image: str, argv: bytes, directory: bytes, failure: StartFailure
) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        with pytest.raises(CommandNotStarted) as caught:
            await slot.start(CommandSpec((argv,), ENVIRONMENT, directory, b""))
        assert caught.value.failure is failure
        assert (await subject.run(slot, "true")).end.exit_code == 0


@pytest.mark.parametrize("deaths", [1, PARKED_LOST_MAX, PARKED_LOST_MAX + 1])
async def test_a_process_that_dies_as_a_command_takes_it_is_replaced_so_often(
    launcher: Launcher, image: str, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        assert (await subject.run(slot, "true")).end.exit_code == 0
        say, left = slot._init.run, [deaths]

        async def say_to_the_dead(run: Run, streams: Sequence[int]) -> RunFailed | None:
            if left[0]:
                left[0] -= 1
                leaf = box(slot) / f"exec-{run.number}"
                (leaf / "cgroup.kill").write_text("1")
                while processes(leaf):
                    await next_look()
            return await say(run, streams)

        monkeypatch.setattr(slot._init, "run", say_to_the_dead)
        # What would be there twice if anything had been executed.
        script = "echo one >> file; cat file"
        if deaths > PARKED_LOST_MAX:
            with pytest.raises(NeverReleased):
                await subject.run(slot, "sh", "-c", script)
        else:
            done = await subject.run(slot, "sh", "-c", script)
            assert (done.end.exit_code, done.stdout) == (0, b"one\n")
        assert left == [0]


@pytest.mark.case("RES-06")
async def test_kill_reaches_what_left_the_session_and_is_proven(
    launcher: Launcher, image: str
) -> None:
    script = "for i in 1 2 3; do setsid sh -c '(sleep 1000 &) ; sleep 1000' & done; echo up; wait"
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        running = await subject.start(slot, "sh", "-c", script)
        assert await running.receive_output("stdout") == b"up\n"
        leaf = box(slot) / "exec-1"
        assert processes(leaf)
        running.kill()
        await running.wait_empty()
        assert processes(leaf) == []
        assert (await running.wait_exit()).signal == signal.SIGKILL
        await running.aclose()


async def test_each_command_has_a_leaf_of_its_own_and_gives_it_back(
    launcher: Launcher, image: str
) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        for _ in range(5):
            assert (await subject.run(slot, "true")).end.exit_code == 0
        await subject.run(slot, "true")
        leaves = {path.name for path in box(slot).glob("exec-*")}
        assert len(leaves) <= 3
        assert "exec-1" not in leaves


async def test_only_the_files_that_init_needs_belong_to_it(launcher: Launcher, image: str) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        foreign = {
            str(path.relative_to(box(slot)))
            for path in [box(slot), *box(slot).rglob("*")]
            if path.stat().st_uid != 0
        }
        assert foreign == {"cgroup.procs", "exec-1/cgroup.procs"}
        owner = (box(slot) / "cgroup.procs").stat().st_uid
        assert owner >= 1_879_048_192 + 65_536


async def test_the_scope_holds_no_process_of_its_own_and_is_what_was_asked_for(
    launcher: Launcher, image: str
) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        assert (box(slot).parent / "cgroup.procs").read_text() == ""
        shown = await trio.run_process(
            ["systemctl", "show", slot.scope, "-p", SHOWN],
            capture_stdout=True,
        )
        values = dict(line.split("=", 1) for line in shown.stdout.decode().splitlines())
        assert values == {
            "Slice": "sbx.slice",
            "Delegate": "yes",
            "KillSignal": "9",
            "CollectMode": "inactive-or-failed",
            "RuntimeMaxUSec": "10min",
            "TimeoutStopUSec": "1s",
            "OOMPolicy": "continue",
            "ActiveState": "active",
            "MemorySwapMax": "0",
        }


async def test_destroy_leaves_nothing_and_may_be_repeated(launcher: Launcher, image: str) -> None:
    async with subject.mechanism(launcher) as opened:
        async with subject.sandbox(opened, image) as slot:
            seen = await subject.left_of(opened, slot.environment_id)
            assert {"cgroup", "process", "scope", "uid_block", "volume"} <= set(seen)
            await subject.start(slot, "sleep", "1000")
            await slot.destroy()
            assert await subject.left_of(opened, slot.environment_id) == ()
        await slot.destroy()
        await opened.destroy_orphan(slot.environment_id)
        with pytest.raises(SandboxLost):
            await subject.start(slot, "true")


async def test_a_slot_is_handed_out_once(launcher: Launcher, image: str) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        with pytest.raises(MechanismError) as caught:
            await slot.assign(LIMITS)
        assert caught.value.step == "legality"
        assert (await subject.run(slot, "true")).end.exit_code == 0


async def test_an_image_that_is_not_unpacked_is_a_failure_that_leaves_nothing(
    launcher: Launcher,
) -> None:
    environment_id = subject.fresh_id()
    profile = SlotProfile("sha256:" + "0" * 64, LIMITS)
    async with subject.mechanism(launcher) as opened:
        with pytest.raises(MechanismError) as caught:
            await opened.prepare(environment_id, profile, back_stop_seconds=60)
        assert caught.value.step == "image"
        assert await subject.left_of(opened, environment_id) == ()


@pytest.mark.parametrize("delay_ms", [0, 2, 10, 25, 40, 60, 90, 150, 250])
async def test_a_cancelled_preparation_leaves_nothing(
    launcher: Launcher, image: str, delay_ms: int
) -> None:
    environment_id = subject.fresh_id()
    async with subject.mechanism(launcher) as opened:
        with trio.move_on_after(delay_ms / 1000):
            await opened.prepare(environment_id, SlotProfile(image, LIMITS), back_stop_seconds=60)
            return  # it was faster
        assert await subject.left_of(opened, environment_id) == ()


@pytest.mark.parametrize("process", ["init", "steward"])
async def test_a_sandbox_that_loses_a_process_says_which(
    launcher: Launcher, image: str, process: str
) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        running = await subject.start(slot, "sleep", "1000")
        (pid,) = processes(box(slot) / process)
        os.kill(pid, signal.SIGKILL)
        assert await slot.wait_lost() == process
        if process == "init":
            with pytest.raises(SandboxLost):
                await running.wait_exit()
            await running.wait_empty()
        await running.aclose()


async def test_the_end_of_the_daemons_channel_ends_everything(
    own_launcher: Launcher, image: str
) -> None:
    async with subject.mechanism(own_launcher) as opened:
        slot = await opened.prepare(
            subject.fresh_id(), SlotProfile(image, LIMITS), back_stop_seconds=600
        )
        await slot.assign(LIMITS)
        await subject.start(slot, "sleep", "1000")
    async with subject.mechanism(own_launcher) as opened:
        assert await subject.left_of(opened, slot.environment_id) == ()


async def test_the_death_of_the_launcher_ends_everything_and_its_successor_finds_the_rest(
    own_launcher: Launcher, image: str, tmp_path: Path
) -> None:
    async with subject.mechanism(own_launcher) as opened:
        slot = await opened.prepare(
            subject.fresh_id(), SlotProfile(image, LIMITS), back_stop_seconds=600
        )
        await slot.assign(LIMITS)
        running = await subject.start(slot, "sleep", "1000")
        own_launcher.kill()
        await opened.wait_lost()
        assert await slot.wait_lost() == "launcher"
        await running.wait_empty()
        await subject.until(lambda: not processes(box(slot)))
        with pytest.raises(MechanismError):
            await slot.destroy()
    second = tmp_path / "second"
    second.mkdir()
    with subject.launcher(second) as successor:
        async with subject.mechanism(successor) as opened:
            assert "uid_block" in await subject.left_of(opened, slot.environment_id)
            await opened.destroy_orphan(slot.environment_id)
            assert await subject.left_of(opened, slot.environment_id) == ()


async def test_many_environments_at_once_leave_nothing_and_no_descriptor(
    own_launcher: Launcher, image: str
) -> None:
    ids = [subject.fresh_id() for _ in range(12)]
    pid = own_launcher.process.pid
    async with subject.mechanism(own_launcher) as opened:

        async def cycle(environment_id: str) -> None:
            async with subject.sandbox(opened, image) as slot:
                ids.append(slot.environment_id)
                assert (await subject.run(slot, "true")).end.exit_code == 0

        await cycle("")
        theirs = len(os.listdir(f"/proc/{pid}/fd"))
        ours = len(os.listdir("/proc/self/fd"))
        limiter = trio.CapacityLimiter(4)

        async def admitted(environment_id: str) -> None:
            async with limiter:
                await cycle(environment_id)

        async with trio.open_nursery() as nursery:
            for environment_id in ids[:12]:
                nursery.start_soon(admitted, environment_id)
        for environment_id in ids:
            assert await subject.left_of(opened, environment_id) == ()
        assert len(os.listdir(f"/proc/{pid}/fd")) <= theirs
        assert len(os.listdir("/proc/self/fd")) <= ours


async def test_a_limit_without_a_controller_is_reported(launcher: Launcher, image: str) -> None:
    root = Path(hostpaths.CGROUP_ROOT)
    has = set((root / "cgroup.controllers").read_text().split())
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        expected = tuple(name for name in ("memory", "pids", "cpu") if name not in has)
        assert slot.unenforced_limits == expected
        done = await subject.run(slot, "true")
        assert (done.counters.pids_peak is None) == ("pids" not in has)
        assert done.counters.cpu_usage_us is not None


@limited
async def test_an_allocator_is_killed_whole_with_the_kernels_evidence(
    launcher: Launcher, image: str
) -> None:
    code = "a=[]\nwhile 1: a.append(bytearray(1<<20)); print(len(a), flush=True)"
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        done = await subject.run(slot, "python3", "-c", code)
        assert done.end.signal == signal.SIGKILL
        assert done.counters.oom_kill
        assert done.counters.memory_peak_bytes == LIMITS.memory_bytes
        assert int(done.stdout.split()[-1]) > 48
        after = await subject.run(slot, "true")
        assert after.end.exit_code == 0
        assert after.counters.oom_kill == 0


@limited
async def test_a_child_that_is_killed_for_memory_takes_its_parent_with_it(
    launcher: Launcher, image: str
) -> None:
    hog = "a=[]\nwhile 1: a.append(bytearray(1<<20))"
    code = f"python3 -c '{hog}' & wait; echo survived; sleep 1000"
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        done = await subject.run(slot, "sh", "-c", code)
        assert done.end.signal == signal.SIGKILL
        assert done.counters.oom_kill
        assert b"survived" not in done.stdout


@limited
async def test_refused_forks_are_counted_and_wake_who_waits(launcher: Launcher, image: str) -> None:
    code = (
        "import os, time\n"
        "try:\n"
        "  while os.fork(): pass\n"
        "except OSError: print('refused', flush=True)\n"
        "time.sleep(1000)"
    )
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        running = await subject.start(slot, "python3", "-c", code)
        counters = running.counters()
        while not counters.pids_max_events:
            counters = await running.wait_event()
        assert counters.pids_peak == LIMITS.pids_max
        assert await running.receive_output("stdout") == b"refused\n"
        running.kill()
        await running.wait_empty()
        await running.aclose()
        assert (await subject.run(slot, "true")).counters.pids_max_events == 0


@limited
async def test_an_assignment_narrows_the_box_and_its_leaf(launcher: Launcher, image: str) -> None:
    smaller = msgspec.structs.replace(LIMITS, memory_bytes=64 << 20, pids_max=8)
    async with subject.mechanism(launcher) as opened:
        slot = await opened.prepare(
            subject.fresh_id(), SlotProfile(image, LIMITS), back_stop_seconds=600
        )
        await slot.assign(smaller)
        for leaf in ("exec-1", "exec-2"):
            running = await subject.start(slot, "sleep", "1000")
            assert (box(slot) / leaf / "pids.max").read_text() == "8\n"
            assert (box(slot) / leaf / "memory.max").read_text() == f"{64 << 20}\n"
            running.kill()
            await running.wait_empty()
            await running.aclose()
        assert int((box(slot) / "memory.max").read_text()) == (64 + 96) << 20
        await slot.destroy()


@pytest.mark.case("RES-04")
@limited
async def test_a_workspace_is_limited_in_bytes_and_inodes(launcher: Launcher, image: str) -> None:
    async with subject.mechanism(launcher) as opened, subject.sandbox(opened, image) as slot:
        full = await subject.run(slot, "sh", "-c", "head -c 64M /dev/zero > big")
        assert full.end.exit_code != 0
        many = await subject.run(slot, "sh", "-c", "rm big; for i in $(seq 2000); do :> $i; done")
        assert many.end.exit_code != 0
        assert b"space" in full.stderr + many.stderr or b"quota" in full.stderr + many.stderr


def test_the_launcher_refuses_a_peer_that_is_not_the_services_user(
    own_launcher: Launcher,
) -> None:
    code = (
        "import os, socket, sys\n"
        "os.setresgid(65534, 65534, 65534); os.setresuid(*[int(sys.argv[2])] * 3)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect(sys.argv[1])\n"
        "s.settimeout(10)\n"
        "try: s.send(b'x'); print(len(s.recv(1)))\n"
        "except OSError as problem: print(type(problem).__name__)\n"
    )
    os.chmod(own_launcher.socket, 0o666)
    for directory in Path(own_launcher.socket).parents:
        if str(directory).startswith("/tmp/"):
            directory.chmod(0o755)
    answer = subprocess.run(
        ["python3", "-c", code, own_launcher.socket, "65534"], capture_output=True, check=True
    )
    assert answer.stdout.strip() in (b"0", b"ConnectionResetError", b"BrokenPipeError")
    assert own_launcher.process.poll() is None
