"""The gvisor mechanism from the host's side: who its processes are, and what a lost Sentry means.

The contract suite and the gates run in the same lane; here is what only this mechanism has.
"""

import os
import select
import signal
from pathlib import Path

import pytest
import trio

from sbxd.client.admin import connect_admin
from sbxd.port.command import KillReason
from sbxd.port.errors import (
    ExecutionRejected,
    ExecutionUnavailable,
    RejectedCode,
    UnavailableCode,
)
from tests.pacing import next_look
from tests.redteam.live import ADMIN_SOCKET, Live, live, until
from tests.redteam.operator import events, now

pytestmark = [pytest.mark.needs("lane-gvisor", "daemon")]

SLICE = Path("/sys/fs/cgroup/sbx.slice")
INITIAL_MAP = "0 0 4294967295"
# In this time a command has started and is seen to, and its kernel is stopped under it.
HANG_SECONDS = 10


def box(environment: Live) -> Path:
    return SLICE / f"sbx-{environment.handle.environment_id}.scope" / "box"


def processes(group: Path) -> list[int]:
    return [
        int(word)
        for file in sorted(group.rglob("cgroup.procs"))
        for word in file.read_text().split()
    ]


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def uid_map(pid: int) -> str:
    return " ".join(Path(f"/proc/{pid}/uid_map").read_text().split())


def interfaces(text: str) -> list[str]:
    """The names in a /proc/net/dev."""
    return [line.split(":")[0].strip() for line in text.splitlines()[2:]]


def uid(pid: int) -> int:
    return int(status(pid)["Uid"].split()[0])


def sentry(environment: Live) -> int:
    """The parent of the stubs: of the largest uid of the block, the first one."""
    (leaf,) = box(environment).glob("exec-*")
    pids = processes(leaf)
    highest = max(uid(pid) for pid in pids)
    return next(pid for pid in pids if uid(pid) == highest)


async def test_the_daemon_tells_which_mechanism_and_which_runsc_it_uses() -> None:
    async with connect_admin(ADMIN_SOCKET) as admin:
        described = await admin.describe()
    assert described.mechanism == "gvisor"
    (item,) = [item for item in described.posture if item.name == "runsc"]
    assert item.state == "ok"
    assert "sha256 " in item.detail


@pytest.mark.gate("gate.sandbox.escape_denied")
async def test_no_process_of_an_environment_is_in_the_hosts_user_namespace() -> None:
    assert uid_map(os.getpid()) == INITIAL_MAP, "the control: this process is"
    async with live() as environment:
        await environment.run("true")
        pids = processes(box(environment))
        assert len(pids) >= 3  # steward, gofer, Sentry
        for pid in pids:
            assert uid_map(pid) != INITIAL_MAP
            assert uid(pid) >= 1879048192


@pytest.mark.gate("gate.sandbox.escape_denied")
async def test_the_sentry_has_a_uid_of_its_own_and_no_capability() -> None:
    async with live() as one, live() as two:
        uids = {uid(sentry(one)), uid(sentry(two))}
        assert len(uids) == 2
        fields = status(sentry(one))
        assert {fields[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"


@pytest.mark.gate("gate.sandbox.network_denied")
async def test_the_sentry_has_no_interface_and_its_root_is_empty() -> None:
    async with live() as environment:
        pid = sentry(environment)
        assert interfaces(text_of(f"/proc/{pid}/net/dev")) == ["lo"]
        assert set(os.listdir(f"/proc/{pid}/root")) <= {"etc", "proc"}
        result = await environment.run("cat", "/proc/net/dev")
        assert interfaces(result.stdout.decode()) in ([], ["lo"])


def text_of(path: str) -> str:
    return Path(path).read_text()


async def test_runsc_leaves_no_state_on_the_host() -> None:
    async with live() as environment:
        await environment.run("true")
        assert not [name for name in os.listdir("/run") if "runsc" in name]
        assert not [name for name in os.listdir("/tmp") if "runsc" in name or "gvisor" in name]


async def run_until_refused(environment: Live) -> None:
    while True:
        await environment.run("true")


async def wait_file(environment: Live, name: str) -> None:
    """Until the workspace has it."""
    with trio.fail_after(30):
        while not [e for e in await environment.workspace.listdir(".") if e.path == name]:
            await next_look()


async def stop_once_started(environment: Live, pid: int) -> int:
    """Stop the Sentry when its command has made the file `started`: a pidfd, which tells of its
    end."""
    await wait_file(environment, "started")
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGSTOP)
    assert not has_ended(pidfd), "the control: a stopped one has not"
    return pidfd


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def wait_ended(pidfd: int) -> None:
    """A killed process leaves its cgroup before it is seen to have ended, and its parent reaps it
    whenever it comes to that."""
    with trio.fail_after(30):
        await trio.lowlevel.wait_readable(pidfd)
    os.close(pidfd)


async def test_a_sentry_that_ends_while_nothing_runs_is_a_lost_environment() -> None:
    async with live() as environment:
        os.kill(sentry(environment), signal.SIGKILL)
        with pytest.raises((ExecutionUnavailable, ExecutionRejected)) as caught:
            await run_until_refused(environment)
        # The second when the end was complete before the command came.
        assert caught.value.code in (
            UnavailableCode.ENVIRONMENT_LOST,
            RejectedCode.ENVIRONMENT_GONE,
        )


async def test_a_sentry_that_is_killed_under_a_command_is_recorded_as_lost() -> None:
    since = now()
    async with live() as environment:
        codes = []

        async def work() -> None:
            with pytest.raises(ExecutionUnavailable) as caught:
                await environment.run("sh", "-c", "touch started; sleep 100")
            codes.append(caught.value.code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            await wait_file(environment, "started")
            os.kill(sentry(environment), signal.SIGKILL)
        assert codes == [UnavailableCode.ENVIRONMENT_LOST]
        await until(lambda: events(since, "EnvironmentLost"))
    assert [
        each["SBX_PART"]
        for each in events(since, "EnvironmentLost")
        if each["SBX_ENVIRONMENT_ID"] == environment.handle.environment_id
    ] == ["init"]


async def test_a_guest_that_does_not_answer_is_killed_whole_and_replaced() -> None:
    """The workspace outlives it, /tmp does not; limits and filter are those of before."""
    async with live() as environment:
        first = await environment.run("sh", "-c", "echo kept > file; echo lost > /tmp/file")
        assert first.exit_code == 0
        before = sentry(environment)
        results = []

        async def hang() -> None:
            script = "touch started; sleep 100"
            results.append(await environment.run("sh", "-c", script, timeout_seconds=HANG_SECONDS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang)
            stopped = await stop_once_started(environment, before)
        (result,) = results
        assert result.killed_by is KillReason.TIMEOUT
        await wait_ended(stopped)
        after = await environment.run("sh", "-c", "cat file; ls /tmp; ulimit -p; echo more >> file")
        assert after.stdout == b"kept\n63\n", after
        assert [change.path for change in after.files_changed] == ["file"]
        assert sentry(environment) != before


async def test_an_environment_that_ends_while_a_sentry_boots_leaves_nothing() -> None:
    async with live() as environment:
        place, stopped = box(environment), sentry(environment)
        results = []

        async def hang() -> None:
            script = "touch started; sleep 100"
            results.append(await environment.run("sh", "-c", script, timeout_seconds=HANG_SECONDS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang)
            os.close(await stop_once_started(environment, stopped))
        assert results[0].killed_by is KillReason.TIMEOUT
        assert is_there(place), "the control: it was there"
    assert not is_there(place)


def is_there(place: Path) -> bool:
    return place.exists()


@pytest.mark.gate("gate.sandbox.escape_denied")
async def test_a_command_reaches_neither_process_1_nor_its_channel() -> None:
    async with live() as environment:
        found = await environment.look(
            """
import signal
tried = {f"open {name}": attempt(open, f"/proc/1/{name}", "rb") for name in
         ("mem", "fd/3", "fd/4", "exe", "cwd", "root", "io")}
tried["kill"] = attempt(os.kill, 1, signal.SIGKILL)
tried["write"] = attempt(open, "/proc/1/oom_score_adj", "wb")
tried["control"] = attempt(open, "/proc/self/status", "rb")
tried["own"] = listed(os.listdir("/proc/self/fd"))
answer(tried)
"""
        )
        assert found.pop("control") == "ok"
        assert found.pop("own") == "0 1 2 3"  # the last is the directory that is read
        assert "ok" not in found.values(), found
        assert (await environment.run("true")).exit_code == 0


async def test_forks_beyond_the_limit_are_refused_and_the_next_command_is_whole() -> None:
    async with live() as environment:
        source = """
import os
children = []
try:
    while len(children) < 500:
        pid = os.fork()
        if pid == 0:
            import time
            time.sleep(60)
        children.append(pid)
except BlockingIOError:
    pass
print(len(children))
"""
        result = await environment.python(source)
        assert (result.exit_code, result.stdout) == (0, b"63\n"), result
        again = await environment.python(source)
        assert again.stdout == b"63\n", "nothing of the first is left"


async def test_what_a_command_leaves_in_tmp_is_there_for_the_next_and_for_no_other() -> None:
    async with live() as one, live() as two:
        await one.run("sh", "-c", "echo mine > /tmp/file")
        assert (await one.run("cat", "/tmp/file")).stdout == b"mine\n"
        assert (await two.run("cat", "/tmp/file")).exit_code == 1


@pytest.mark.case("RES-20")
async def test_a_guest_whose_files_are_all_open_is_replaced_and_the_next_command_runs() -> None:
    """A chain of directories holds a descriptor of the gofer for each level."""
    async with live() as environment:
        source = """
import os
depth = 0
try:
    while depth < 12_000:
        os.mkdir("d")
        os.chdir("d")
        depth += 1
except OSError:
    pass
print(depth)
"""
        result = await environment.python(source, timeout_seconds=120)
        assert result.exit_code == 0, result
        assert int(result.stdout) > 1000, "the control: there is a chain"
        for _ in range(2):
            assert (await environment.run("true")).exit_code == 0
